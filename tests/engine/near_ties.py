"""Whether bf16 may have chosen otherwise: tokens beside float32 logits."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.engine.checks import complete, greedy

BF16_ROUNDING = 0.425 * 2.0**-8
"""Root mean square relative error of one rounding to bf16's 8 significant bits: uniform
over at most 2**-8 of the value for a mantissa of 1 and half of that towards 2; with
log-uniform mantissas m, sqrt(E[m**-2] / 3) = sqrt(0.375 / ln 2 / 3) = 0.425 of it."""

ROUNDINGS_PER_LAYER = 11
"""Norm, QKV, rotation, attention, output projection, residual; norm, gate and up,
activation, down, residual."""

NEAR_TIE_SIGMAS = 6.0
"""Gap between two logits that rounding can close, in standard deviations of the gap's
error: one in 10,000 errors is larger than 4, and the noise level is an estimate."""


@dataclass(frozen=True)
class Rounding:
    """The target in float32, to tell what bf16 may do to its choices.

    If every rounding turns the hidden state by `BF16_ROUNDING` in a random direction,
    n of them add up to sqrt(n) times that, and since a logit is the hidden state's
    projection on one of many random-looking directions, its error is that multiple of
    the logits' own standard deviation. A gap between two logits errs by sqrt(2) more.
    """

    model: Any

    @classmethod
    def of(cls, target):
        """Load a target with the weights that a bf16 engine computes with."""
        weights = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        return cls(weights.float())

    @torch.no_grad()
    def shortfall(self, prompt, tokens):
        """How far each token's logit falls short of the largest one.

        Returns:
            `[num_tokens]`, in standard deviations of the error of such a gap; 0 where
            the token is the float32 argmax given prompt and preceding tokens.
        """
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        num_roundings = ROUNDINGS_PER_LAYER * self.model.config.num_hidden_layers + 2
        noise = BF16_ROUNDING * num_roundings**0.5 * logits.std(dim=-1) * 2**0.5
        gaps = ((logits.amax(dim=-1) - chosen) / noise).numpy()
        return gaps


def find_shortfalls(engine, prompts, target, max_tokens=40):
    """Judge what an engine answers, `[num_tokens]` for each prompt."""
    rounding = Rounding.of(target)
    return [
        rounding.shortfall(prompt, list(output.outputs[0].token_ids))
        for prompt, output in zip(
            prompts, complete(engine, prompts, greedy(max_tokens)), strict=True
        )
    ]
