"""From records to figures, rows, verdicts and the page."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from loadtest.client.health import ClientSample
from loadtest.client.outcome import Outcome
from loadtest.client.records import Records, compress, read_records
from loadtest.compare.runner import Store
from loadtest.compare.scrape import summarise_server
from loadtest.report.figures import draw_soak, draw_timeline
from loadtest.report.objectives import judge, parse_objective
from loadtest.report.page import write_page, write_results
from loadtest.report.rows import COMPARED, FIGURES, make_ratios, make_rows
from loadtest.report.summary import Limits, Targets, count_tokens, latencies, summarise


def outcome(number: int, at_s: float, **changes: Any) -> Outcome:
    """A request of ten tokens in ten deliveries, 100 ms apart, the first after 1 s."""
    values: dict[str, Any] = {"id": f"r-{number}", "scheduled_s": at_s, "sent_s": at_s}
    values |= {"first_s": at_s + 1, "last_s": at_s + 1.9, "end_s": at_s + 1.9}
    values |= {"gaps_ms": [100.0] * 9, "num_deliveries": 10, "output_tokens": 10}
    values |= {"prompt_tokens": 20, "counted_by_server": True, "finish_reason": "stop"}
    return Outcome(**(values | changes))


def hung(failure: str, **changes: Any) -> Outcome:
    nothing = {"first_s": None, "last_s": None, "gaps_ms": [], "num_deliveries": 0}
    return outcome(9, 1.0, failure=failure, end_s=61.0, **(nothing | changes))


def samples(name: str = "client 0", **changes: float) -> list[ClientSample]:
    values = {"cpu": 0.1, "lag_p99_ms": 1.0, "lag_max_ms": 1.0, "machine_cpu": 0.5}
    return [ClientSample(n + 1, name, **(values | changes)) for n in range(10)]


def figures(
    outcomes: Sequence[Outcome],
    client: Sequence[ClientSample] | None = None,
    num_processes: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    options: dict[str, Any] = {"is_open": False, "duration_s": 10.0, "lead_in_s": 0.0}
    options |= {"targets": Targets(), "limits": Limits()}
    said = list(samples() if client is None else client)
    records = Records(0.0, list(outcomes), said, num_processes)
    return summarise(records, **(options | changes))


STEADY = [outcome(n, float(n)) for n in range(8)]


def test_figures_of_a_steady_run():
    expected = {"output_tokens_per_s": 8.0, "requests_per_s": 0.8, "goodput_per_s": 0.8}
    expected |= {"ttft_p50_ms": 1000, "itl_p99_ms": 100, "tpot_p50_ms": 100}
    # Little's law: .8 a second, each in flight for 1.9 s.
    expected |= {"e2e_p95_ms": 1900, "mean_in_flight": 0.8 * 1.9}
    expected |= {"num_ok": 8, "num_requests": 8, "is_valid": True}
    run = figures(STEADY)
    assert {name: run[name] for name in expected} == pytest.approx(expected)


def test_the_lead_in_is_left_out_but_its_failures_are_not_forgotten():
    early = outcome(0, 0.5, failure="cut", gaps_ms=[], num_deliveries=1)
    run = figures([early, outcome(1, 5.0)], lead_in_s=2.0)
    assert (run["num_requests"], run["num_sent"], run["num_failed"]) == (1, 2, 1)
    assert run["failures"] == {"cut": 1}
    assert run["failure_rate"] == pytest.approx(0.5)
    # Nor is a run without requests a result.
    run = figures([early], lead_in_s=2.0)
    assert (run["is_valid"], run["ttft_p50_ms"]) == (False, None)


def test_tokens_count_when_they_arrive_whichever_request_they_belong_to():
    # Deliveries at 1.0, 1.1, ... 1.9 s: five of the ten lie in the first 1.45 s.
    assert count_tokens([outcome(0, 0.0)], 0.0, 1.45) == pytest.approx(5)
    assert count_tokens([outcome(0, 0.0)], 1.45, 9.0) == pytest.approx(5)
    # Two tokens in each of five deliveries.
    twice = outcome(0, 0.0, gaps_ms=[100.0] * 4, num_deliveries=5)
    assert count_tokens([twice], 0.0, 1.15) == pytest.approx(4)


def test_goodput_leaves_out_what_misses_a_target_or_fails():
    late, slow = outcome(1, 1.0, first_s=2.5), outcome(2, 2.0, output_tokens=3)
    outcomes = [outcome(0, 0.0), late, slow, outcome(3, 3.0, failure="cut")]
    run = figures(outcomes, targets=Targets(ttft_ms=1100, tpot_ms=150))
    assert run["goodput_per_s"] == pytest.approx(0.1)
    assert run["goodput_share"] == pytest.approx(0.25)


def test_throughput_counts_what_ended_while_sending():
    # Three a second are due, and all are answered, at 1.5 a second.
    late = [
        outcome(n, n / 3, **dict.fromkeys(("first_s", "last_s", "end_s"), n / 1.5))
        for n in range(30)
    ]
    run = figures(late, is_open=True)
    assert run["num_ok"] == 30
    assert run["requests_per_s"] == pytest.approx(1.5, abs=0.11)
    assert run["input_tokens_per_s"] == pytest.approx(30, abs=2)


def test_requests_fail_by_what_became_of_them():
    begun = {"status": 200, "finish_reason": None}
    kinds = ("cut", "stream_error", "timeout", "unfinished")
    failed = [outcome(n, n, failure=kind, **begun) for n, kind in enumerate(kinds)]
    run = figures([*failed, outcome(8, 8.0)])
    assert run["failures"] == dict.fromkeys(kinds, 1)
    # We ended the last kind; it is a failure of the server all the same.
    assert (run["num_cut"], run["num_unfinished"], run["num_failed"]) == (3, 1, 4)
    assert run["goodput_share"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("failure", ["timeout", "unfinished"])
def test_requests_that_hung_are_in_the_latencies_with_the_time_they_waited(failure):
    run = figures([*STEADY[:4], hung(failure)])
    assert run["ttft_p50_ms"] == pytest.approx(1000)
    assert run["ttft_p99_ms"] > 50_000
    assert run["e2e_p99_ms"] > 50_000
    assert run["tpot_p99_ms"] == pytest.approx(100)
    # One that fell silent after its first token had that at its time.
    silent = hung(failure, first_s=2.0)
    assert latencies([silent])["ttft"] == [pytest.approx(1000)]
    assert latencies([silent])["e2e"] == [pytest.approx(60_000)]


def test_records_read_back_also_when_the_last_line_was_cut_short(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"run":{"epoch_s":5.0,"load":"closed:1","num_processes":3}}\n'
        '{"request":{"id":"a","failure":"cut"}}\n'
        '{"client":{"at_s":1,"process":"c","cpu":0.5,"lag_p99_ms":1,"lag_max_ms":2,'
        '"machine_cpu":0.5}}\n{"request":{"id":"b"'
    )
    plain = read_records(path)
    assert [o.id for o in plain.outcomes] == ["a"]
    assert (plain.epoch_s, plain.num_processes, len(plain.client)) == (5, 3, 1)
    assert read_records(compress(path)) == plain
    assert not path.exists()


MANY = [one for n in range(30) for one in samples(f"client {n}")]


@pytest.mark.parametrize(
    ("client", "num_processes", "reason"),
    [
        (samples(cpu=0.95), None, "95% of a core"),
        (samples(lag_p99_ms=60.0), None, "60 ms late"),
        ([], None, "said nothing about itself"),
        # One late process is not hidden by the others.
        ([*MANY, *samples("client 30", lag_p99_ms=60.0)], None, "60 ms late"),
        # Half of all seconds are more than one hiccup in twenty.
        ([*samples()[:5], *samples(lag_p99_ms=60.0)[5:]], None, "60 ms late"),
        ([*samples(), *samples("b")[:3]], 2, "b said nothing after 3 s"),
        (samples(), 2, "1 of the client's processes said nothing at all"),
    ],
)
def test_a_client_that_was_the_limit_spoils_its_run(client, num_processes, reason):
    run = figures(STEADY, client, num_processes)
    assert not run["is_valid"]
    assert any(reason in because for because in run["invalid_because"])


def test_requests_sent_late_spoil_an_open_run_and_count_into_latency():
    late = [outcome(n, float(n), sent_s=n + 0.5) for n in range(8)]
    run = figures(late, is_open=True)
    assert "sent 500 ms late" in run["invalid_because"][0]
    assert run["ttft_p50_ms"] == pytest.approx(1000)


def runs() -> list[dict[str, Any]]:
    """Two arms in two rounds; the second is a quarter faster in each."""
    found = []
    for number, speed in ((1, 100.0), (2, 120.0)):
        for arm, factor in (("none", 1.0), ("tetris", 1.25)):
            run = figures(STEADY) | {"round": number, "arm": arm, "workload": "mixed"}
            run |= {"load": "closed:4", "level": 4.0, "is_open": False}
            run |= {"started_s": float(number), "output_tokens_per_s": speed * factor}
            run |= {"cpu_ms_per_token": 0.1 * factor}
            run |= {"cpu_ms_per_token_by_role": {"front": 0.1, "engine": number}}
            counters = {"tetris_drafts_total": 10.0}
            counters["tetris_draft_tokens_verified_total"] = 20.0
            counters["tetris_draft_tokens_accepted_total"] = 15.0
            is_ours = arm == "tetris"
            run["server"] = summarise_server(counters, []) if is_ours else {}
            found.append(run)
    return found


def verdicts_of(measured: Sequence[Mapping[str, Any]], text: str) -> list[Any]:
    rows, ratios = make_rows(measured), make_ratios(measured)
    return judge([parse_objective(text)], rows, ratios)


def test_rows_give_the_spread_over_rounds_and_ratios_compare_within_them():
    none, tetris = make_rows(runs())
    assert none["output_tokens_per_s"] == {"median": 110.0, "min": 100.0, "max": 120.0}
    assert (tetris["num_requests"], tetris["engine_starts"]) == (16, 2)
    assert tetris["acceptance_length"]["median"] == pytest.approx(2.5)
    assert tetris["verification_success_rate"] == pytest.approx(0.75)
    assert none["acceptance_length"] is None
    for row in (none, tetris):
        for name in (*FIGURES, *COMPARED):
            value = row[name]["median"] if isinstance(row[name], dict) else row[name]
            assert value is None or isinstance(value, int | float)
    assert tetris["cpu_ms_per_token_by_role"] == {"front": 0.1, "engine": 1.5}
    [ratio] = [r for r in make_ratios(runs()) if r["metric"] == "output_tokens_per_s"]
    assert (ratio["arm"], ratio["against"]) == ("tetris", "none")
    assert ratio["ratio"] == pytest.approx(1.25)


def test_runs_of_before_there_was_cpu_time_are_read():
    old = [{k: v for k, v in run.items() if "cpu_ms" not in k} for run in runs()]
    none, _ = make_rows(old)
    assert (none["cpu_ms_per_token"], none["cpu_ms_per_token_by_role"]) == (None, {})
    assert "cpu_ms_per_token" not in {ratio["metric"] for ratio in make_ratios(old)}


def test_a_round_in_which_nothing_was_answered_is_not_hidden_by_the_others():
    measured = runs()
    lost = [outcome(n, float(n), failure="http_503") for n in range(8)]
    measured[3] |= {**figures(lost), "goodput_per_s": 0.0}
    _, tetris = make_rows(measured)
    assert tetris["failure_rate"] == pytest.approx(0.5)
    assert tetris["ttft_p50_ms"] is None
    metrics = {ratio["metric"] for ratio in make_ratios(measured)}
    assert not metrics & {"ttft_p50_ms", "goodput_per_s"}
    for text in (
        "failure_rate<=0.4",
        "tetris@ttft_p50_ms<=5000",
        "tetris/none@goodput_per_s>=0",
    ):
        assert not all(v.is_met for v in verdicts_of(measured, text)), text


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft_p50_ms<=1001", [True, True]),
        ("ttft_p50_ms <= 999", [False, False]),
        ("tetris@output_tokens_per_s>=130", [True]),
        ("tetris/none@output_tokens_per_s>=1.2", [True]),
        ("none/tetris@output_tokens_per_s>=0.95", [False]),
        ("tetris/none@cpu_ms_per_token<=1.3", [True]),
        ("tetris/none@cpu_ms_per_token<=1.2", [False]),
        ("num_failed<=0", [True, True]),
        ("tetris@acceptance_length>=2", [True]),
        ("none@acceptance_length>=1", [False]),
        ("nobody@goodput_per_s>=0", [False]),
    ],
)
def test_objectives_are_judged_in_every_cell_they_bind(text, met):
    assert [verdict.is_met for verdict in verdicts_of(runs(), text)] == met


@pytest.mark.parametrize(
    ("spoilt", "missed", "note", "still_met"),
    [
        # Who lost a request does not depend on how late it was noticed.
        ("is_valid", "ttft_p50_ms<=5000", "the client was the limit", "num_failed<=0"),
        (
            *("tokens_counted_by_server", "tpot_p50_ms<=5000"),
            *("did not count tokens", "ttft_p50_ms<=5000"),
        ),
    ],
)
def test_figures_that_cannot_be_trusted_meet_nothing(spoilt, missed, note, still_met):
    measured = runs()
    measured[-1] |= {spoilt: False}
    for text in (missed, "tetris/none@output_tokens_per_s>=0"):
        *others, verdict = verdicts_of(measured, text)
        assert not verdict.is_met
        assert note in verdict.note
        assert all(other.is_met for other in others)
    assert all(v.is_met for v in verdicts_of(measured, still_met))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "no objective") for text in ("ttft<500", "<=5", "ttft_p50_ms<=fast")),
        ("goodputt>=1", r"there is no figure .*goodput_per_s"),
        ("invalid_because<=0", r"there is no figure .*goodput_per_s"),
        ("a/b@num_failed<=1", r"there is no ratio .*goodput_per_s"),
    ],
)
def test_what_cannot_be_an_objective_is_refused_with_what_can(text, message):
    with pytest.raises(ValueError, match=message):
        parse_objective(text)


def test_what_the_client_spoilt_is_marked_and_the_origin_told(tmp_path):
    for spoilt, mark in ((False, 'good">yes'), (True, 'bad">NO')):
        store = Store(tmp_path / str(spoilt))
        told: dict[str, Any] = {"targets": {"ttft_ms": None, "tpot_ms": None}}
        told["limits"] = {"max_client_cpu": 0.8, "max_lag_ms": 25.0}
        store.check_conditions(told | {"max_tokens": 8, "temperature": 0.0})
        machine = {"cpu": "Abacus", "cores": 2, "memory_gib": 8}
        target = {"name": "demo", "parameters": 2e6, "digest": "0123456789abcdef"}
        store.write_environment({"machine": machine, "models": {"target": target}})
        for run in runs():
            run |= {"records": "none", "sending_s": 10.0, "failed_requests": []}
            run |= {"timeline": [], "process_samples": [], "counters": {}}
            run["is_valid"] = not (spoilt and run["arm"] == "none")
            store.append_record(run)
        kept = store.runs()
        page = write_page(store, kept, write_results(store, kept, [])).read_text()
        [pair] = [line for line in page.splitlines() if ">tetris/none<" in line]
        assert pair.endswith(f'<td class="{mark}</td></tr>')
        assert "<th>front</th>" in page
        model = "target demo (2 M parameters, 01234567)"
        assert f"Abacus; {model}; 2 cores; 32 requests in all" in page


def test_a_round_is_drawn_also_where_the_server_tells_little_and_a_soak_by_role():
    records = {"a": Records(100.0, [outcome(0, 0.0), hung("timeout")])}
    timeline = [{"epoch_s": 100.0, "replicas": 2.0}, {"epoch_s": 105.0, "accepted": 9}]
    drawn = draw_timeline(records, {"a": {"timeline": timeline}}, 10.0)
    assert (drawn or b"").startswith(b"\x89PNG")
    assert drawn != draw_timeline(records, {"a": {"timeline": []}}, 10.0)
    values = dict.fromkeys(("memory_mib", "num_fds", "num_threads"), 1)
    seen = [{"epoch_s": 5.0 * n, "role": f"r {n % 2}", **values} for n in range(6)]
    assert (draw_soak(seen) or b"").startswith(b"\x89PNG")
    assert draw_soak([]) is None
