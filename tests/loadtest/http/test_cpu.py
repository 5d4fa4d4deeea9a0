"""CPU time per token: who took it, and when it is read."""

import json
import os
import time
from typing import Any

import psutil
import pytest

from loadtest.client.outcome import Outcome
from loadtest.client.records import Records
from loadtest.compare.cpu import summarise_cpu, watch_cpu
from loadtest.report.rows import CPU_METRICS


def records() -> Records:
    """A request with a token a second, from 1 to 10 s after second 100."""
    gaps_ms = [1000.0] * 9
    one = Outcome("a", first_s=1.0, gaps_ms=gaps_ms, num_deliveries=10)
    one.output_tokens = 10
    return Records(100.0, [one])


def looks() -> list[Any]:
    """From 2.5 to 7.5 s, five tokens; numbers stand for processes."""
    before = {1: ("engine", 9.0), 2: ("idle Ray worker", 1.0), 3: ("raylet", 3.0)}
    # The front had not taken its title before, and the worker not begun.
    after = {1: ("engine", 10.0), 2: ("front", 1.2), 3: ("raylet", 3.1)}
    return [(102.5, before), (107.5, after | {4: ("worker", 0.5)})]


def test_cpu_time_is_told_by_role_engines_and_rays_daemons_apart():
    found = summarise_cpu(looks(), records())
    by_role = {"engine": 200, "front": 40, "worker": 100, "raylet": 20}
    assert found.pop("cpu_ms_per_token_by_role") == pytest.approx(by_role)
    values = dict(zip(CPU_METRICS, (40, 300, 20), strict=True))
    assert found == pytest.approx(values)


@pytest.mark.parametrize(
    "seen", [[], looks()[:1], [(90.0, {}), (91.0, {1: ("front", 1.0)})]]
)
def test_without_two_looks_and_tokens_there_is_no_figure(seen):
    found = summarise_cpu(seen, records())
    assert found == dict.fromkeys(CPU_METRICS) | {"cpu_ms_per_token_by_role": {}}


def test_a_run_is_looked_at_where_its_measured_part_begins_and_ends(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"run": {"epoch_s": 0.0}}\n')  # Of a run that was interrupted.
    with watch_cpu(os.getpid(), path, (0.3, 1.0)) as seen:
        time.sleep(0.3)
        assert not seen
        epoch_s = time.time()
        path.write_text(json.dumps({"run": {"epoch_s": epoch_s}}) + "\n")
        while time.time() < epoch_s + 1.5:
            sum(range(10_000))
            time.sleep(0.001)
    (begin_s, before), (end_s, after) = seen
    assert epoch_s + 0.3 <= begin_s < epoch_s + 1.0 <= end_s
    own = psutil.Process()
    assert 0.01 < after[own][1] - before[own][1] < end_s - begin_s
    with watch_cpu(None, path, (0.0, 0.1)) as seen:
        pass
    assert not seen
