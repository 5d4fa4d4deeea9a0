"""Steps without drafts cost no rejection sampling, and come out the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from serving.engine.compat import GPUModelRunner
from tests.engine.checks import draw_prompt, summarize_all
from tests.engine.conftest import run_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_PROMPTS = 4


def generate(engine: Any, **sampling: Any) -> Any:
    from vllm import SamplingParams

    return engine.llm.generate(
        [{"prompt_token_ids": draw_prompt(i, 12)} for i in range(NUM_PROMPTS)],
        SamplingParams(max_tokens=20, ignore_eos=True, **sampling),
        use_tqdm=False,
    )


def never_draft(engine: Any) -> None:
    engine.scheduler._planner.choose_depth = lambda num_reqs, target_ms=None: 0


def test_a_step_without_drafts_is_described_as_vllm_does(
    tiny_pair: tuple[Path, Path],
) -> None:
    with run_engine(*tiny_pair, policy="goodput") as engine:
        runner = engine.runner
        for cu_num_tokens in ([1], [1, 2, 3], [5, 6, 40]):
            arguments = (
                np.zeros(len(cu_num_tokens), dtype=np.int32),
                np.array(cu_num_tokens, dtype=np.int32),
            )
            ours = runner._calc_spec_decode_metadata(*arguments)
            theirs = GPUModelRunner._calc_spec_decode_metadata(runner, *arguments)
            for name, value in vars(theirs).items():
                own = getattr(ours, name)
                if torch.is_tensor(value):
                    assert own.dtype == value.dtype, name
                    assert own.tolist() == value.tolist(), name
                else:
                    assert own == value, name


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
    sampling: dict[str, Any], tiny_pair: tuple[Path, Path]
) -> None:
    with run_engine(tiny_pair[0]) as plain:
        expected = generate(plain, **sampling)
    with run_engine(*tiny_pair, policy="goodput") as engine:
        never_draft(engine)
        generate(engine, **sampling)  # The first step still has depth 1 to draft.
        rejections: list[Any] = []
        sampler = engine.runner.rejection_sampler
        sampler.register_forward_hook(lambda *call: rejections.append(call))
        outputs = generate(engine, **sampling)
        assert not rejections
        assert engine.scheduler.counters.num_verified_tokens == 0
    assert summarize_all(outputs) == summarize_all(expected)
