"""Steps without drafts cost no rejection sampling, and come out the same."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies.baselines import FixedPlanner
from tests.engine.checks import draw_prompt, summarize_all
from tests.engine.conftest import run_engine

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 4


def generate(engine, **sampling):
    from vllm import SamplingParams

    return engine.llm.generate(
        [{"prompt_token_ids": draw_prompt(i, 12)} for i in range(NUM_PROMPTS)],
        SamplingParams(max_tokens=20, ignore_eos=True, **sampling),
        use_tqdm=False,
    )


class NeverDrafts(FixedPlanner):
    """Has nothing drafted, as goodput under full load."""

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return 0


@pytest.mark.parametrize("cu_num_tokens", [[1], [1, 2, 3], [5, 6, 40]])
def test_a_step_without_drafts_is_described_as_vllm_does(cu_num_tokens):
    from serving.engine.compat_cpu import GPUModelRunner
    from serving.engine.cpu.plain_steps import PlainSteps

    # Stands in for what vLLM's own description of a step reads of its runner.
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        input_ids=SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32)),
        arange_np=np.arange(64),
        _arange_scratch=np.zeros(64, dtype=np.int64),
    )
    runner._get_cumsum_and_arange = partial(
        GPUModelRunner._get_cumsum_and_arange, runner
    )
    running = np.array(cu_num_tokens)
    theirs = GPUModelRunner._calc_spec_decode_metadata(
        runner, np.zeros(running.size, dtype=np.int32), running
    )
    ours = PlainSteps(16, runner.device).describe(running)
    for name, value in vars(theirs).items():
        own = getattr(ours, name)
        if torch.is_tensor(value):
            assert own.dtype == value.dtype, name
            assert own.tolist() == value.tolist(), name
        else:
            assert own == value, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 5},
        {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    ],
    ids=["greedy", "penalties", "seeded"],
)
def test_without_drafts_an_engine_answers_like_one_without_a_drafter(
    sampling, tiny_pair
):
    with run_engine(tiny_pair[0]) as plain:
        expected = generate(plain, **sampling)
    with run_engine(*tiny_pair, policy="goodput") as engine:
        engine.scheduler._planner = NeverDrafts(1)
        generate(engine, **sampling)  # The first step still has depth 1 to draft.
        rejections = []
        sampler = engine.runner.rejection_sampler
        sampler.register_forward_hook(lambda *call: rejections.append(call))
        outputs = generate(engine, **sampling)
        assert not rejections
        assert engine.scheduler.counters.num_verified_tokens == 0
    assert summarize_all(outputs) == summarize_all(expected)
