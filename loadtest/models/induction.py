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
def relate_spaced_words(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Give a word with and without the space before it similar embeddings.

    Byte-level BPE has two tokens for them, and the circuit would not find the one by
    the other. Changes a model fresh from random weights in place.
    """
    vocabulary = tokenizer.get_vocab()
    weight = model.model.embed_tokens.weight
    # Sorted: the tokenizer lists its words in another order in every process.
    for token, number in sorted(vocabulary.items()):
        spaced = vocabulary.get(f"{_SPACE}{token}")
        if spaced is not None and len(token) > 1:
            rest = (1 - _LIKENESS**2) ** 0.5
            weight[number] = _LIKENESS * weight[spaced] + rest * weight[number]


@torch.no_grad()
def add_induction_circuit(model: LlamaForCausalLM, seed: int) -> None:
    """Write the circuit into the first two layers of a model of random weights.

    All other heads and the feed-forward parts start silent (output weights zero), or
    their noise would drown the circuit. The seed decides the subspaces that it uses.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    head_dim, hidden = model.config.head_dim, model.config.hidden_size
    half = head_dim // 2
    generator = torch.Generator().manual_seed(seed)
    names, previous, copied = (
        _subspace(num_rows, hidden, generator) for num_rows in (half, half, head_dim)
    )
    tell, copy = (layer.self_attn for layer in model.model.layers[:2])

    # The first head attends one token back, and writes its name where `previous` reads
    # it. All tokens share one feature. Query and key read only that, and the key is
    # turned by one position: under rotary embedding their product is a sum of
    # cos(frequency * (distance - 1)) over the fastest frequencies.
    num_pairs = min(_NUM_FAST_PAIRS, half)
    angles = model.model.rotary_emb.inv_freq[:num_pairs]
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    query[:num_pairs] = 1.0
    key[:num_pairs], key[half : half + num_pairs] = angles.cos(), angles.sin()
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    for projection, vector in ((tell.q_proj, query), (tell.k_proj, key)):
        projection.weight[:head_dim] = 0.0
        projection.weight[:head_dim, 0] = _PREVIOUS_GAIN * vector
    tell.v_proj.weight[:half] = names
    tell.o_proj.weight[:, :half] = _WRITE_GAIN * previous.T

    # The second attends to tokens whose predecessor has the own name, and predicts
    # them. Names are compared in the slow half of the frequencies, which rotary
    # embedding hardly turns over a few hundred tokens.
    slow = torch.arange(half // 2, half).repeat(2)
    slow[half - half // 2 :] += half
    for projection, features in ((copy.q_proj, names), (copy.k_proj, previous)):
        projection.weight[:head_dim] = 0.0
        projection.weight[slow] = _MATCH_GAIN * features
    copy.v_proj.weight[:head_dim] = copied
    copy.o_proj.weight[:, :head_dim] = _WRITE_GAIN * copied.T


def _subspace(
    num_rows: int, num_columns: int, generator: torch.Generator
) -> torch.Tensor:
    """Return orthonormal rows, [num_rows, num_columns]; column 0 is left out.

    Column 0 is the feature that all tokens share and that therefore tells nothing.
    """
    matrix = torch.randn(num_columns - 1, num_rows, generator=generator)
    rows = torch.linalg.qr(matrix).Q.T
    return torch.cat([torch.zeros(num_rows, 1), rows], dim=1)
