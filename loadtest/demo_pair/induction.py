"""Starts a model with an induction circuit, so that it can copy from the first step.

Most tasks repeat parts of the prompt. To copy, one layer has to tell every token its
predecessor, and a later one has to look for "the token whose predecessor is the one
that I am". Neither half is worth anything alone: five million tokens did not teach
either to a model of this size. Written into the random weights it is there from the
start, and training adapts it as it does everything else.

Source: the circuit is that of Olsson et al., arXiv 2209.11895; writing it into the
weights of a Llama is ours.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# Embeddings start at a standard deviation of 0.02: three times that is a feature
# that every token has, and the norm before the layer makes it about 3.
_CONSTANT = 0.06
_NUM_FAST_PAIRS = 8
_PREVIOUS_GAIN = 1.6
_MATCH_GAIN = 2.5
# What the two heads add is about as large as the embedding.
_WRITE_GAIN = 0.04
_LIKENESS = 0.8
# How byte-level BPE writes a space.
_SPACE = "\u0120"


@torch.no_grad()
def add_induction_circuit(model: LlamaForCausalLM, seed: int) -> None:
    """Write the circuit into the first two layers.

    Args:
        model: A Llama of at least two layers, fresh from random weights; changed in
            place. All other heads and the feed-forward parts start silent (output
            weights zero), or their noise would drown the circuit.
        seed: Seed of the subspaces that the circuit uses.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    half = model.config.head_dim // 2
    names = _subspace(half, model.config.hidden_size, generator)
    previous = _subspace(half, model.config.hidden_size, generator)
    copied = _subspace(2 * half, model.config.hidden_size, generator)
    _tell_predecessor(model, names, previous)
    _copy_successor(model, names, previous, copied)


@torch.no_grad()
def relate_spaced_words(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Give a word with and without the space before it similar embeddings.

    Byte-level BPE has two tokens for them, unrelated at first, and the circuit
    would not find the one by the other.

    Args:
        model: A model fresh from random weights; changed in place.
        tokenizer: Its tokenizer.
    """
    vocabulary = tokenizer.get_vocab()
    weight = model.model.embed_tokens.weight
    # Sorted: the tokenizer lists its words in another order in every process.
    for token, number in sorted(vocabulary.items()):
        spaced = vocabulary.get(f"{_SPACE}{token}")
        if spaced is not None and len(token) > 1:
            mixed = (
                _LIKENESS * weight[spaced] + (1 - _LIKENESS**2) ** 0.5 * weight[number]
            )
            weight[number] = mixed


def _tell_predecessor(
    model: LlamaForCausalLM, names: torch.Tensor, previous: torch.Tensor
) -> None:
    """Attend one token back, and write its name where ``previous`` reads it.

    All tokens share one feature. Query and key read only that, and the key is
    turned by one position: under rotary embedding their product is a sum of
    ``cos(frequency * (distance - 1))`` over the fastest frequencies.
    """
    attention = model.model.layers[0].self_attn
    half, head_dim = len(names), 2 * len(names)
    num_pairs = min(_NUM_FAST_PAIRS, half)
    angles = model.model.rotary_emb.inv_freq[:num_pairs]
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    query[:num_pairs] = 1.0
    key[:num_pairs], key[half : half + num_pairs] = angles.cos(), angles.sin()
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    for projection, vector in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight[:head_dim] = 0.0
        projection.weight[:head_dim, 0] = _PREVIOUS_GAIN * vector
    attention.v_proj.weight[:half] = names
    attention.o_proj.weight[:, :half] = _WRITE_GAIN * previous.T


def _copy_successor(
    model: LlamaForCausalLM,
    names: torch.Tensor,
    previous: torch.Tensor,
    copied: torch.Tensor,
) -> None:
    """Attend to tokens whose predecessor has the own name, and predict them.

    Names are compared in the slow half of the frequencies, which rotary embedding
    hardly turns over a few hundred tokens.
    """
    attention = model.model.layers[1].self_attn
    half, head_dim = len(names), 2 * len(names)
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half)])
    slow[half - half // 2 :] += half
    for projection, features in (
        (attention.q_proj, names),
        (attention.k_proj, previous),
    ):
        projection.weight[:head_dim] = 0.0
        projection.weight[slow] = (_MATCH_GAIN * features).to(projection.weight.dtype)
    attention.v_proj.weight[:head_dim] = copied
    attention.o_proj.weight[:, :head_dim] = _WRITE_GAIN * copied.T


def _subspace(
    num_rows: int, num_columns: int, generator: torch.Generator
) -> torch.Tensor:
    """Return orthonormal rows, [num_rows, num_columns]; column 0 is left out.

    Column 0 is the feature that all tokens share and that therefore tells nothing.
    """
    matrix = torch.randn(num_columns - 1, num_rows, generator=generator)
    rows = torch.linalg.qr(matrix).Q.T
    return torch.cat([torch.zeros(num_rows, 1), rows], dim=1)
