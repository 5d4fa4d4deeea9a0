"""Check this machine and a deployment's models before anything is started."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from serving.app import check_access, find_problems
from serving.commands.console import Console
from serving.commands.own_machine import with_access
from serving.engine.version import find_built_device, find_vllm_mismatch
from serving.engine_args import preload_libraries
from serving.local import ports
from serving.settings.finding import Finding, Severity
from serving.settings.gguf_files import is_gguf
from serving.settings.gpus import count_gpus
from serving.settings.model import (
    Environment,
    Settings,
    SettingsError,
    is_local_path,
)
from serving.settings.model_files import weigh_model
from serving.settings.number_format import with_fast_format

_PYTHON: Final = ((3, 11), (3, 14))
_RAY: Final = "2.60.0"
_REPLICA_BYTES: Final = 3 << 30
"""Memory of one replica's three processes beside weights and KV cache, measured."""

_RAY_BYTES: Final = 2 << 30
"""Memory of Ray's and Serve's own processes on the head node, measured."""

_SHARED_MEMORY_BYTES: Final = 256 << 20
_CUDA_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")


def doctor(settings: Settings) -> int:
    """Print one line per check.

    Returns:
        The exit code: 1 if something would keep the deployment from working.
    """
    return report(examine(settings))


def report(findings: list[Finding]) -> int:
    """Print findings, one line each.

    Returns:
        The exit code: 1 if any finding is an error.
    """
    console = Console()
    for finding in findings:
        console.say(f"{finding.severity:<8} {finding}")
    num_errors = sum(finding.severity == "error" for finding in findings)
    console.say(f"{num_errors} error(s)" if num_errors else "No errors.")
    return 1 if num_errors else 0


def examine(settings: Settings) -> list[Finding]:
    """Run every check.

    Args:
        settings: The deployment to check for.

    Returns:
        Findings, machine first, models last.
    """
    chosen: list[Finding] = []
    settings = with_fast_format(settings, chosen.append)
    return [
        *_check_python(),
        *_check_packages(),
        *_check_libraries(settings),
        *check_room(settings),
        *_check_ports(settings),
        *settings.findings,
        *chosen,
        *find_problems(settings),
        *_check_access(settings),
        *_check_token(settings),
    ]


def _check_access(settings: Settings) -> Iterator[Finding]:
    try:
        check_access(with_access(settings))
    except SettingsError as error:
        for problem in error.problems:
            yield Finding("error", *problem.split(": ", 1))


def _check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    lowest, beyond = (".".join(map(str, bound)) for bound in _PYTHON)
    if _PYTHON[0] <= sys.version_info[:2] < _PYTHON[1]:
        yield Finding("ok", "python", version)
    else:
        yield Finding(
            "error", "python", f"{version}; install {lowest} or newer, below {beyond}"
        )


def _check_packages() -> Iterator[Finding]:
    mismatch = find_vllm_mismatch()
    if mismatch is not None:
        yield Finding("error", "vllm", mismatch)
    else:
        yield Finding("ok", "vllm", "the supported version")
    ray = _version("ray")
    if ray == _RAY:
        yield Finding("ok", "ray", ray)
    else:
        yield Finding("error", "ray", f"{ray or 'missing'}; install ray[serve]=={_RAY}")
    torch = _version("torch")
    yield Finding(
        "ok" if torch else "error", "torch", torch or "missing; run `make serve`"
    )
    if torch is not None and "+cpu" in torch:
        for package in _CUDA_COMPANIONS:
            if _version(package) is not None:
                yield Finding(
                    "error",
                    package,
                    "is built for CUDA and breaks transformers beside a CPU torch; "
                    f"run `pip uninstall {package}`",
                )
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "tetris" in plugins.names:
        yield Finding("ok", "plugin", "registered with vLLM")
    else:
        yield Finding(
            "error",
            "plugin",
            "vLLM does not know this package; install it with `pip install -e .`",
        )


def check_room(settings: Settings) -> Iterator[Finding]:
    """Compare what the replicas will take with what this machine has.

    Args:
        settings: The deployment.

    Yields:
        Findings; an error only if not even `replicas.min` fit.
    """
    engine, replicas = settings.engine, settings.replicas
    built = find_built_device()
    if built is not None and built != engine.device:
        yield Finding(
            "error",
            "engine.device",
            f"is {engine.device}, and the vLLM that is installed here is for a "
            f"{built}: set engine.device: {built}, or set up anew with "
            f"TETRIS_DEVICE={engine.device}",
        )
    if engine.device == "gpu":
        stages = engine.extra.get("pipeline_parallel_size", 1)
        each = engine.tensor_parallel_size * stages * replicas.num_gpus
        try:
            num_gpus = count_gpus()
        except Exception as error:  # NVML raises whatever the driver's state suggests.
            yield Finding(
                "error",
                "engine.device",
                f"no GPU found ({error}); install the driver, or set engine.device: "
                "cpu",
            )
        else:
            yield _check_count(settings, each, num_gpus, "GPU")
    else:
        # As Ray counts them; it does not ask which of them this process may use.
        num_cores = os.cpu_count() or 1
        yield _check_count(settings, replicas.num_cpus, num_cores, "CPU")
    yield from _check_memory(settings)


def _check_count(settings: Settings, each: float, available: int, what: str) -> Finding:
    replicas = settings.replicas
    own = f"replicas.num_{what.lower()}s"
    if settings.engine.tensor_parallel_size > 1:
        own = "engine.tensor_parallel_size"
    least = max(1, replicas.min)
    severity: Severity = "error"
    wanted, name = least, "replicas.min" if least > 1 else own
    if least * each <= available:
        severity, wanted, name = "warning", replicas.max, "replicas.max"
    if wanted * each <= available:
        return Finding("ok", "device", f"{available} {what}(s)")
    return Finding(
        severity,
        name,
        f"{wanted} replica(s) want {wanted * each:g} {what}s, this machine has "
        f"{available}; lower {' or '.join(dict.fromkeys((name, own)))}",
    )


def _check_libraries(settings: Settings) -> Iterator[Finding]:
    if settings.engine.device == "gpu":
        return
    libraries = {library.name for library in preload_libraries()}
    if "libiomp5.so" in libraries:
        yield Finding("ok", "libiomp5", "will be preloaded")
    else:
        yield Finding(
            "warning",
            "libiomp5",
            "missing: drafting will be slow; run `pip install intel-openmp`",
        )
    if not any("tcmalloc" in library for library in libraries):
        yield Finding(
            "note", "tcmalloc", "missing; `apt install libtcmalloc-minimal4` may help"
        )


def _check_memory(settings: Settings) -> Iterator[Finding]:
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    if shared is not None and shared < _SHARED_MEMORY_BYTES:
        yield Finding(
            "error",
            "/dev/shm",
            f"{_gib(shared)} free, Ray needs {_gib(_SHARED_MEMORY_BYTES)}; in a "
            "container raise its shm size",
        )
    if settings.engine.device == "gpu":
        return
    replica = (
        (settings.engine.kv_cache_memory_bytes or 0) + _weigh(settings) + _REPLICA_BYTES
    )
    available = psutil.virtual_memory().available
    wanted = _RAY_BYTES + replica * settings.replicas.max
    text = f"{_gib(available)} available, {_gib(wanted)} wanted by {{}} replica(s)"
    if wanted <= available:
        yield Finding("ok", "memory", text.format(settings.replicas.max))
    elif _RAY_BYTES + replica * settings.replicas.min <= available:
        yield Finding(
            "warning",
            "memory",
            text.format(settings.replicas.max) + "; lower replicas.max",
        )
    else:
        yield Finding(
            "error",
            "memory",
            text.format(settings.replicas.max)
            + "; lower engine.kv_cache_memory_bytes or use a smaller model",
        )


def _check_ports(settings: Settings) -> Iterator[Finding]:
    http = settings.http
    try:
        free = ports.is_free(http.host, http.port)
    except ValueError as error:
        yield Finding("error", "http.host", f"{error}; set 127.0.0.1")
        return
    if free:
        yield Finding("ok", "http.port", f"{http.port} is free")
    else:
        owner = ports.owner_of(http.port)
        yield Finding(
            "error",
            "http.port",
            f"{http.port} is in use{f' by {owner}' if owner else ''}; choose another "
            "one with --port",
        )
    for name, port in (
        ("dashboard_port", http.dashboard_port),
        ("metrics_port", http.metrics_port),
    ):
        free = ports.is_free("127.0.0.1", port)
        message = f"{port} is free" if free else f"{port} is in use, the next is taken"
        yield Finding("ok" if free else "note", f"http.{name}", message)


def _check_token(settings: Settings) -> Iterator[Finding]:
    models = (settings.model.target, settings.model.draft)
    from_hub = any(
        model and not is_local_path(model) and not is_gguf(model) for model in models
    )
    if from_hub and not Environment.read().has_hf_token:
        yield Finding(
            "note", "HF_TOKEN", "not set; gated models cannot be downloaded without it"
        )


def _weigh(settings: Settings) -> int:
    """Return the bytes of both models' weights in memory."""
    names = settings.model.target, settings.model.draft
    dtype = settings.engine.dtype
    return sum(weigh_model(name, dtype) for name in names if name is not None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
