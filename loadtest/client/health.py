"""Whether the client itself kept up."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import gevent
import numpy as np
import psutil

_HEARTBEAT_S = 0.02
_REPORT_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientSample:
    """One second of one process of the client.

    Attributes:
        cpu: Share of one core; a process of Locust cannot use more than 1.
        lag_p99_ms: How late a timer of 20 ms fired; all that is read from the network
            is seen that late, and nothing in the client knows it. Timers that one
            stall held up count each.
        lag_max_ms: The latest in this second.
        machine_cpu: Share of all cores in use, by whomever.
    """

    at_s: float
    process: str
    cpu: float
    lag_p99_ms: float
    lag_max_ms: float
    machine_cpu: float


def watch_client(
    process: str, began_s: float, report: Callable[[ClientSample], None]
) -> None:
    """Report on every second of a run, until the greenlet is killed."""
    own, since_s = psutil.Process(), time.perf_counter()
    # Both in percent since they were asked before.
    own.cpu_percent()
    psutil.cpu_percent()
    lags_ms: list[float] = []
    while True:
        before_s = time.perf_counter()
        gevent.sleep(_HEARTBEAT_S)
        now_s = time.perf_counter()
        lags_ms += _held_up(now_s - before_s - _HEARTBEAT_S)
        if now_s - since_s >= _REPORT_PERIOD_S:
            usual, worst = np.percentile(lags_ms, [99, 100]).tolist()
            cpu, machine = own.cpu_percent() / 100, psutil.cpu_percent() / 100
            # A stall counts for as long as it lasted.
            while now_s - since_s >= _REPORT_PERIOD_S:
                since_s += _REPORT_PERIOD_S
                at_s = since_s - began_s
                report(ClientSample(at_s, process, cpu, usual, worst, machine))
            lags_ms = []


def _held_up(lag_s: float) -> list[float]:
    """Return a heartbeat's lag in ms, and those of the beats that it kept from beating.

    A client that stands still for half of every second would otherwise give one late
    sample a second and 25 prompt ones (coordinated omission). Source: HdrHistogram,
    `recordValueWithExpectedInterval`.
    """
    count = max(1, math.ceil(lag_s / _HEARTBEAT_S))
    return [1e3 * max(0.0, lag_s - n * _HEARTBEAT_S) for n in range(count)]
