"""Our client beside vLLM's, on a stand-in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from loadtest.client.errors import LoadTestError
from loadtest.client.outcome import Outcome
from loadtest.client.records import Records
from loadtest.compare.cross_check import (
    FIGURES,
    compare_clients,
    judge_ratio,
    main,
    read_ours,
)
from loadtest.report.rows import Ratio

from .stand_in_server import plain_reply


def outcome(number: int, at_s: float, **changes: Any) -> Outcome:
    """A request of ten tokens, 100 ms apart, the first after 1 s."""
    values: dict[str, Any] = {
        "scheduled_s": at_s,
        "sent_s": at_s,
        "first_s": at_s + 1,
        "last_s": at_s + 1.9,
        "end_s": at_s + 1.9,
        "output_tokens": 10,
    }
    return Outcome(f"r-{number}", **(values | changes))


def test_our_figures_under_the_other_clients_definitions():
    figures = read_ours(Records(0.0, [outcome(0, 1.0), outcome(1, 3.1)]))
    # Twenty tokens between the first request at 1 s and the last end at 5 s.
    assert figures["output_tokens_per_s"] == pytest.approx(5.0)
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["tpot_p50_ms"] == pytest.approx(100)


def test_a_cross_check_with_failed_requests_compares_nothing():
    cut = outcome(1, 3.1, failure="cut", detail="gone")
    with pytest.raises(LoadTestError, match=r"1 of our requests failed.*cut: gone"):
        read_ours(Records(0.0, [outcome(0, 1.0), cut]))


def test_clients_are_compared_within_rounds():
    rounds = [
        {"ours": dict.fromkeys(FIGURES, 1.1 * t), "theirs": dict.fromkeys(FIGURES, t)}
        for t in (50.0, 200.0)
    ]
    for ratio in compare_clients(rounds).values():
        assert ratio.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.97, 1.04, "agrees"),
        (0.94, 1.04, "cannot tell"),
        (0.97, 1.06, "cannot tell"),
        (1.01, 1.20, "cannot tell"),
        (1.06, 1.20, "DIFFERS"),
        (0.80, 0.94, "DIFFERS"),
        (None, None, "cannot tell"),
    ],
)
def test_clients_agree_when_the_whole_interval_is_within_the_tolerance(
    low, high, verdict
):
    assert judge_ratio(Ratio(1.0, low, high, 6), 0.05) == verdict


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_client_and_ours_measure_a_stand_in(
    server, tmp_path, monkeypatch, capsys
):
    prompts: Counter[str] = Counter()

    def reply(body: Mapping[str, Any]) -> Iterator[object]:
        content = body["messages"][-1]["content"]
        # Theirs sends a list of parts.
        prompts[content if isinstance(content, str) else content[0]["text"]] += 1
        yield from plain_reply(0.02)(body)

    server.script, server.key = reply, "Bearer very-secret"
    monkeypatch.setenv("TETRIS_LOADTEST_HEADER", f"Authorization: {server.key}")
    where = ["--url", f"{server.url}/v1", "--output", str(tmp_path)]
    amount = ["--requests=6", "--in-flight=2", "--max-tokens=8", "--rounds=1"]
    # Nobody agrees after one round.
    assert main([*where, *amount]) == 1
    assert capsys.readouterr().out.count("cannot tell") == 3
    found = json.loads((tmp_path / "cross_check.json").read_text())
    assert found["server"]["url"] == server.url
    assert found["server"]["v1/models"]["data"] == [{"id": "stand-in"}]
    # One pass of ours for the prefix cache, then both, all with the same prompts.
    assert prompts.total() == 18
    assert all(count % 3 == 0 for count in prompts.values())
    [round_] = found["rounds"]
    for client in ("ours", "theirs"):
        figures = round_[client]
        assert figures["num_requests"] == 6
        # The first piece comes after 20 ms, each of the seven others as long after.
        assert figures["ttft_p50_ms"] >= 20
        assert figures["tpot_p50_ms"] == pytest.approx(20, rel=0.5)
        assert 0 < figures["output_tokens_per_s"] < 2 * 8 / 0.16
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"very-secret" in text for text in written)
