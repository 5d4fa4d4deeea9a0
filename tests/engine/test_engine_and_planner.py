"""What an engine tells its planner of requests and passes, and does as it says."""

from unittest.mock import Mock

import numpy as np
import pytest

from policies.planner import Planner
from policies.types import DraftSelection
from tests.engine.checks import draw_prompts, greedy, summarize_all
from tests.engine.made_up import make_up_costs, plan_instead
from tests.engine.test_request_classes import CLASSES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def engine(tetris):
    """An engine with request classes, as if new."""
    tetris.set_policy("goodput", classes=CLASSES)
    return tetris


def overhear(engine, method):
    """Return a mock of a method of the planner, which does what it did."""
    spy = Mock(wraps=getattr(engine.scheduler._planner, method))
    plan_instead(engine.scheduler, **{method: spy})
    return spy


def test_classes_reach_the_planner_and_leave_the_output_alone(engine, plain):
    """By name, by priority, or neither."""
    # A step takes 60 ms and more: within 30 ms a token only with its own drafts.
    make_up_costs(engine)
    methods = ("select", "choose_depth", "plan_batch")
    select, choose_depth, plan_batch = (overhear(engine, one) for one in methods)
    prompts, named = draw_prompts(24), {"request_class": "interactive"}
    params = [
        greedy(16 + 2 * n, extra_args=named if n % 3 == 0 else None)
        for n in range(len(prompts))
    ]
    priority = [10 if n % 3 == 1 else 0 for n in range(len(prompts))]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(inputs, params, priority=priority, use_tqdm=False)
    assert summarize_all(outputs) == plain.answer(prompts, params)
    assert engine.counters.num_fallbacks == {}
    batches = [call.args[0] for call in select.call_args_list]
    weighed = [batch.weights for batch in batches if batch.weights is not None]
    assert {float(one) for weights in weighed for one in weights} == {0.5, 2.0, 4.0}
    targets = [batch.latency_targets_ms for batch in batches]
    assert {float(one.min()) for one in targets if one is not None} == {30.0}
    assert 30.0 in {call.args[1] for call in choose_depth.call_args_list}
    loads = [call.args[0] for call in plan_batch.call_args_list]
    assert {load.latency_target_ms for load in loads} - {None} == {30.0}
    mixes = {one[:2] for load in loads for one in load.classes}
    assert mixes == {(30.0, 4.0), (np.inf, 0.5), (np.inf, 2.0)}


class EveryOther(Planner):
    """Verifies some drafts of every other request."""

    def __init__(self, max_depth, limits, num_kept):
        self.max_depth, self.num_kept = max_depth, num_kept

    def select(self, batch):
        admitted = np.minimum(batch.num_draft_tokens, self.num_kept)
        admitted[::2] = 0
        return DraftSelection(admitted, int(admitted.sum()))

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return self.max_depth

    def observe(self, outcome):
        pass


def test_a_planner_of_somebody_elses_package_is_built_and_obeyed(tetris):
    engine, name = tetris, f"{__name__}:EveryOther"
    engine.set_policy(name, max_draft_tokens=3, params={"num_kept": 2})
    engine.complete(draw_prompts(4), greedy(16))
    counters = engine.counters
    assert counters.policy == name
    assert counters.num_fallbacks == {}
    assert counters.num_verified_tokens > 0
    # Of at most four requests two verify two of three drafts each.
    assert counters.num_verified_tokens <= counters.num_proposed_tokens / 3
