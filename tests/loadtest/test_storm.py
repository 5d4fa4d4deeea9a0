"""What a storm concludes from streams."""

from typing import Any

import pytest

from loadtest.storm.cases import PLAIN, Case
from loadtest.storm.judge import Judge, describe_stalls
from loadtest.storm.streams import Stream

ONE = Case(PLAIN, 1)


def stream(*ids: int, **changes: Any) -> Stream:
    return Stream(ONE, {0: list(ids)}, {0: "text"}, {0: "stop"}, **changes)


@pytest.mark.parametrize(
    ("became", "gap", "may_cut", "verdict"),
    [
        (stream(1, 2, 3), 1.0, True, "equal"),
        (stream(1, 9, 3), 1.0, True, "corrupted"),
        (stream(1, 2), 1.0, True, "corrupted"),
        (stream(1, 9, 3), 1e-6, True, "forgiven"),
        (stream(1, error="gone", is_cut=True), 1.0, True, "cut"),
        (stream(1, error="gone", is_cut=True), 1.0, False, "failed"),
        (stream(1, error="500", is_cut=False), 1.0, True, "failed"),
        (Stream(Case("two answers", 1)), 1.0, True, "whole"),
    ],
)
def test_streams_are_judged_by_those_of_an_undisturbed_run(
    monkeypatch, became, gap, may_cut, verdict
):
    judge = Judge("http://x", "m", [stream(1, 2, 3)], may_cut=may_cut)
    top = {"a": -0.1, "b": -0.1 - gap, "c": -9.0}
    answers = {
        "/tokenize": {"tokens": [7]},
        "/v1/completions": {"choices": [{"logprobs": {"top_logprobs": [top]}}]},
    }
    monkeypatch.setattr(judge, "_ask", lambda path, **_: answers[path])
    judge.judge(became)
    assert judge.counts == {verdict: 1}
    assert len(judge.examples) == (verdict not in ("equal", "whole"))


def test_stalls_are_those_of_streams_under_way():
    streams = [stream(times_s=[0.0, 1.0, 1.5]), stream(times_s=[2.0, 3.0])]
    kills = [{"kind": "engine", "at_s": 1.2}, {"kind": "front", "at_s": 9.0}]
    times = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "max_ms"), 500)
    assert describe_stalls(streams, kills) == {"engine": {"streams": 1, **times}}
