"""What depth 0 costs: arms that are held at it, and the verdict about them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.engine_bench.arms import Arm, parse_arm, parse_bench_arm
from loadtest.engine_bench.held_depth import hold_depth
from loadtest.engine_bench.plan import PRESETS, Cell
from loadtest.engine_bench.rows import make_rows
from loadtest.engine_bench.settings import EngineSettings
from loadtest.engine_bench.verdicts import judge_all
from policies.goodput import GoodputPlanner
from policies.types import EngineLimits
from tests.loadtest.test_engine_bench import measured

CELL = Cell("mixed", 0.0, 4)
COLD, WARM, NONE = map(parse_bench_arm, ("cold:8", "warm:8", "none"))


def judge(speeds: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    arms = [parse_bench_arm(name) for name in speeds]
    measurements = [
        measured(name, number, speed) | CELL.as_dict()
        for name, own in speeds.items()
        for number, speed in enumerate(own, start=1)
    ]
    rows = make_rows(measurements, [CELL], arms)
    return judge_all(measurements, rows, [], [], [CELL], arms)


def test_arms_held_at_depth_0_read_back_from_their_names() -> None:
    assert COLD == parse_bench_arm("cold") == Arm("cold", 8)
    assert (COLD.name, WARM.name, COLD.file_name) == ("cold:8", "warm:8", "cold-8")
    assert parse_bench_arm("tetris:2+1") == parse_arm("tetris:2+1")
    for text in ("cold:0", "warm:2+1"):
        with pytest.raises(ValueError, match=r"write (cold|warm):8"):
            parse_bench_arm(text)


def test_no_server_offers_them() -> None:
    with pytest.raises(ValueError, match="no policy"):
        parse_arm("cold")


def test_their_engine_is_that_of_goodput() -> None:
    settings = EngineSettings(
        Path("target"), Path("draft"), "bfloat16", 2048, 8, 2048, 1 << 20
    )
    assert settings.llm_args(COLD) == settings.llm_args(parse_arm("goodput:8"))
    assert (COLD.held_at_zero, WARM.held_at_zero) == ("cold", "warm")
    assert NONE.held_at_zero is None


@pytest.mark.parametrize("form", ["cold", "warm"])
def test_a_held_engine_plans_and_drafts_nothing(form: str) -> None:
    planner = GoodputPlanner.build(8, EngineLimits(skips_drafter=True))
    scheduler = SimpleNamespace(_planner=planner)
    runner = SimpleNamespace(_cold="what skips the drafter")
    hold_depth(scheduler, runner, form)

    depths = {scheduler._planner.choose_depth(4, None) for _ in range(200)}

    assert depths == {0}
    # It has planned, which is part of the price, and believes that it chose depth 0.
    assert planner.plan.tokens_per_ms > 0
    assert planner.plan.depth == 0
    assert scheduler._planner.report() == planner.report()
    assert (runner._cold is None) == (form == "warm")


@pytest.mark.parametrize(
    ("cold", "verdict"),
    [
        ((99.5, 99.6, 99.4, 99.5), "met"),
        ((98.5, 98.6, 98.4, 98.5), "missed"),
        ((99.9, 98.0, 99.9, 98.5), "not decided"),
        ((99.9,), "not decided"),
    ],
)
def test_cold_depth_0_may_cost_one_per_cent(
    cold: tuple[float, ...], verdict: str
) -> None:
    # What moves a whole round cancels.
    factors = (1.0, 0.8, 1.2, 1.1)[: len(cold)]
    (one,) = judge(
        {
            "cold:8": tuple(a * b for a, b in zip(cold, factors, strict=True)),
            "warm:8": tuple(90.0 * factor for factor in factors),
            "none": tuple(100.0 * factor for factor in factors),
        }
    )
    assert one["verdict"] == verdict
    assert one["aim"] == 0.99
    assert one["where"] == CELL.name
    assert one["what"].startswith("cold:8")


def test_a_held_arm_is_no_rival_of_the_policy() -> None:
    verdicts = judge(
        {
            "none": (100.0, 100.0),
            "cold:8": (500.0, 500.0),
            "goodput:8": (110.0, 110.0),
        }
    )
    best = next(one for one in verdicts if one["measure"] == 1)
    assert best["value"] == pytest.approx(1.1)


def test_the_preset_compares_both_forms_with_no_speculation_at_three_loads() -> None:
    preset = PRESETS["cold"]
    assert preset.arms() == (COLD, WARM, NONE)
    (block,) = preset.blocks
    assert (block.workloads, len(block.concurrencies)) == (("mixed",), 3)
    # What all others are compared with comes last.
    assert preset.arms()[-1] == NONE
