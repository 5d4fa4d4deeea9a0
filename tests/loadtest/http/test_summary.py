"""What of the server and of the client must not drop out of a run's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.health import ClientSample
from loadtest.client.outcome import Outcome
from loadtest.client.records import Records, read_records
from loadtest.compare.store import Store
from loadtest.report.figures import draw_distributions
from loadtest.report.page import write_page, write_results
from loadtest.report.rows import COMPARED, FIGURES, make_rows
from loadtest.report.summary import Limits, Targets, latencies, summarise

from .test_figures import figures, outcome, runs, samples


def hung(failure: str, **changes: Any) -> Outcome:
    """A request that waited for a minute and got nothing."""
    nothing = {"first_s": None, "last_s": None, "gaps_ms": [], "num_deliveries": 0}
    return outcome(9, 1.0, failure=failure, end_s=61.0, **(nothing | changes))


# The server


def test_broken_streams_are_cut_whatever_the_server_said_about_them():
    begun = {"status": 200, "finish_reason": None}
    broken = [
        outcome(n, float(n), failure=failure, **begun)
        for n, failure in enumerate(("cut", "stream_error", "timeout", "unfinished"))
    ]
    run = figures([*broken, outcome(8, 8.0)])
    assert run["num_cut"] == 3
    assert run["failures"] == dict.fromkeys(
        ("cut", "stream_error", "timeout", "unfinished"), 1
    )


@pytest.mark.parametrize("failure", ["timeout", "unfinished"])
def test_requests_that_hung_are_in_the_latencies_with_the_time_they_waited(failure):
    answered = [outcome(n, float(n)) for n in range(4)]
    run = figures([*answered, hung(failure)])
    assert run["ttft_p99_ms"] > 50_000
    assert run["e2e_p99_ms"] > 50_000
    # One that fell silent after its first token had that at its time.
    silent = hung(failure, first_s=2.0)
    assert latencies([silent])["ttft"] == [pytest.approx(1000)]
    assert latencies([silent])["e2e"] == [pytest.approx(60_000)]
    assert latencies([silent])["tpot"] == []
    assert latencies([replace(silent, chaos="stall")])["e2e"] == []


def test_requests_that_hung_are_in_the_distributions():
    assert draw_distributions({"a": [hung("timeout")]}) is not None
    assert draw_distributions({"a": [hung("http_503")]}) is None


# The client


def reasons(client: list[ClientSample], num_processes: int | None = None) -> str:
    """Summarise ten seconds of what clients said, and return what is wrong with it."""
    sent = [outcome(n, float(n)) for n in range(8)]
    run = summarise(
        Records(0.0, sent, client, num_processes),
        is_open=False,
        duration_s=10.0,
        lead_in_s=0.0,
        targets=Targets(),
        limits=Limits(),
    )
    assert run["is_valid"] is not bool(run["invalid_because"])
    return "; ".join(run["invalid_because"])


def of_process(name: str, client: list[ClientSample]) -> list[ClientSample]:
    """Give samples to another process."""
    return [replace(sample, process=name) for sample in client]


def test_a_process_that_stood_still_for_seconds_was_late_in_all_of_them():
    late = ClientSample(8.0, "client 0", 0.1, 3900.0, 4000.0, 0.5)
    at_once = [s for s in samples() if s.at_s <= 4 or s.at_s > 8]
    assert not reasons(at_once)
    assert "ms late" in reasons(sorted([*at_once, late], key=lambda s: s.at_s))
    # Also one whose first word comes after the end of sending.
    last = replace(late, at_s=14.0)
    assert "ms late" in reasons([*samples()[:5], last])


def test_one_late_process_is_not_hidden_by_the_others():
    client = [s for n in range(30) for s in of_process(f"client {n}", samples())]
    assert not reasons(client)
    late = of_process("client 30", samples(lag_ms=60))
    assert "60 ms late" in reasons([*client, *late])


def test_a_process_that_died_spoils_the_run():
    other = of_process("client 1", samples())
    assert not reasons([*samples(), *other], 2)
    told = reasons([*samples(), *other[:3]], 2)
    assert "client 1 said nothing after 3 s" in told


def test_a_process_that_never_said_anything_spoils_the_run():
    assert "1 of the client's processes said nothing at all" in reasons(samples(), 2)
    # Records from before their number was noted.
    assert not reasons(samples())


def test_the_number_of_processes_is_read_from_the_records(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"run":{"epoch_s":5.0,"load":"closed:1","num_processes":3}}\n')
    assert read_records(path).num_processes == 3
    path.write_text('{"run":{"epoch_s":5.0,"load":"closed:1"}}\n')
    assert read_records(path).num_processes is None


# Results


def is_number(value: Any) -> bool:
    """Tell what an objective can be compared with, alone or as a spread."""
    found = value["median"] if isinstance(value, Mapping) else value
    return found is None or isinstance(found, int | float)


def test_every_figure_of_a_row_is_a_number():
    none, tetris = make_rows(runs())
    for row in (none, tetris):
        assert all(is_number(row[name]) for name in FIGURES)
    assert set(COMPARED) <= set(FIGURES)


def test_ratios_with_a_run_that_the_client_spoilt_are_marked(tmp_path: Path):
    for spoilt, mark in ((False, ""), (True, ' <span class="bad">invalid</span>')):
        store = Store(tmp_path / str(spoilt))
        store.check_conditions(
            {
                "targets": {"ttft_ms": None, "tpot_ms": None},
                "limits": {"max_client_cpu": 0.8, "max_lag_ms": 25.0},
                "max_tokens": 8,
                "temperature": 0.0,
            }
        )
        store.write_environment({"machine": {"cpu": "", "cores": 2, "memory_gib": 8}})
        for run in runs():
            run |= {"records": "none", "sending_s": 10.0, "failed_requests": []}
            run |= {"timeline": [], "process_samples": [], "chaos": [], "counters": {}}
            run["is_valid"] = not (spoilt and run["arm"] == "none")
            store.append_record(run)
        kept = store.runs()
        page = write_page(store, kept, write_results(store, kept, []))
        report = page.read_text()
        assert f"<td>tetris / none{mark}</td>" in report
