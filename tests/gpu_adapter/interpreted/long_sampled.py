"""Above temperature 0 the V2 runner's output follows the target's law.

As `tests.engine.test_lossless_sampled`, whose models, laws and statistics it uses:
sampled drafts, a budget below their number, requests that compete for it. The control
ranks by the probability of the drawn tokens; the same test must reject it. It takes six
minutes on two cores, so it runs only where it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaForCausalLM

from serving.engine.gpu.speculators import PacedStandalone
from serving.engine.reclass import reclass
from tests.engine.statistics import (
    chi_square,
    chi_square_p_value,
    count_sequences,
    sequence_law,
)
from tests.engine.test_lossless_sampled import (
    ACCEPTED_ABOVE,
    FREE_GROUPS,
    LENGTH,
    REJECTED_BELOW,
    VOCAB,
    write_small_pair,
)
from tests.gpu_adapter.interpreted.engines import run_interpreted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from tests.engine.conftest import Engine

NUM_SAMPLES = 220
"""Requests per group and engine."""

GROUPS = {name: FREE_GROUPS[name] for name in ("plain", "other prompt", "cool")}

TETRIS = {"policy": "tetris", "draft_tokens": 1, "extra_draft_tokens": 1}


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft equal to its target: every deviation comes from the selection."""
    return write_small_pair(tmp_path_factory.mktemp("perfect"), noise=0.0)


class DrawnTokenDrafter(PacedStandalone):
    """Scores a draft by the probability of the token drawn: the paper's rule."""

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        drawn: torch.Tensor = super().sample_draft(
            hidden_states,
            sample_src_positions,
            idx_mapping,
            temperature,
            *args,
            **kwargs,
        )
        step = int(self.current_draft_step)
        logits = self.draft_logits[idx_mapping, step].float()
        probs = (logits / temperature[idx_mapping, None]).softmax(dim=-1)
        self.draft_token_confidence_probs[: len(drawn), step] = probs.gather(
            1, drawn[:, None].long()
        )[:, 0]
        return drawn


def rank_as_the_paper(engine: Engine) -> None:
    """Bias the drafter."""
    reclass(engine.runner.speculator, DrawnTokenDrafter)


def judge(
    pair: tuple[Path, Path],
    prepare: Callable[[Engine], None] = lambda _: None,
    **options: Any,
) -> tuple[float, dict[str, Any]]:
    """Return the p-value of the target's law, and the engine's counters."""
    names = list(GROUPS) * NUM_SAMPLES
    with run_interpreted(
        *pair,
        speculative={"draft_sample_method": "probabilistic"},
        skip_tokenizer_init=False,
        max_model_len=64,
        max_num_seqs=32,
        seed=1,
        **options,
    ) as engine:
        prepare(engine)
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(GROUPS[name].prompt)} for name in names],
            [GROUPS[name].make_params(number) for number, name in enumerate(names)],
            use_tqdm=False,
        )
        counters = engine.scheduler.snapshot()
    tokens: dict[str, list[Any]] = defaultdict(list)
    for name, output in zip(names, outputs, strict=True):
        tokens[name].append(output.outputs[0].token_ids)
    model = LlamaForCausalLM.from_pretrained(pair[0]).double()
    p_value = chi_square_p_value(
        chi_square(
            count_sequences(tokens[name], VOCAB, LENGTH),
            sequence_law(model, group.prompt, LENGTH, **group.sampling),
        )
        for name, group in GROUPS.items()
    )
    return p_value, counters


def test_output_follows_the_targets_law(small_pair: tuple[Path, Path]) -> None:
    p_value, counters = judge(small_pair, **TETRIS)

    assert counters["num_cut_tokens"]["budget"] > NUM_SAMPLES
    assert counters["num_accepted_tokens"] > NUM_SAMPLES
    assert p_value > ACCEPTED_ABOVE


def test_ranking_by_the_drawn_tokens_is_rejected(
    small_pair: tuple[Path, Path],
) -> None:
    p_value, counters = judge(small_pair, rank_as_the_paper, **TETRIS)

    assert counters["num_cut_tokens"]["budget"] > NUM_SAMPLES
    assert p_value < REJECTED_BELOW
