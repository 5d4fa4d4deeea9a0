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
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
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
        self.fc_norm = nn.ModuleList(
            [LlamaRMSNorm(width, eps) for _ in range(num_features)]
        )
        self.fc = nn.Linear(num_features * width, width, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)

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
        cache = _Cache(length)
        outputs = []
        for step in range(num_steps):
            tokens = fed[:, step + 1 : step + 1 + length]
            embeds = functional.embedding(tokens, embedding)
            hidden = self.midlayer(embeds, hidden, cache)
            outputs.append(self.norm(hidden))
        return outputs


class _MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cache: _Cache
    ) -> torch.Tensor:
        inputs = [self.input_layernorm(embeds), self.hidden_norm(hidden)]
        hidden = hidden + self.self_attn(torch.cat(inputs, dim=-1), cache)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim or width // heads
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_width, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        # Made now and in float32, whatever the weights are cast to.
        positions = torch.arange(config.max_position_embeddings)
        rotary = LlamaRotaryEmbedding(config)
        self._cos, self._sin = rotary(torch.zeros(1), positions[None])

    def forward(self, inputs: torch.Tensor, cache: _Cache) -> torch.Tensor:
        query, key, value = (
            proj(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        places = slice(len(cache.keys), len(cache.keys) + cache.length)
        cos, sin = (
            table[:, places].to(query.dtype) for table in (self._cos, self._sin)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        cache.keys.append(key)
        cache.values.append(value)
        groups = query.shape[1] // key.shape[1]
        keys, values = (
            torch.cat(part, dim=2).repeat_interleave(groups, dim=1)
            for part in (cache.keys, cache.values)
        )
        seen = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=cache.mask()
        )
        result: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return result


class _Cache:
    """Keys and values by step, each of all rows."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def mask(self) -> torch.Tensor:
        """Let a row see the first step's rows up to its own, and its own later ones."""
        own = torch.eye(self.length, dtype=torch.bool)
        return torch.cat(
            [own.new_ones(own.shape).tril(), *(len(self.keys) - 1) * [own]], 1
        )


def predictable(answer_of: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Mark where the token that a step predicts belongs to the answer being written.

    From the number of the answer (from 1, or 0) that each token belongs to, [chats,
    length], to [steps, chats, length], bool.
    """
    length = answer_of.shape[1]
    ahead = functional.pad(answer_of, (0, num_steps + 1))
    known = ahead[:, 1 : 1 + length]
    return torch.stack(
        [
            (known > 0) & (known == ahead[:, step + 2 : step + 2 + length])
            for step in range(num_steps)
        ]
    )


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
