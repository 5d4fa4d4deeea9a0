"""Latency classes against load: arrivals, figures, and one run on real engines."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from loadtest.engine.workloads import RequestMaker
from loadtest.errors import LoadTestError
from loadtest.experiment import Turn
from loadtest.models.recipe import DRAFT_DIR
from loadtest.slo.cli import main
from loadtest.slo.plan import Plan, RequestKind, Units, make_stream, parse_class_arm
from loadtest.slo.report import write_report
from loadtest.slo.run import Bench, Store, read_units
from loadtest.slo.summary import (
    average_rounds,
    compare_goodput,
    judge,
    measure_block,
    tabulate,
    tell_verdict,
)

TARGETS_MS = {"interactive": 100.0, "batch": 400.0}


RESULT = {
    "classes": ["interactive", "interactive", "batch", "batch"],
    "due_s": [0.0, 1.0, 1.0, 2.0],
    "first_s": [0.5, 1.5, 2.0, 3.0],
    "last_s": [1.5, 2.75, 4.0, 3.0],
    "num_tokens": [11, 11, 6, 1],
    "seconds": 5.0,
    "digests": ["a", "b", "c", "d"],
    "other_cpu_share": 0.05,
}


def test_a_request_keeps_its_own_class_s_target_by_its_time_per_token():
    requests = judge(RESULT, TARGETS_MS)
    # 100, 125 and 400 ms; a single token takes no time after the first.
    assert requests["kept"].tolist() == [True, False, True, True]
    assert requests["ttft_ms"].tolist() == pytest.approx([500, 500, 1000, 1000])
    figures = measure_block(RESULT, TARGETS_MS, block_s=4.0)
    assert figures["goodput_per_s"] == pytest.approx(3 / 4)
    # Until the last one has begun: that is when the queue is empty.
    figures = measure_block(RESULT, TARGETS_MS, block_s=2.5)
    assert figures["goodput_per_s"] == pytest.approx(3 / 3)
    assert figures["interactive.kept"] == 0.5
    assert figures["batch.kept"] == 1.0
    assert figures["batch.tpot_p50_ms"] == pytest.approx(400)


def make_blocks(**goodputs: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"load": 0.5, "round": n, "block": 0, "arm": arm, "goodput_per_s": value}
        for arm, values in goodputs.items()
        for n, value in enumerate(values)
    )


def test_ours_is_compared_with_the_best_other_policy_round_by_round():
    blocks = make_blocks(
        **{"none": [1, 2, 3], "fixed:1": [2, 4, 6], "goodput:6": [9, 9, 9]},
        **{"goodput:6@classes": [3, 6, 9]},
    )
    (found,) = compare_goodput(blocks, "goodput:6@classes")
    assert found["against"] == "fixed:1"
    # Arrivals differ from round to round, but the ratio does not.
    assert [found[k] for k in ("ratio", "low", "high")] == pytest.approx([1.5] * 3)
    # Blocks on the same engines are one.
    rounds = average_rounds(pd.concat([blocks, blocks.assign(block=1)]))
    assert compare_goodput(rounds, "goodput:6@classes") == [found]


def test_intervals_are_wider_the_more_loads_there_are():
    own = {"none": [1, 1, 1], "goodput:6@classes": [1, 2, 3]}
    one, two = make_blocks(**own), make_blocks(**own).assign(load=1.0)
    (alone,) = compare_goodput(one, "goodput:6@classes")
    both = compare_goodput(pd.concat([one, two]), "goodput:6@classes")
    assert [found["ratio"] for found in both] == [alone["ratio"]] * 2
    assert all(found["low"] < alone["low"] for found in both)


@pytest.mark.parametrize(
    ("intervals", "somewhere", "everywhere"),
    [
        ([(0.99, 1.1), (1.5, 1.9)], "is reached", "is reached"),
        ([(0.8, 0.97), (1.4, 1.9)], "is neither shown nor refuted", "is missed"),
        ([(0.9, 1.1), (1.1, 1.4)], "is missed", "is neither shown nor refuted"),
        ([(None, None)], *2 * ["is neither shown nor refuted"]),
    ],
)
def test_the_verdict_says_no_more_than_the_intervals(intervals, somewhere, everywhere):
    verdict = tell_verdict(
        [
            {"load": n, "arm": "ours", "ratio": 1 + n, "low": low, "high": high}
            for n, (low, high) in enumerate(intervals)
        ]
    )
    assert f"1.5 somewhere {somewhere}" in verdict
    assert f"0.98 everywhere {everywhere}" in verdict
    assert not tell_verdict([])


def test_replies_that_are_not_the_first_arms_are_counted():
    place = {"load": 0.5, "round": 1, "block": 0}
    other = RESULT | place | {"arm": "fixed:1", "digests": ["a", "B", "c", "D"]}
    conditions = {"arms": ["none", "fixed:1"], "block_s": 4.0}
    table = tabulate([other, RESULT | place | {"arm": "none"}], TARGETS_MS, conditions)
    found = table.set_index("arm")["differing"]
    assert found.to_dict() == {"fixed:1": 2, "none": 0}


def test_what_targets_go_by_is_not_measured_beside_others():
    busy = RESULT | {"other_cpu_share": 0.3}
    for pair in ((RESULT, busy), (busy, RESULT)):
        with pytest.raises(LoadTestError, match="other processes used 30% of"):
            read_units(*pair, max_other_cpu=0.2)
    # 100, 125 and 400 ms; four requests in five seconds.
    assert read_units(RESULT, RESULT, 0.2) == Units(125.0, 0.8, 0.05)


def test_a_block_in_which_nobody_kept_a_target_leaves_no_interval():
    blocks = make_blocks(none=[0, 2], **{"goodput:6@classes": [1, 2]})
    (found,) = compare_goodput(blocks, "goodput:6@classes")
    assert found["ratio"] == pytest.approx(1.5)
    assert found["low"] is None


def make_plan() -> Plan:
    kinds = {
        "interactive": RequestKind(0.25, 8, 1.2, 4.0, -1),
        "batch": RequestKind(0.75, 32, 4.0, 0.5, 10),
    }
    own: dict[str, Any] = {"kinds": kinds, "arms": (), "loads": (), "workload": "easy"}
    own |= {"rounds": 1, "blocks": 2, "block_s": 200.0, "engine": {"device": "cpu"}}
    own |= {"max_other_cpu": 1.0}
    own |= {"target": DRAFT_DIR, "draft": DRAFT_DIR}
    return Plan(**own, units=Units(10.0, 4.0))


def test_what_targets_go_by_is_measured_once_however_often_one_goes_on(
    tmp_path, monkeypatch
):
    asked = []
    engine = SimpleNamespace(ask=lambda *what: asked.append(what) or RESULT)
    engines = nullcontext({parse_class_arm("none"): engine})
    monkeypatch.setattr(Bench, "start_warm", lambda *_: engines)
    plan = replace(make_plan(), engine={"device": "cpu", "max_num_seqs": 4})
    requests = RequestMaker.load(DRAFT_DIR, seed=0, max_tokens=32)
    store = Store(tmp_path)
    for _ in range(2):
        with Bench(plan, store, requests).start(Turn(1, [], [])):
            assert len(asked) == 2
    assert store.units() == read_units(RESULT, RESULT, 1.0)


def test_arrivals_and_classes_are_the_same_for_all_arms_and_new_in_each_block():
    plan = make_plan()
    requests = RequestMaker(lambda chat: [len(chat.messages)], 0, seed=0, max_tokens=32)
    stream, names = make_stream(plan, requests, 0.5, "1 0.5 0")
    assert (stream, names) == make_stream(plan, requests, 0.5, "1 0.5 0")
    assert stream.due_s != make_stream(plan, requests, 0.5, "1 0.5 1")[0].due_s
    # Half of four a second, for 200 s; a quarter of them short: within 4 deviations.
    assert len(stream.due_s) == pytest.approx(400, abs=80)
    assert names.count("interactive") == pytest.approx(100, abs=35)
    assert {*zip(names, stream.limits, strict=True)} == {
        ("interactive", 8),
        ("batch", 32),
    }


def test_an_arm_is_told_of_classes_as_much_as_its_name_says():
    plan = make_plan()
    told = {
        name: plan.deployment(parse_class_arm(name))["policy"].get("classes")
        for name in ("fixed:3", "fixed:3@priority", "goodput:6@classes")
    }
    assert [parse_class_arm(name).name for name in told] == [*told]
    drawn = "goodput:6:probabilistic@classes"
    assert parse_class_arm(drawn).name == drawn
    assert told["fixed:3"] is None
    assert told["fixed:3@priority"]["batch"] == {"priority": 10}
    own = {"weight": 0.5, "latency_target_ms": 40.0, "priority": 10}
    assert told["goodput:6@classes"]["batch"] == own
    with pytest.raises(ValueError, match="after @"):
        parse_class_arm("none@all")


def test_committed_results_are_what_was_measured(tmp_path):
    committed = Path(__file__).parents[2] / "loadtest" / "results" / "slo-cpu"
    for name in ("measurements.jsonl", "settings.json", "environment.json"):
        shutil.copy(committed / name, tmp_path)
    write_report(Store(tmp_path))
    for name in ("results.md", "results.json"):
        assert (tmp_path / name).read_text("utf-8") == (committed / name).read_text()


@pytest.mark.vllm
@pytest.mark.slow
def test_attainment_comes_from_what_real_engines_did_when_they_did_it(tmp_path):
    words = ["--preset", "smoke", "--output", str(tmp_path)]
    assert main(words) == 0
    store = Store(tmp_path)
    results = store.measurements()[1:]
    assert len(results) == 2 * 2 * 3
    for one in results:
        assert all(a >= b for a, b in zip(one["added_s"], one["due_s"], strict=True))
        assert all(a < b for a, b in zip(one["added_s"], one["first_s"], strict=True))
        for target_ms, least, most in ((1e-6, 0.0, 0.1), (1e6, 1.0, 1.0)):
            targets_ms = dict.fromkeys(TARGETS_MS, target_ms)
            assert least <= measure_block(one, targets_ms, 2.0)["kept"] <= most
    for group in store.records()[1:]:
        for block in (0, 1):
            none, *others = (one for one in group if one["block"] == block)
            for one in others:
                assert one["due_s"] == none["due_s"]
                # In float32 whoever drafts, and prefers some, answers the same.
                assert one["digests"] == none["digests"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert {one["differing"] for one in results["replies"].values()} == {0}
    assert results["settings"].keys() >= {
        "code of policies/goodput.py",
        "code of loadtest/slo/run.py",
    }
    assert "**Within their target `goodput:4@classes`" in (
        tmp_path / "results.md"
    ).read_text("utf-8")
    assert {row["arm"] for row in results["rows"]} == {
        "none",
        "fixed:1@priority",
        "goodput:4@classes",
    }
    assert (tmp_path / "results.png").stat().st_size > 10_000
    before = (tmp_path / "measurements.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "measurements.jsonl").read_bytes() == before
    assert main([*words, "--block-s", "3"]) == 1
