"""At temperature 0 the runner emits what vLLM's own emits without speculation."""

import pytest

from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.verification import PlannedVerification
from tests.engine.checks import (
    Arrival,
    check_counters,
    draw_prompts,
    drive,
    greedy,
    summarize,
)
from tests.engine.made_up import make_up_costs
from tests.gpu_adapter.interpreted.engines import run_interpreted

NUM_REQUESTS = 12

POLICIES = {
    "fixed": {"draft_tokens": 3},
    "tetris": {"draft_tokens": 2, "extra_draft_tokens": 2},
    "dynamic": {"draft_tokens": 4},
    "goodput": {"draft_tokens": 4},
}


def make_arrivals():
    """Make requests that join one after the other, more than run at once."""
    return [
        Arrival(str(number), prompt, greedy(10 + 3 * (number % 4)), step=number // 2)
        for number, prompt in enumerate(draw_prompts(NUM_REQUESTS))
    ]


@pytest.fixture(scope="module")
def expected(pair):
    """What vLLM's V2 runner answers without drafts."""
    with run_interpreted(pair[0]) as plain:
        return summarize_by_name(drive(plain, make_arrivals()))


def summarize_by_name(outputs):
    return {name: summarize(output.outputs[0]) for name, output in outputs.items()}


@pytest.mark.parametrize("policy", list(POLICIES))
def test_tokens_are_those_without_speculation(policy, pair, expected):
    with run_interpreted(*pair, policy=policy, **POLICIES[policy]) as engine:
        if policy in ("dynamic", "goodput"):
            make_up_costs(engine)
        assert isinstance(engine.runner, TetrisGPUModelRunner)
        assert isinstance(engine.runner.adaptive_verification, PlannedVerification)
        outputs = drive(engine, make_arrivals())
        counters = engine.scheduler.counters
        graphs = engine.runner.cudagraph_manager.graphs.values()
        num_replays = sum(graph.num_replays for graph in graphs)

    assert summarize_by_name(outputs) == expected
    check_counters(counters)
    assert counters.num_accepted_tokens > NUM_REQUESTS
    assert (counters.num_cut_tokens["budget"] > 0) == (policy in ("tetris", "goodput"))
    assert num_replays > 0
