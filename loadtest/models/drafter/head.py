"""The EAGLE-3 head, computed in training as vLLM computes it when it drafts.

Row ``t`` of the first step sees the target's features at position ``t``, the token
after it, and the rows before it, and predicts the token two after ``t``. A further
step of that row sees its own last state instead of features, the next token, the next
position, and in attention the first step's rows up to ``t`` and its own earlier steps:
what vLLM's cache holds by then, as a request drafts from one place at a time.

Source: EAGLE-3, arXiv 2503.01840, training-time test; run time, vLLM 0.32's
``llama_eagle3.py`` and ``llm_base_proposer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class Eagle3Head(nn.Module):
    """One decoder layer over the target's features; its tensors have vLLM's names."""

    def __init__(
        self, config: LlamaConfig, draft_vocab_size: int, num_features: int = 3
    ) -> None:
        """Make random weights, for so many layers of the target that are read."""
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        # Layers differ in scale by orders of magnitude, and so do positions.
        norms = [LlamaRMSNorm(width, eps) for _ in range(num_features)]
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(num_features * width, width, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)
        # Made now and in float32, whatever the weights are cast to.
        positions = torch.arange(config.max_position_embeddings)
        rotary = LlamaRotaryEmbedding(config)
        self._cos, self._sin = rotary(torch.zeros(1), positions[None])

    def unroll(
        self,
        embedding: torch.Tensor,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Draft from every position at once, each step fed the token that came.

        `embedding` is the target's, [vocabulary, width]; `token_ids`, [chats, length],
        are padded at the end; `features` are [chats, length, features x width].

        Returns:
            For each step the states before the output layer, [chats, length, width].
            Row ``t`` of step ``j`` predicts token ``t + 2 + j``; rows for which the
            chat is too short hold nothing of use.
        """
        length = token_ids.shape[1]
        fed = functional.pad(token_ids, (0, num_steps))
        parts = features.chunk(len(self.fc_norm), dim=-1)
        hidden = self.fc(
            torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        )
        own = torch.eye(length, dtype=torch.bool, device=hidden.device)
        mask, cache, outputs = torch.ones_like(own).tril(), DynamicCache(), []
        for step in range(num_steps):
            tokens = fed[:, step + 1 : step + 1 + length]
            turns = (
                table[:, step : step + length].to(hidden)
                for table in (self._cos, self._sin)
            )
            hidden = self.midlayer(
                functional.embedding(tokens, embedding),
                hidden,
                position_embeddings=tuple(turns),
                attention_mask=mask[None, None],
                past_key_values=cache,
            )
            outputs.append(self.norm(hidden))
            mask = torch.cat([mask, own], dim=1)
        return outputs


class _MidLayer(LlamaDecoderLayer):
    """A Llama layer that attends to embeddings and states side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = getattr(self.self_attn, name).out_features
            wide = nn.Linear(2 * config.hidden_size, num_outputs, bias=False)
            setattr(self.self_attn, name, wide)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, **attention: Any
    ) -> torch.Tensor:
        inputs = [self.input_layernorm(embeds), self.hidden_norm(hidden)]
        seen, _ = self.self_attn(torch.cat(inputs, dim=-1), **attention)
        hidden = hidden + seen
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


def predictable(answer_of: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Mark where the token that a step predicts belongs to the answer being written.

    From the number of the answer (from 1, or 0) that each token belongs to, [chats,
    length], to [steps, chats, length], bool.
    """
    length = answer_of.shape[1]
    ahead = functional.pad(answer_of, (0, num_steps + 1))
    known, *predicted = (ahead[:, n : n + length] for n in range(1, 2 + num_steps))
    return torch.stack([(known > 0) & (known == one) for one in predicted])


def head_config(
    target: LlamaConfig, draft_vocab_size: int, aux_layer_ids: Sequence[int]
) -> dict[str, Any]:
    """Describe the head for vLLM, as its ``config.json``."""
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id"),
    )
    described = target.to_dict()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: described[name] for name in kept},
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
        "fc_norm": True,
    }
