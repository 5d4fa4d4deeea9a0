"""Capacity signals: read from the real machine, and left out where there are none."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from serving.replica.capacity import (
    RETRY_PERIOD_S,
    CapacityReader,
    CpuProbe,
    NvmlProbe,
    capacity_reader,
)
from tests.serving.conftest import wait_until

BUSIEST = {"gpu_busy": 0.8, "gpu_memory": 0.7, "gpu_throttled": 0.5}
SIGNAL_OF = {
    # Not under MIG.
    "nvmlDeviceGetUtilizationRates": "gpu_busy",
    "nvmlDeviceGetMemoryInfo": "gpu_memory",
    # Not before driver 535.
    "nvmlDeviceGetCurrentClocksEventReasons": "gpu_throttled",
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand in for NVML where there is no GPU: two devices, one of them too hot."""
    nvml: Any = ModuleType("pynvml")
    busy, used, reasons = {"0": 30, "1": 80}, {"0": 10, "1": 70}, {"0": 0, "1": 0x20}
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = str
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-b": "1"}[uuid]
    nvml.nvmlDeviceGetUtilizationRates = lambda h: SimpleNamespace(gpu=busy[h])
    nvml.nvmlDeviceGetMemoryInfo = lambda h: SimpleNamespace(used=used[h], total=100)
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda h: reasons[h]
    nvml.nvmlClocksEventReasonSwPowerCap = 0x4
    nvml.nvmlClocksEventReasonHwSlowdown = 0x8
    nvml.nvmlClocksEventReasonSwThermalSlowdown = 0x20
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_work_of_a_child_counts_as_the_replicas_own():
    probe = CpuProbe()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began_s = time.monotonic()
        # The first reading has nothing to compare with.
        assert probe.read() == {}
        watched = psutil.Process(child.pid)
        wait_until(lambda: watched.cpu_times().user > 0.5, 60, period_s=0.02)
        shares = probe.read()
        core_s = (time.monotonic() - began_s) * len(os.sched_getaffinity(0))
    finally:
        child.kill()
        child.wait()
    # In seconds: as a share it depends on the cores there are, and how busy they are.
    assert shares["cpu_own"] * core_s > 0.25
    assert all(0 <= share <= 1 for share in shares.values())
    assert shares["cpu_own"] + shares["cpu_other"] <= 1.1


def test_a_probe_that_fails_takes_no_other_along_and_is_tried_now_and_then(
    serve_log,
):
    now_s, tries, is_broken = 0.0, [], False

    def read() -> Mapping[str, float]:
        if is_broken:
            raise OSError("gone")
        return {"broken": 1.0}

    def impossible() -> Any:
        tries.append(now_s)
        raise ModuleNotFoundError("no pynvml")

    probes = {
        "broken": lambda: SimpleNamespace(read=read),
        "steady": lambda: SimpleNamespace(read=lambda: {"steady": 0.5}),
        "none": impossible,
    }
    failures: list[float] = []
    reader = CapacityReader(probes, lambda: now_s, lambda: failures.append(now_s))
    assert reader.read() == {"broken": 1.0, "steady": 0.5}
    is_broken = True
    assert reader.read() == {"steady": 0.5}
    is_broken = False
    assert reader.read() == {"steady": 0.5}
    now_s = RETRY_PERIOD_S
    assert reader.read() == reader.read() == {"broken": 1.0, "steady": 0.5}
    assert tries == [0.0, RETRY_PERIOD_S]
    assert failures == [0.0, 0.0, RETRY_PERIOD_S]
    assert sorted(one.args[0] for one in serve_log.records) == ["broken", "none"]


@pytest.mark.parametrize(
    ("device_ids", "expected"),
    [
        ([], BUSIEST),
        (["0"], {"gpu_busy": 0.3, "gpu_memory": 0.1, "gpu_throttled": 0.0}),
        (["GPU-b"], BUSIEST | {"gpu_throttled": 1.0}),
    ],
)
def test_the_busiest_of_the_replicas_gpus_counts(device_ids, expected, nvml):
    assert NvmlProbe(device_ids).read() == expected


@pytest.mark.parametrize("function", SIGNAL_OF)
def test_a_signal_that_nvml_cannot_tell_is_left_out_and_logged_once(
    function, nvml, serve_log, monkeypatch
):
    probe = NvmlProbe()
    monkeypatch.setattr(nvml, function, lambda *_: 1 / 0)
    others = {n: share for n, share in BUSIEST.items() if n != SIGNAL_OF[function]}
    assert probe.read() == probe.read() == others
    assert [one.args[0] for one in serve_log.records] == [SIGNAL_OF[function]]
    # One that tells nothing is none; a GPU replica still has its CPU signals.
    for other in SIGNAL_OF:
        monkeypatch.setattr(nvml, other, lambda *_: 1 / 0)
    reader = capacity_reader("gpu", ["0"])
    reader.read()
    time.sleep(0.05)
    assert reader.read().keys() == {"cpu_own", "cpu_other", "cpu_stolen"}


@pytest.mark.gpu
@pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"
)
def test_nvml_reads_a_real_gpu():
    shares = NvmlProbe().read()
    assert shares.keys() == BUSIEST.keys()
    assert all(0 <= share <= 1 for share in shares.values())
    assert shares["gpu_memory"] > 0
