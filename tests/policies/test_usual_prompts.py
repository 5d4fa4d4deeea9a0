"""Prompts come in few steps and then by the hundred: what that does to prices."""

import numpy as np
import pytest

from policies.estimators.step_cost import StepCost
from policies.types import CostProfile, StepTiming

PROMPT_EVERY, PROMPT_TOKENS = 8, 96
COUNTS = (1, 16, 24, 96, 128, 256)
TIMES_MS = (30.0, 30.0, 54.0, 60.0, 62.0, 70.0)
"""Dear past 16 tokens, and next to level past 24."""


def feed(cost, num_steps=400):
    """Take steps of 16 requests without drafts, of which one in eight has a prompt."""
    for step in range(num_steps):
        prompt = 0 if step % PROMPT_EVERY else PROMPT_TOKENS
        target_ms = float(np.interp(16 + prompt, COUNTS, TIMES_MS))
        cost.observe(StepTiming(16, 16, prompt, 0, 0, target_ms, 0.0, 0.0, 1.0))


@pytest.fixture
def cost():
    cost = StepCost(max_tokens=256, max_reqs=16)
    cost.fit_profile(CostProfile(COUNTS, TIMES_MS, (0.0,) * len(COUNTS)))
    feed(cost)
    return cost


def test_a_mean_is_over_steps_as_they_come_not_over_one_of_mean_length(cost):
    share = 1 / PROMPT_EVERY
    assert cost.prompts.share == pytest.approx(share, rel=0.6)
    assert cost.prompts.mean_tokens / cost.prompts.share == pytest.approx(PROMPT_TOKENS)
    more_ms = cost.target.at(16 + PROMPT_TOKENS) - cost.target.at(16)
    assert cost.prompts.more_ms(cost.target, 16) == pytest.approx(
        cost.prompts.share * more_ms
    )


def test_skipped_steps_make_prompts_rarer_and_not_shorter(cost):
    share = cost.prompts.share
    cost.prompts.skip(16)
    assert cost.prompts.share < 0.7 * share
    assert cost.prompts.mean_tokens / cost.prompts.share == pytest.approx(PROMPT_TOKENS)


def test_drafts_are_priced_in_the_steps_that_carry_them(cost):
    prices_ms = cost.prompts.pass_ms(cost.target, np.array([16.0, 24.0]))
    # Seven steps in eight pay 24 ms for eight drafts, the eighth next to nothing.
    dear_ms = cost.target.at(24) - cost.target.at(16)
    assert np.diff(prices_ms)[0] > 0.7 * dear_ms
