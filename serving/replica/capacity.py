"""How much of the device is left to a replica: the CPU's cores, or the GPU.

Measured step times already tell the planner what it needs; these signals tell an
operator why steps have become slow. They are read every few seconds in the replica's
process, not in the engine's, so that no step waits for them. A signal that cannot be
read is left out; the others stay.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("ray.serve")

RETRY_PERIOD_S: Final = 60.0
"""After which a probe that failed is made anew: the fault may have passed."""


class Probe(Protocol):
    """Reads some signals."""

    def read(self) -> Mapping[str, float]:
        """Return shares, 0-1, by name; {} while there is nothing to compare with."""
        ...


@dataclass(frozen=True, slots=True)
class _CpuTimes:
    now_s: float
    busy_s: float
    stolen_s: float
    own_s: float


class CpuProbe:
    """Who uses the cores that this replica may run on, by psutil.

    Signals, as shares of those cores since the last reading:
        `cpu_own`: this replica's processes.
        `cpu_other`: other processes of this machine.
        `cpu_stolen`: other virtual machines of the host.
    """

    def __init__(self) -> None:
        """Look at this process and those it started."""
        self._process = psutil.Process()
        self._cores = sorted(os.sched_getaffinity(0))
        self._before: _CpuTimes | None = None

    def read(self) -> Mapping[str, float]:
        """Return the shares since the last reading."""
        before, now = self._before, self._read_times()
        self._before = now
        if before is None or now.now_s <= before.now_s:
            return {}
        core_s = (now.now_s - before.now_s) * len(self._cores)
        busy_s, own_s = now.busy_s - before.busy_s, now.own_s - before.own_s
        return {
            "cpu_own": _share(own_s, core_s),
            # Processes that ended since take their share of the machine with them.
            "cpu_other": _share(busy_s - max(own_s, 0.0), core_s),
            "cpu_stolen": _share(now.stolen_s - before.stolen_s, core_s),
        }

    def _read_times(self) -> _CpuTimes:
        by_core = psutil.cpu_times(percpu=True)
        cores = [by_core[core] for core in self._cores if core < len(by_core)]
        return _CpuTimes(
            now_s=time.monotonic(),
            busy_s=sum(core.user + core.nice + core.system for core in cores),
            stolen_s=sum(getattr(core, "steal", 0.0) for core in cores),
            own_s=sum(map(_cpu_s, self._family())),
        )

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


class NvmlProbe:
    """How busy the replica's GPUs are, by NVML; the busiest one counts.

    Signals, without those that driver or device cannot tell (a MIG instance knows no
    utilisation, an old driver no reasons for slow clocks):
        `gpu_busy`: share of the time in which some kernel ran.
        `gpu_memory`: share of the memory in use, by whomever.
        `gpu_throttled`: share of the GPUs that power or temperature slows down.
    """

    def __init__(self, device_ids: Sequence[str] = ()) -> None:
        """Open NVML.

        Args:
            device_ids: Indices or UUIDs; all GPUs of the node if empty.

        Raises:
            Exception: There is no NVML here, or no such GPU.
        """
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        ids = device_ids or [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self._handles = [self._open(device_id) for device_id in ids]
        self._reported: set[str] = set()

    def read(self) -> Mapping[str, float]:
        """Return the present shares.

        Raises:
            Exception: Not one of them can be read.
        """
        signals: dict[str, float] = {}
        errors: dict[str, Exception] = {}
        for name, read in (
            ("gpu_busy", self._read_busy),
            ("gpu_memory", self._read_memory),
            ("gpu_throttled", self._read_throttled),
        ):
            try:
                signals[name] = read()
            except Exception as error:
                errors[name] = error
        if not signals:
            raise next(iter(errors.values()))
        for name in errors.keys() - self._reported:
            _report(name, errors[name])
        self._reported |= errors.keys()
        return signals

    def _read_busy(self) -> float:
        read_rates = self._nvml.nvmlDeviceGetUtilizationRates
        return float(max(read_rates(one).gpu for one in self._handles)) / 100

    def _read_memory(self) -> float:
        memory = map(self._nvml.nvmlDeviceGetMemoryInfo, self._handles)
        return float(max(one.used / one.total for one in memory))

    def _read_throttled(self) -> float:
        slowdowns = self._slowdowns()
        read_reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons
        throttled = [bool(read_reasons(one) & slowdowns) for one in self._handles]
        return sum(throttled) / len(throttled)

    def _open(self, device_id: str) -> Any:
        if device_id.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(device_id))
        return self._nvml.nvmlDeviceGetHandleByUUID(device_id)

    def _slowdowns(self) -> int:
        nvml = self._nvml
        return int(
            nvml.nvmlClocksEventReasonSwPowerCap
            | nvml.nvmlClocksEventReasonSwThermalSlowdown
            | nvml.nvmlClocksEventReasonHwSlowdown
        )


class CapacityReader:
    """Reads all probes that work; one that fails is tried again now and then."""

    def __init__(
        self,
        probes: Mapping[str, Callable[[], Probe]],
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over how to make each probe, by what to call it; `read` makes them."""
        self._makers = dict(probes)
        self._clock = clock
        self._on_failure = on_failure
        self._probes: dict[str, Probe] = {}
        self._retry_at_s: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return all signals there are."""
        signals: dict[str, float] = {}
        for name, make in self._makers.items():
            retry_at_s = self._retry_at_s.get(name)
            if retry_at_s is not None and self._clock() < retry_at_s:
                continue
            try:
                if name not in self._probes:
                    self._probes[name] = make()
                signals |= self._probes[name].read()
                self._retry_at_s.pop(name, None)
            except Exception as error:
                self._on_failure()
                self._probes.pop(name, None)
                if retry_at_s is None:
                    _report(name, error)
                self._retry_at_s[name] = self._clock() + RETRY_PERIOD_S
        return signals


def capacity_reader(
    device: str,
    gpu_ids: Sequence[str] = (),
    on_failure: Callable[[], None] = lambda: None,
) -> CapacityReader:
    """Build the reader for a replica's process.

    Args:
        device: `cpu` or `gpu`.
        gpu_ids: Indices or UUIDs of the replica's GPUs; all of the node's if empty.
        on_failure: Called whenever a probe fails.
    """
    probes: dict[str, Callable[[], Probe]] = {"CPU": CpuProbe}
    if device == "gpu":
        probes["GPU"] = lambda: NvmlProbe(gpu_ids)
    return CapacityReader(probes, on_failure=on_failure)


def _report(name: str, error: Exception) -> None:
    logger.warning(
        "Capacity signals missing, which only metrics use: %s (%s: %s)",
        name,
        type(error).__name__,
        error,
    )


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0  # It has ended since it was listed.
    return float(times.user + times.system)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))
