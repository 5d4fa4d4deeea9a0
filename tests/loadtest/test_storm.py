"""What a storm concludes from streams."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loadtest.storm import killer
from loadtest.storm.__main__ import is_shown
from loadtest.storm.cases import NUM_TOKENS, PLAIN, SAMPLED, Case, make_cases
from loadtest.storm.judge import Judge, describe_stalls, describe_timeline
from loadtest.storm.law import derive_seed, find_replayed, judge_law, score_tokens
from loadtest.storm.replays import read_replays
from loadtest.storm.report import render, write_report
from loadtest.storm.streams import Stream
from serving.front import in_flight

RESULTS = Path(__file__).parents[2] / "loadtest" / "results" / "front-cpu"
ONE = Case(PLAIN, 1)
LEADS = [1.0, 1e-6, 1.0]


def stream(*ids: int, case: Case = ONE, **changes: Any) -> Stream:
    told: dict[str, Any] = {"num_tokens": len(ids), "times_s": [0.0], "ended_s": 9.0}
    told |= changes
    return Stream(case, {0: list(ids)}, {0: "text"}, {0: "stop"}, **told)


def broken(**changes: Any) -> Stream:
    return stream(1, error="gone", is_cut=True, **changes)


@pytest.mark.parametrize(
    ("became", "verdict"),
    [
        (stream(1, 2, 3), "equal"),
        (stream(9, 2, 3), "corrupted"),
        (stream(1, 9, 3), "forgiven"),
        (stream(1, 2, 9), "corrupted"),
        (stream(1), "corrupted"),
        (stream(1, 2, 3, num_tokens=2), "corrupted"),
        (broken(), "cut"),
        (broken(ended_s=4.0), "failed"),
        (broken(times_s=[6.0]), "failed"),
        (broken(ended_s=99.0), "failed"),
        (stream(1, error="500"), "failed"),
        (stream(7, 7, 7, case=Case(SAMPLED, 1)), "whole"),
        (stream(7, 7, case=Case(SAMPLED, 1)), "corrupted"),
    ],
)
def test_streams_are_judged_by_those_of_an_undisturbed_run(became, verdict):
    known = [stream(1, 2, 3, case=case) for case in (ONE, Case(SAMPLED, 1))]
    for one in known:
        one.leads[0] = LEADS
    judge = Judge(known, front_kills_s=[5.0])
    assert judge.judge(became) == verdict
    assert judge.counts == {verdict: 1}
    assert len(judge.examples) == (verdict not in ("equal", "whole", "cut"))


def test_every_answer_has_to_part_at_a_tie_and_log_probabilities_count():
    case, right = Case("two prompts", 1), {0: [1, 2], 1: [3, 4]}
    known = Stream(case, right, leads={0: [1e-6, 1.0], 1: [1.0, 1e-6]})
    judge = Judge([known], ())
    assert judge.judge(Stream(case, {0: [9, 2], 1: [3, 9]})) == "forgiven"
    assert judge.judge(Stream(case, {0: [1, 9], 1: [3, 9]})) == "corrupted"
    told = [Stream(Case("logprobs", 1), logprobs={0: own}) for own in ([-1.0], [])]
    assert told[1].differs_from(told[0]) == "logprobs"


@pytest.mark.parametrize(
    "told",
    [
        {"token_logprobs": [-1, -3], "top_logprobs": [{"a": -1, "b": -1.5}, {"a": -2}]},
        {
            "content": [
                {"logprob": -1, "top_logprobs": [{"logprob": -1}, {"logprob": -1.5}]},
                {"logprob": -3, "top_logprobs": [{"logprob": -2}]},
            ]
        },
    ],
    ids=["completion", "chat"],
)
def test_ties_are_those_of_the_two_likeliest_if_one_came_out(told):
    one = Stream(ONE)
    one.take({"choices": [{"index": 0, "token_ids": [5, 6], "logprobs": told}]})
    assert (one.leads[0], one.logprobs[0]) == ([0.5, float("inf")], [-1, -3])


def test_a_stall_is_the_longest_after_the_kill_of_streams_under_way():
    late = stream(times_s=[0.0, 1.0, 1.25, 5.25, 5.5], request_id="moved")
    streams = [late, stream(times_s=[0.0, 1.0, 1.5]), stream(times_s=[2.0, 3.0])]
    kills = [{"kind": "engine", "at_s": 1.2}, {"kind": "front", "at_s": 5.3}]
    found = describe_stalls(streams, kills, {"moved": 1})
    assert [*found["engine"]["all"].values()] == [2, 2250, 3650, 3965, 4000]
    assert [*found["engine"]["replayed"].values()] == [1, 4000, 4000, 4000, 4000]
    assert "replayed" not in found["front"]


def test_what_operators_do_may_stop_a_stream_at_any_time_meanwhile():
    streams = [stream(times_s=[8.0, 9.0, 14.0, 15.0]), stream(times_s=[0.0, 1.0, 3.0])]
    change = {"kind": "redeploy", "at_s": 2.0, "recovered_after_s": 10.0}
    found = describe_stalls(streams, [change], {})
    assert found["redeploy"]["all"]["max_ms"] == 5000
    assert found["redeploy"]["all"]["streams"] == 2
    kill = {"kind": "engine", "at_s": 2.0, "recovered_after_s": 10.0}
    assert describe_stalls(streams, [kill], {})["engine"]["all"]["max_ms"] == 2000


@pytest.mark.parametrize(
    ("replayed", "law", "shown"),
    [
        (60, {"streams": 10, "as_derived": 10, "holds": True}, True),
        (60, {"streams": 10, "as_derived": 10, "holds": False}, False),
        (60, {"streams": 10, "as_derived": 5, "holds": True}, False),
        (60, {"streams": 0, "holds": True, "control_fails": False}, False),
        (60, {}, False),
        (3, {"streams": 1, "as_derived": 1, "holds": True}, True),
        (3, {"streams": 1, "as_derived": 1, "holds": False}, False),
        # Moved, by the fronts' counts, but their logs know none.
        (0, {}, False),
    ],
)
def test_a_law_that_nothing_was_seen_of_is_not_said_to_hold(replayed, law, shown):
    law = {"control_fails": True, **law} if law else law
    results = {"replayed_streams": replayed, "replays": 60.0, "law": law}
    assert is_shown(results) == shown


def test_replays_are_read_off_all_fronts_logs(tmp_path):
    def line(name: str, replays: int) -> str:
        told = json.dumps({"end": "length", "replays": replays, "key": None})
        start = f"INFO 2026-01-01 00:00:00,000 tetris_TetrisFront x {name} --"
        return f"{start} Request ended: {told}\n{start} CALL /v1/completions OK\n"

    (tmp_path / "serve").mkdir()
    for front, lines in (("a", line("r1", 0)), ("b", line("r2", 2) + line("r2", 1))):
        file = tmp_path / "serve" / f"replica_tetris_TetrisFront_{front}.log"
        file.write_text(lines)
    assert read_replays(tmp_path) == {"r1": 0, "r2": 2}


def test_a_fleet_is_whole_once_its_new_front_is_connected_to_all(monkeypatch):
    roles, links = ["front", "front", "replica", "replica"], {"a": 2, "b": 2}

    def page(_url: str) -> str:
        name = "ray_tetris_connected_replicas"
        return "".join(f'{name}{{replica="{k}"}} {n}\n' for k, n in links.items())

    monkeypatch.setattr(
        killer, "find_processes", lambda _: [(role, object()) for role in roles]
    )
    endpoint = SimpleNamespace(count_replicas=lambda: 2.0, fetch=page)
    deployment: Any = SimpleNamespace(endpoint=endpoint, metrics_urls=("page",))
    fleet = killer._Fleet(deployment, 1)
    assert fleet.is_whole(has_new_front=False)
    assert not fleet.is_whole(has_new_front=True)
    links["c"] = 1
    assert not fleet.is_whole(has_new_front=True)
    del links["b"]
    assert not fleet.is_whole(has_new_front=True)
    links["c"] = 2
    assert fleet.is_whole(has_new_front=True)
    roles.pop()
    assert not fleet.is_whole(has_new_front=False)


def test_a_sampled_stream_is_cut_before_the_gap_that_its_kill_made():
    one = stream(*range(6), case=Case(SAMPLED, 1), prompt_ids=[8, 9])
    one.times_s, one.num_until = [0.0, 1.0, 1.3, 4.0, 5.0], [0, 2, 3, 5, 6]
    kills = [{"kind": "engine", "at_s": 1.2}, {"kind": "front", "at_s": 1.2}]
    (found,) = find_replayed([one, stream(1, 2)], kills, {one.request_id: 1})
    assert (found.before, found.after, found.cut) == ([8, 9, 0, 1, 2], [3, 4, 5], 3)
    assert find_replayed([one], kills, {one.request_id: 2}) == []


class Model:
    """The law of a token depends on the one before."""

    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 20)))

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[ids])


def draw(before: list[int], seed: int) -> int:
    chances = Model.logits[before[-1]].softmax(dim=-1).numpy()
    return int(np.random.default_rng(seed).choice(20, p=chances))


@pytest.mark.parametrize(
    ("seed_of", "holds", "num_as_derived"),
    [(derive_seed, True, 60), (lambda seed, _: seed, False, None)],
    ids=["fresh noise", "the same noise again"],
)
def test_a_replay_that_repeats_its_noise_is_found(
    monkeypatch, seed_of: Callable[[int, int], int], holds, num_as_derived
):
    streams = []
    for seed in range(60):
        ids = [draw([3], seed)]
        for number in range(1, 9):
            own = seed_of(seed, 4) if number == 4 else 99 * seed + number
            ids.append(draw(ids, own))
        one = stream(*ids, case=Case(SAMPLED, 1), request_id=f"{seed:08x}{seed}")
        one.times_s, one.num_until, one.prompt_ids = [0.0, 1.0, 3.0], [0, 4, 9], [3]
        streams.append(one)
    kills = [{"kind": "engine", "at_s": 1.1}]
    replayed = find_replayed(streams, kills, {one.request_id: 1 for one in streams})
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: Model()
    )
    told = judge_law(replayed, draw, "")
    assert (told["streams"], told["tokens"]) == (60, 300)
    assert (told["holds"], told["control_fails"]) == (holds, True)
    assert num_as_derived in (None, told["as_derived"])


def test_scores_have_mean_0_and_the_variance_that_is_told():
    law = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    scores = [score_tokens(law, [token]) for token in range(3)]
    (variance,) = {round(spread, 9) for _, spread in scores}
    chances = law.exp()[0].tolist()
    assert sum(p * s for p, (s, _) in zip(chances, scores, strict=True)) == (
        pytest.approx(0)
    )
    assert sum(p * s**2 for p, (s, _) in zip(chances, scores, strict=True)) == (
        pytest.approx(variance)
    )


def test_seeds_are_derived_as_fronts_derive_them():
    for seed, cut in ((0, 1), (2**32 - 1, 239)):
        assert derive_seed(seed, cut) == in_flight.derive_seed(seed, cut)


def test_a_third_has_features_and_a_third_is_sampled():
    cases = make_cases(30)
    kinds = [case.kind for case in cases]
    assert (kinds.count(PLAIN), kinds.count(SAMPLED)) == (10, 10)
    body = cases[1].body("m", 5)
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (1, 5, NUM_TOKENS)


def test_a_timeline_has_every_second_and_no_more():
    streams = [
        stream(times_s=[10.0, 10.5, 10.6, 13.2]),
        stream(times_s=[11.5, 12.5]),
        stream(times_s=[]),
    ]
    found = describe_timeline(streams, 10.0)
    assert [one["at_s"] for one in found] == [0, 1, 2, 3]
    assert [one["streams"] for one in found] == [1, 1, 2, 1]
    assert [one["parts"] for one in found] == [2, 0, 1, 1]
    assert describe_timeline([stream(times_s=[])], 0.0) == []


def test_a_report_hides_no_failure(tmp_path):
    law = {"streams": 3, "tokens": 9, "z": 7.5, "same_noise_log10_e": 0.1}
    law |= {"naive_replay_log10_e": 0.2, "holds": False, "control_fails": False}
    stall = {"streams": 4, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.4}
    results = {
        "requests": 12,
        "streams": {"equal": 9, "corrupted": 2, "failed": 1},
        "replayed_streams": 3,
        "replays": 4.0,
        "tokens_recomputed": 50.0,
        "incomplete": "the fleet is not whole",
        "lasted_s": 90.0,
        "law": law,
        "stalls": {"engine": {"all": stall}},
        "kills": [{"kind": "engine", "at_s": 1.0, "recovered_after_s": None}],
        "timeline": [{"at_s": 0, "streams": 1, "parts": 2}],
        "settings": {"in_flight": 8},
        "machine": {"cores": 2, "cpu": "a cpu"},
    }
    write_report(results, tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "| 9 | 0 | 0 | 0 | 2 | 1 |" in page
    assert "| engine | 1 | - | 4 | 1 | 2 | 3 | 4 |" in page
    for said in ("DOES NOT HOLD", "IS NOT FOUND OUT", "broke off: the fleet is not"):
        assert said in page
    assert (tmp_path / "storm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("storm*")), ids=lambda p: p.name)
def test_what_is_committed_is_what_was_measured(folder):
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "results.md").read_text() == render(results)
    assert results["incomplete"] is None
    # As the README tells of them.
    assert results["streams"].get("corrupted", 0) == 0
    assert results["streams"].get("failed", 0) == (2 if folder.name == "storm" else 0)
