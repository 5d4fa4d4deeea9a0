"""From records to figures and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.health import ClientSample
from loadtest.client.outcome import Outcome
from loadtest.client.records import Records, compress, read_records
from loadtest.compare.scrape import ServerRecord
from loadtest.report.objectives import judge, parse_objective
from loadtest.report.rows import make_ratios, make_rows
from loadtest.report.summary import Limits, Targets, count_tokens, summarise


def outcome(number: int, at_s: float, **changes: Any) -> Outcome:
    """A request of ten tokens in ten deliveries, 100 ms apart, the first after 1 s."""
    values: dict[str, Any] = {
        "id": f"r-{number}",
        "scheduled_s": at_s,
        "sent_s": at_s,
        "first_s": at_s + 1,
        "last_s": at_s + 1.9,
        "end_s": at_s + 1.9,
        "gaps_ms": [100.0] * 9,
        "num_deliveries": 10,
        "output_tokens": 10,
        "prompt_tokens": 20,
        "counted_by_server": True,
        "finish_reason": "stop",
    }
    return Outcome(**(values | changes))


def samples(cpu: float = 0.1, lag_ms: float = 1.0) -> list[ClientSample]:
    """Ten seconds of a client that is always the same."""
    return [
        ClientSample(n + 1, "client 0", cpu, lag_ms, lag_ms, 0.5) for n in range(10)
    ]


def figures(
    outcomes: Sequence[Outcome],
    client: Sequence[ClientSample] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Summarise a run of ten seconds."""
    options: dict[str, Any] = {
        "is_open": False,
        "duration_s": 10.0,
        "lead_in_s": 0.0,
        "targets": Targets(),
        "limits": Limits(),
    }
    records = Records(
        0.0, list(outcomes), list(samples() if client is None else client)
    )
    return summarise(records, **(options | changes))


# One run


def test_figures_of_a_steady_run():
    run = figures([outcome(n, float(n)) for n in range(8)])
    assert run["num_ok"] == run["num_requests"] == 8
    assert run["output_tokens_per_s"] == pytest.approx(8.0)
    assert run["requests_per_s"] == run["goodput_per_s"] == pytest.approx(0.8)
    assert run["ttft_p50_ms"] == pytest.approx(1000)
    assert run["itl_p99_ms"] == pytest.approx(100)
    assert run["tpot_p50_ms"] == pytest.approx(100)
    assert run["e2e_p95_ms"] == pytest.approx(1900)
    # Little's law: .8 a second, each in flight for 1.9 s.
    assert run["mean_in_flight"] == pytest.approx(0.8 * 1.9)
    assert run["is_valid"]


def test_the_lead_in_is_left_out_but_its_failures_are_not_forgotten():
    early = outcome(0, 0.5, failure="cut", gaps_ms=[], num_deliveries=1)
    run = figures([early, outcome(1, 5.0)], lead_in_s=2.0)
    assert (run["num_requests"], run["num_sent"], run["num_failed"]) == (1, 2, 1)
    assert run["failures"] == {"cut": 1}
    assert run["failure_rate"] == pytest.approx(0.5)


def test_tokens_count_when_they_arrive_whichever_request_they_belong_to():
    # Deliveries at 1.0, 1.1, ... 1.9 s: five of the ten lie in the first 1.45 s.
    assert count_tokens([outcome(0, 0.0)], 0.0, 1.45) == pytest.approx(5)
    assert count_tokens([outcome(0, 0.0)], 1.45, 9.0) == pytest.approx(5)
    # Two tokens in each of five deliveries.
    twice = outcome(0, 0.0, gaps_ms=[100.0] * 4, num_deliveries=5)
    assert count_tokens([twice], 0.0, 1.15) == pytest.approx(4)


def test_goodput_leaves_out_what_misses_a_target_or_fails():
    outcomes = [
        outcome(0, 0.0),
        outcome(1, 1.0, first_s=2.5),
        outcome(2, 2.0, output_tokens=3),
        outcome(3, 3.0, failure="cut"),
    ]
    run = figures(outcomes, targets=Targets(ttft_ms=1100, tpot_ms=150))
    assert run["goodput_per_s"] == pytest.approx(0.1)
    assert run["goodput_share"] == pytest.approx(0.25)


def test_throughput_counts_what_ended_while_sending():
    # Three a second are due, and all are answered, at 1.5 a second.
    late = [
        outcome(n, n / 3, first_s=n / 1.5, last_s=n / 1.5, end_s=n / 1.5)
        for n in range(30)
    ]
    run = figures(late, is_open=True)
    assert run["num_ok"] == 30
    assert run["requests_per_s"] == pytest.approx(1.5, abs=0.11)
    assert run["input_tokens_per_s"] == pytest.approx(30, abs=2)


def test_requests_that_were_never_answered_are_in_the_latencies():
    hung = outcome(9, 1.0, failure="unfinished", first_s=None, last_s=None, end_s=61.0)
    run = figures([outcome(n, float(n)) for n in range(4)] + [hung])
    assert run["ttft_p50_ms"] == pytest.approx(1000)
    assert run["ttft_p99_ms"] > 50_000
    assert run["e2e_p99_ms"] > 50_000
    assert run["tpot_p99_ms"] == pytest.approx(100)


def test_unanswered_requests_have_failed_and_dropped_ones_have_not():
    outcomes = [
        outcome(0, 0.0, failure="unfinished"),
        outcome(1, 1.0, failure="client_dropped"),
        outcome(2, 2.0, failure="http_503"),
        outcome(3, 3.0),
    ]
    run = figures(outcomes)
    assert (run["num_failed"], run["num_unfinished"], run["num_ok"]) == (2, 1, 1)
    assert run["goodput_share"] == pytest.approx(0.25)


def test_a_stream_that_we_stalled_ourselves_is_in_no_latency():
    stalled = outcome(0, 0.0, chaos="stall", gaps_ms=[5000.0] * 9)
    run = figures([stalled, outcome(1, 1.0)])
    assert run["num_ok"] == 2
    assert run["itl_p99_ms"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("client", "changes", "reason"),
    [
        (samples(cpu=0.95), {}, "95% of a core"),
        (samples(lag_ms=60), {}, "60 ms late"),
        ([], {}, "said nothing"),
    ],
)
def test_a_client_that_was_the_limit_spoils_its_run(client, changes, reason):
    run = figures([outcome(0, 0.0)], client, **changes)
    assert not run["is_valid"]
    assert any(reason in because for because in run["invalid_because"])


def test_requests_sent_late_spoil_an_open_run_and_count_into_latency():
    late = [outcome(n, float(n), sent_s=n + 0.5) for n in range(8)]
    run = figures(late, is_open=True)
    assert "sent 500 ms late" in run["invalid_because"][0]
    assert run["ttft_p50_ms"] == pytest.approx(1000)


def test_a_run_without_requests_is_no_result():
    run = figures([])
    assert not run["is_valid"]
    assert run["ttft_p50_ms"] is None


def test_records_read_back_also_when_the_last_line_was_cut_short(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"run":{"epoch_s":5.0,"load":"closed:1"}}\n'
        '{"request":{"id":"a","failure":"cut"}}\n'
        '{"client":{"at_s":1,"process":"c","cpu":0.5,"lag_p99_ms":1,"lag_max_ms":2,'
        '"machine_cpu":0.5}}\n{"request":{"id":"b"'
    )
    plain = read_records(path)
    assert [o.id for o in plain.outcomes] == ["a"]
    assert plain.epoch_s == 5
    assert len(plain.client) == 1
    assert read_records(compress(path)) == plain
    assert not path.exists()


# Arms and rounds


def runs() -> list[dict[str, Any]]:
    """Two arms in two rounds; the second is a quarter faster in each."""
    found = []
    for number, speed in ((1, 100.0), (2, 120.0)):
        for arm, factor in (("none", 1.0), ("tetris", 1.25)):
            run = figures([outcome(n, float(n)) for n in range(8)])
            run |= {"round": number, "arm": arm, "workload": "mixed"}
            run |= {"load": "closed:4", "level": 4.0, "is_open": False}
            run["output_tokens_per_s"] = speed * factor
            server = ServerRecord(counters={"tetris_drafts_total": 10.0})
            server.counters["tetris_draft_tokens_verified_total"] = 20.0
            server.counters["tetris_draft_tokens_accepted_total"] = 15.0
            run["server"] = server.summary() if arm == "tetris" else {}
            found.append(run)
    return found


def test_rows_give_the_spread_over_rounds_and_add_up_counts():
    none, tetris = make_rows(runs())
    assert none["output_tokens_per_s"] == {"median": 110.0, "min": 100.0, "max": 120.0}
    assert tetris["num_requests"] == 16
    assert tetris["acceptance_length"]["median"] == pytest.approx(2.5)
    assert tetris["verification_success_rate"] == pytest.approx(0.75)
    assert none["acceptance_length"] is None


def test_arms_are_compared_within_rounds():
    [ratio] = [r for r in make_ratios(runs()) if r["metric"] == "output_tokens_per_s"]
    assert (ratio["arm"], ratio["against"]) == ("tetris", "none")
    assert ratio["ratio"] == pytest.approx(1.25)


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
        verdicts = judge(
            [parse_objective(text)], make_rows(measured), make_ratios(measured)
        )
        assert not all(verdict.is_met for verdict in verdicts), text


def test_tokens_that_the_server_did_not_count_meet_nothing():
    measured = runs()
    for run in measured:
        run["tokens_counted_by_server"] = run["arm"] == "none"
    rows, ratios = make_rows(measured), make_ratios(measured)
    for text in ("tpot_p50_ms<=5000", "tetris/none@output_tokens_per_s>=0"):
        *_, verdict = judge([parse_objective(text)], rows, ratios)
        assert not verdict.is_met
        assert "did not count tokens" in verdict.note
    assert all(
        v.is_met for v in judge([parse_objective("ttft_p50_ms<=5000")], rows, [])
    )


# Objectives


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft_p50_ms<=1001", [True, True]),
        ("ttft_p50_ms <= 999", [False, False]),
        ("tetris@output_tokens_per_s>=130", [True]),
        ("tetris/none@output_tokens_per_s>=1.2", [True]),
        ("none/tetris@output_tokens_per_s>=0.95", [False]),
        ("num_failed<=0", [True, True]),
        ("tetris@acceptance_length>=2", [True]),
        ("none@acceptance_length>=1", [False]),
        ("nobody@goodput_per_s>=0", [False]),
    ],
)
def test_objectives_are_judged_in_every_cell_they_bind(text, met):
    measured = runs()
    verdicts = judge(
        [parse_objective(text)], make_rows(measured), make_ratios(measured)
    )
    assert [verdict.is_met for verdict in verdicts] == met


def test_an_objective_is_missed_where_the_client_was_the_limit():
    measured = runs()
    measured[0] |= {"is_valid": False, "invalid_because": ["slow"]}
    rows = make_rows(measured)
    [verdict, other] = judge([parse_objective("ttft_p50_ms<=5000")], rows, [])
    assert (verdict.is_met, other.is_met) == (False, True)
    assert verdict.note == "the client was the limit"
    # Who lost a request does not depend on how late it was noticed.
    assert all(v.is_met for v in judge([parse_objective("num_failed<=0")], rows, []))


@pytest.mark.parametrize(
    "text", ["ttft", "ttft<500", "<=5", "ttft_p50_ms<=fast", "num_ok>=1.2.3"]
)
def test_an_objective_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="no objective"):
        parse_objective(text)


@pytest.mark.parametrize(
    "text", ["goodputt>=1", "failures<=0", "invalid_because<=0", "a/b@num_failed<=1"]
)
def test_an_objective_on_what_is_no_number_is_refused_with_those_there_are(text):
    with pytest.raises(ValueError, match=r"there is no .*goodput_per_s"):
        parse_objective(text)
