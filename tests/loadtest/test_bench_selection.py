"""The time that planning takes of a step."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.bench_selection import main, time_planning
from policies.batch import EngineLimits, PolicySpec
from policies.planner import build_planner

NUM_ROUNDS = 3


@pytest.mark.parametrize("has_classes", [False, True])
def test_planning_takes_little_of_a_step_at_64_requests(has_classes: bool) -> None:
    limits = EngineLimits(skips_drafter=True, stops_drafts=True)
    planner = build_planner(PolicySpec("goodput", 8), limits)
    means_us = [
        np.mean(time_planning(planner, 64, 8, 300, has_classes=has_classes)[1])
        for _ in range(NUM_ROUNDS)
    ]
    # Wanted are 200 on an idle core; the tests share theirs, and memory with others.
    assert min(means_us) < 1000


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--policy", "goodput", "--requests", "3", "--repeats", "20", "--classes"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "goodput, 3 requests x 8 positions, 20 steps"
    assert [line.split(":")[0] for line in lines[1:]] == ["selection", "whole step"]
