"""What a storm concludes from streams, on a stand-in that is never struck."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from loadtest.storm.cases import FEATURES, PLAIN, Case, make_cases
from loadtest.storm.judge import Judge, describe_stalls
from loadtest.storm.streams import Stream, run_streams

from .stand_in_server import CLOSE, DONE, StandIn, event, run_stand_in

ONE = Case(PLAIN, 1)


def answer(body: Mapping[str, Any]) -> Iterator[object]:
    for index in range(body.get("n", 1)):
        token = {"index": index, "token_ids": [1, 2], "text": "a"}
        yield event({"choices": [token]})
        yield 0.01
        if body["prompt"].startswith("Count from 7 "):
            yield CLOSE
        yield event({"choices": [token | {"token_ids": [3], "finish_reason": "stop"}]})
    yield DONE


def stream(*ids: int, **changes: Any) -> Stream:
    return Stream(ONE, {0: list(ids)}, {0: "text"}, {0: "stop"}, **changes)


def test_every_feature_is_asked_for_among_plain_requests():
    cases = make_cases(63)
    assert {case.kind for case in cases} == {PLAIN, *FEATURES}
    assert sum(case.kind == PLAIN for case in cases) == 42


def test_streams_are_read_whole_and_one_that_breaks_off_is_cut():
    cases = [ONE, Case("two answers", 2), Case(PLAIN, 7)]
    with run_stand_in(StandIn(answer)) as server:
        found = asyncio.run(run_streams(server.url, "m", cases, 2))
    by_case = {one.case: one for one in found}
    plain, twice, broken = (by_case[case] for case in cases)
    assert plain.token_ids == {0: [1, 2, 3]}
    assert twice.token_ids == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert plain.is_whole
    assert twice.is_whole
    assert broken.is_cut
    assert broken.error


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
