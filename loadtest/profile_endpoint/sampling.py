"""Samples processes with py-spy, and weighs the samples by the kernel's clocks."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.http_bench.errors import LoadTestError
from loadtest.http_bench.processes import find_processes, role_of

from .stacks import Stack, group_of, read_stacks

FRONT_ROLES = ("server", "proxy", "ingress", "replica", "controller")
"""Event loops, which work for parts of a millisecond at a time. py-spy asks first which
threads run and then looks at their stacks; by then they often sleep again. The lock of
the interpreter (GIL) tells who works there."""

MODEL_ROLES = ("engine", "worker")
"""Models, whose kernels run without that lock; they work for long at a time."""

SAMPLED_ROLES = FRONT_ROLES + MODEL_ROLES
"""Written in Python; the others get a line with their CPU time."""

NO_PYTHON = "outside Python (C++ of Ray and gRPC, uvloop, OpenMP)"

_START_S = 60.0
"""py-spy reads symbols first, which takes seconds for a process with torch in it."""

_REFUSED = ("Permission denied", "Operation not permitted", "EPERM", "ptrace")
_NOTHING = "No stack counts found"
"""What py-spy says of a process that slept all the time."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """A process's CPU clocks.

    Attributes:
        at_s: When they were read.
        total_s: Of the process, its ended threads included.
        by_thread_s: By the kernel's thread id.
    """

    at_s: float
    total_s: float
    by_thread_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ProcessProfile:
    """What one process did.

    Attributes:
        role: What it is for.
        pid: Its id.
        cores: CPU time per second.
        num_samples: Stacks taken of threads at work; 0 if it was not sampled.
        groups: `cores` by what was done, largest first.
        functions: `cores` by the innermost Python function, largest first.
    """

    role: str
    pid: int
    cores: float
    num_samples: int
    groups: Mapping[str, float]
    functions: Mapping[str, float]


def find_deployment(pid: int | None) -> list[tuple[str, psutil.Process]]:
    """Return role and process of all that a deployment consists of.

    Args:
        pid: What all of it descends from; None for every deployment on the machine.

    Raises:
        LoadTestError: If none of it can be sampled.
    """
    candidates = _find_on_machine() if pid is None else find_processes(pid)
    found = [
        (role, process)
        for role, process in candidates
        # A shell has the words of its command in its own command line.
        if role not in SAMPLED_ROLES or _is_python(process)
    ]
    if not any(role in SAMPLED_ROLES for role, _ in found):
        where = "on this machine" if pid is None else f"below process {pid}"
        raise LoadTestError(
            f"no deployment runs {where}; start one with `tetris-serve up`, or name "
            "its process with --pid"
        )
    return found


def profile(
    processes: Sequence[tuple[str, psutil.Process]],
    duration_s: int,
    rate_hz: int,
    folder: Path,
) -> list[ProcessProfile]:
    """Sample processes at the same time.

    Args:
        processes: Role and process; those of `SAMPLED_ROLES` are sampled.
        duration_s: How long.
        rate_hz: Samples per second and process.
        folder: For py-spy's files, `ROLE-PID.txt`.

    Returns:
        One for each process that lived through it, the busiest first.

    Raises:
        LoadTestError: If py-spy is missing or not allowed to.
    """
    command = [_find_py_spy(), "record", "--format=raw", "--threads", "--nolineno"]
    command += ["--full-filenames", f"--duration={duration_s}", f"--rate={rate_hz}"]
    # A process that is stopped for each sample works differently.
    command += ["--nonblocking"]
    folder.mkdir(parents=True, exist_ok=True)
    before = {process.pid: read_cpu(process) for _, process in processes}
    samplers: dict[int, tuple[subprocess.Popen[str], Path]] = {}
    try:
        for role, process in processes:
            if role not in SAMPLED_ROLES:
                continue
            output = folder / f"{role}-{process.pid}.txt"
            output.unlink(missing_ok=True)
            sampler = subprocess.Popen(
                [
                    *command,
                    *(["--gil"] if role in FRONT_ROLES else []),
                    f"--output={output}",
                    f"--pid={process.pid}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            samplers[process.pid] = sampler, output
        deadline_s = time.monotonic() + duration_s + _START_S
        for pid, (sampler, _) in samplers.items():
            _wait(sampler, pid, deadline_s)
    finally:
        for sampler, _ in samplers.values():
            sampler.kill()
            sampler.wait()
    profiles = []
    for role, process in processes:
        first, last = before[process.pid], read_cpu(process)
        if first is None or last is None:
            continue
        stacks = _read(samplers[process.pid][1]) if process.pid in samplers else []
        longest = 1 / (rate_hz * duration_s) if role in FRONT_ROLES else math.inf
        profiles.append(make_profile(role, process.pid, stacks, first, last, longest))
    return sorted(profiles, key=lambda one: -one.cores)


def make_profile(
    role: str,
    pid: int,
    stacks: Sequence[Stack],
    first: CpuTimes,
    last: CpuTimes,
    max_cores_per_sample: float = math.inf,
) -> ProcessProfile:
    """Share each thread's CPU time out among its stacks.

    The samples alone would not do: they hold no thread without Python, and a thread
    that waits for a core looks as busy as one that has it.

    Args:
        role: Of the process.
        pid: Of the process.
        stacks: Its samples.
        first: Its clocks before them.
        last: Its clocks after them.
        max_cores_per_sample: What a sample stands for at most, the rest of its thread's
            time being spent outside Python.
    """
    wall_s = last.at_s - first.at_s
    samples: Counter[int | None] = Counter()
    for stack in stacks:
        samples[stack.thread_id] += stack.num_samples
    groups: defaultdict[str, float] = defaultdict(float)
    functions: defaultdict[str, float] = defaultdict(float)
    for stack in stacks:
        thread = stack.thread_id
        if thread is None or thread not in last.by_thread_s or not stack.frames:
            continue  # It has ended, and its clock with it; or it runs no Python.
        used_s = last.by_thread_s[thread] - first.by_thread_s.get(thread, 0.0)
        weight = min(used_s / wall_s / samples[thread], max_cores_per_sample)
        groups[group_of(stack.frames)] += weight * stack.num_samples
        functions[str(stack.frames[-1])] += weight * stack.num_samples
    total = (last.total_s - first.total_s) / wall_s
    if stacks:
        groups[NO_PYTHON] = max(0.0, total - sum(groups.values()))
    return ProcessProfile(
        role,
        pid,
        total,
        samples.total(),
        _largest_first(groups),
        _largest_first(functions),
    )


def read_cpu(process: psutil.Process) -> CpuTimes | None:
    """Return a process's clocks; None if it has ended."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            threads = process.threads()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    by_thread = {one.id: one.user_time + one.system_time for one in threads}
    return CpuTimes(time.monotonic(), times.user + times.system, by_thread)


def _largest_first(cores: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(cores.items(), key=lambda item: -item[1]))


def _find_on_machine() -> Iterator[tuple[str, psutil.Process]]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            role = role_of(" ".join(process.cmdline()))
            if role != "other":
                yield role, process


def _is_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name.startswith("python")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _read(path: Path) -> list[Stack]:
    """Return what py-spy wrote; nothing for a process that slept all the time."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        return list(read_stacks(lines))


def _find_py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise LoadTestError(
            "py-spy is not installed; `make test` and `make loadtest` install it, or "
            f"{sys.executable} -m pip install py-spy"
        )
    return found


def _wait(sampler: subprocess.Popen[str], pid: int, deadline_s: float) -> None:
    """Wait for a sampler to end.

    Raises:
        LoadTestError: If it failed and the process it samples is still there.
    """
    try:
        _, errors = sampler.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise LoadTestError(f"py-spy does not come to an end with {pid}") from None
    if sampler.returncode == 0 or not psutil.pid_exists(pid):
        return
    if any(mark in errors for mark in _REFUSED):
        raise LoadTestError(
            f"py-spy may not look into process {pid}: run this as root (sudo), or "
            "allow it with `sysctl kernel.yama.ptrace_scope=0`, in a container with "
            "`--cap-add SYS_PTRACE`"
        )
    if _NOTHING not in errors:
        raise LoadTestError(f"py-spy failed with process {pid}:\n{errors.strip()}")
