"""A small model of its own, which drafts without anything of the target's.

It has the target's whole vocabulary. Its embedding, which is its output layer too,
begins as the principal components of the target's: what is alike to the target then is
so to the drafter before it has learnt anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

_NUM_LAYERS = 2
_HEAD_DIM = 64


class SmallModel(LlamaForCausalLM):
    """A Llama of two layers, trained as :class:`Eagle3Head` is."""

    def __init__(self, target: LlamaConfig, width: int) -> None:
        """Make random weights."""
        num_heads = max(1, width // _HEAD_DIM)
        kept = (
            *("vocab_size", "max_position_embeddings", "rms_norm_eps"),
            *("rope_parameters", "bos_token_id", "eos_token_id"),
        )
        described = target.to_dict()
        super().__init__(
            LlamaConfig(
                **{name: described[name] for name in kept},
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=_NUM_LAYERS,
                num_attention_heads=num_heads,
                num_key_value_heads=max(1, num_heads // 2),
                tie_word_embeddings=True,
            )
        )

    @torch.no_grad()
    def begin_as(
        self, embedding: torch.Tensor, norm: torch.Tensor, scale: float
    ) -> None:
        """Take over what fits of a target's.

        Args:
            embedding: `[vocabulary, width]`, that of its output too.
            norm: `[width]`, the weight of its last norm.
            scale: Of the logits, over the target's.
        """
        width = self.config.hidden_size
        left, sizes, right = torch.svd_lowrank(embedding.float(), width, niter=4)
        self.model.embed_tokens.weight.copy_(left * sizes)
        # As large as the target's last states are along these components.
        own = (right.T.square() @ norm.float().square()).sqrt()
        self.model.norm.weight.copy_(scale * own)

    def unroll(
        self,
        embedding: torch.Tensor,  # noqa: ARG002 - as in Eagle3Head
        token_ids: torch.Tensor,
        features: torch.Tensor,  # noqa: ARG002
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Draft from every position, as :meth:`Eagle3Head.unroll` does.

        Fed the tokens that came, a further step is the next row of the same pass.
        """
        states: Any = self.model(input_ids=token_ids, use_cache=False)[0]
        return [
            functional.pad(states[:, step + 1 :], (0, 0, 0, step + 1))
            for step in range(num_steps)
        ]
