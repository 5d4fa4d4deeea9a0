"""The time that planning takes of a step."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.bench_selection import main, time_planning
from policies.registry import build_planner
from policies.types import EngineLimits, PolicySpec


@pytest.mark.parametrize("has_classes", [False, True])
def test_every_step_is_timed_and_selection_is_a_part_of_it(has_classes: bool) -> None:
    limits = EngineLimits(skips_drafter=True, exits_early=True)
    planner = build_planner(PolicySpec("goodput", max_draft_tokens=8), limits)
    selecting_us, planning_us = time_planning(
        planner, 64, 8, 30, has_classes=has_classes
    )
    assert len(selecting_us) == len(planning_us) == 30
    assert 0 < np.sum(selecting_us) < np.sum(planning_us)


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--policy", "goodput", "--requests", "3", "--repeats", "20", "--classes"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "goodput, 3 requests x 8 positions, 20 steps"
    assert [line.split(":")[0] for line in lines[1:]] == ["selection", "whole step"]
