"""Whether a client that was late says so."""

from __future__ import annotations

import time

import gevent
import pytest

from loadtest.client.health import ClientSample, watch_client

NUM_SAMPLES = 2


def watch(frozen_s: float) -> list[ClientSample]:
    """Watch this process, whose loop stands still for a part of every second."""
    samples: list[ClientSample] = []

    def freeze() -> None:
        while True:
            gevent.sleep(1 - frozen_s)
            time.sleep(frozen_s)

    freezing = gevent.spawn(freeze)
    watching = gevent.spawn(
        watch_client, "client 0", time.perf_counter(), samples.append
    )
    deadline_s = time.monotonic() + 60
    while len(samples) < NUM_SAMPLES:
        assert time.monotonic() < deadline_s
        gevent.sleep(0.05)
    gevent.killall([freezing, watching])
    return samples


def test_a_loop_that_stands_still_once_a_second_is_late_by_as_much():
    samples = watch(frozen_s=0.4)
    # A hundredth of the time, 10 ms, is later than the 99th percentile.
    assert min(sample.lag_p99_ms for sample in samples) > 300
    assert samples[0].lag_max_ms >= samples[0].lag_p99_ms


def test_a_freeze_of_several_seconds_is_told_by_the_sample_after_it():
    samples: list[ClientSample] = []
    watching = gevent.spawn(
        watch_client, "client 0", time.perf_counter(), samples.append
    )
    gevent.sleep(0.1)
    time.sleep(1.5)
    gevent.sleep(0.1)
    watching.kill()
    [sample] = samples
    assert sample.at_s >= 1.5
    assert sample.lag_p99_ms == pytest.approx(1480, abs=100)
