"""Latency classes against load: arrivals, figures, and one run on real engines."""

import json
from typing import Any

import pandas as pd
import pytest

from loadtest.engine.workloads import RequestMaker
from loadtest.models.recipe import DRAFT_DIR
from loadtest.slo.cli import main
from loadtest.slo.plan import (
    Plan,
    RequestKind,
    Units,
    make_stream,
    parse_class_arm,
)
from loadtest.slo.run import Store
from loadtest.slo.summary import compare_goodput, judge, measure_block

TARGETS_MS = {"interactive": 100.0, "batch": 400.0}


RESULT = {
    "classes": ["interactive", "interactive", "batch", "batch"],
    "due_s": [0.0, 1.0, 1.0, 2.0],
    "first_s": [0.5, 1.5, 2.0, 3.0],
    "last_s": [1.5, 2.75, 4.0, 3.0],
    "num_tokens": [11, 11, 6, 1],
    "seconds": 5.0,
}


def test_a_request_keeps_its_own_class_s_target_by_its_time_per_token():
    requests = judge(RESULT, TARGETS_MS)
    # 100, 125 and 400 ms; a single token takes no time after the first.
    assert requests["kept"].tolist() == [True, False, True, True]
    assert requests["ttft_ms"].tolist() == pytest.approx([500, 500, 1000, 1000])
    figures = measure_block(RESULT, TARGETS_MS)
    assert figures["goodput_per_s"] == pytest.approx(3 / 5)
    assert figures["interactive.kept"] == 0.5
    assert figures["batch.kept"] == 1.0
    assert figures["batch.tpot_p50_ms"] == pytest.approx(400)


def make_blocks(**goodputs: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"load": 0.5, "round": 1, "block": n, "arm": arm, "goodput_per_s": value}
        for arm, values in goodputs.items()
        for n, value in enumerate(values)
    )


def test_ours_is_compared_with_the_best_other_policy_block_by_block():
    blocks = make_blocks(
        **{"none": [1, 2, 3], "fixed:1": [2, 4, 6], "goodput:6": [9, 9, 9]},
        **{"goodput:6@classes": [3, 6, 9]},
    )
    (found,) = compare_goodput(blocks, "goodput:6@classes")
    assert found["against"] == "fixed:1"
    # Loads differ from block to block, but the ratio does not.
    assert [found[k] for k in ("ratio", "low", "high")] == pytest.approx([1.5] * 3)


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
    own |= {"target": DRAFT_DIR, "draft": DRAFT_DIR}
    return Plan(**own, units=Units(10.0, 4.0))


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
    assert told["fixed:3"] is None
    assert told["fixed:3@priority"]["batch"] == {"priority": 10}
    own = {"weight": 0.5, "latency_target_ms": 40.0, "priority": 10}
    assert told["goodput:6@classes"]["batch"] == own
    with pytest.raises(ValueError, match="after @"):
        parse_class_arm("none@all")


@pytest.mark.vllm
@pytest.mark.slow
def test_attainment_comes_from_what_real_engines_did_when_they_did_it(tmp_path):
    words = ["--preset", "smoke", "--output", str(tmp_path)]
    assert main([*words, "--minutes", "0.001"]) == 3
    assert main(words) == 0
    store = Store(tmp_path)
    results = store.measurements()[1:]
    assert len(results) == 2 * 2 * 3
    for one in results:
        assert all(a >= b for a, b in zip(one["added_s"], one["due_s"], strict=True))
        assert all(a < b for a, b in zip(one["added_s"], one["first_s"], strict=True))
        assert measure_block(one, dict.fromkeys(TARGETS_MS, 1e-6))["kept"] < 0.1
        assert measure_block(one, dict.fromkeys(TARGETS_MS, 1e6))["kept"] == 1.0
    for group in store.records()[1:]:
        for block in (0, 1):
            none, *others = (one for one in group if one["block"] == block)
            for one in others:
                assert one["due_s"] == none["due_s"]
                # In float32 whoever drafts, and prefers some, answers the same.
                assert one["digests"] == none["digests"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["arm"] for row in rows} == {
        "none",
        "fixed:1@priority",
        "goodput:4@classes",
    }
    assert (tmp_path / "results.png").stat().st_size > 10_000
    before = (tmp_path / "measurements.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "measurements.jsonl").read_bytes() == before
    assert main([*words, "--block-s", "3"]) == 1
