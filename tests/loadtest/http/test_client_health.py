"""Whether a client that was late says so."""

from __future__ import annotations

import time

import gevent
import pytest

from loadtest.client.health import ClientSample, watch_client


def test_a_freeze_is_told_by_the_sample_after_it_as_if_every_timer_had_fired():
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
    # One late timer among six prompt ones would be no 99th percentile.
    assert sample.lag_p99_ms == pytest.approx(1480, abs=100)
    assert sample.lag_max_ms >= sample.lag_p99_ms
