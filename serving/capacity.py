"""How much of the device is left to a replica: the CPU's cores, or the GPU.

Measured step times already tell the planner what it needs; these signals tell an
operator why steps have become slow. They are read every few seconds in the replica's
process, not in the engine's, so that no step waits for them. Whatever cannot be read is
left out.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("ray.serve")


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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at this process and those it started."""
        self._clock = clock
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
            now_s=self._clock(),
            busy_s=sum(core.user + core.nice + core.system for core in cores),
            stolen_s=sum(getattr(core, "steal", 0.0) for core in cores),
            own_s=sum(map(_cpu_s, self._family())),
        )

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


class NvmlProbe:
    """How busy the replica's GPUs are, by NVML; the busiest one counts.

    Signals:
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

    def read(self) -> Mapping[str, float]:
        """Return the present shares."""
        nvml = self._nvml
        rates = [nvml.nvmlDeviceGetUtilizationRates(h) for h in self._handles]
        memory = [nvml.nvmlDeviceGetMemoryInfo(h) for h in self._handles]
        throttled = [
            bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(h) & self._slowdowns())
            for h in self._handles
        ]
        return {
            "gpu_busy": max(rate.gpu for rate in rates) / 100,
            "gpu_memory": max(one.used / one.total for one in memory),
            "gpu_throttled": sum(throttled) / len(throttled),
        }

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
    """Reads all probes that work; one that fails is not asked again."""

    def __init__(self, probes: Mapping[str, Callable[[], Probe]]) -> None:
        """Set probes up.

        Args:
            probes: How to make each, by what to call it.
        """
        self._probes: dict[str, Probe] = {}
        for name, make in probes.items():
            try:
                self._probes[name] = make()
            except Exception as error:
                _report(name, error)

    def read(self) -> dict[str, float]:
        """Return all signals there are."""
        signals: dict[str, float] = {}
        for name, probe in list(self._probes.items()):
            try:
                signals |= probe.read()
            except Exception as error:
                del self._probes[name]
                _report(name, error)
        return signals


def capacity_reader(device: str, gpu_ids: Sequence[str] = ()) -> CapacityReader:
    """Build the reader for a replica's process.

    Args:
        device: `cpu` or `gpu`.
        gpu_ids: Indices or UUIDs of the replica's GPUs; all of the node's if empty.
    """
    probes: dict[str, Callable[[], Probe]] = {"CPU": CpuProbe}
    if device == "gpu":
        probes["GPU"] = lambda: NvmlProbe(gpu_ids)
    return CapacityReader(probes)


def _report(name: str, error: Exception) -> None:
    logger.warning(
        "No %s capacity signals, which only metrics use (%s: %s)",
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
