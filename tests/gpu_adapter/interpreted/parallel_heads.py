"""Heads that draft a whole block in one pass, written by hand for a Markov target.

For `tests.engine.tiny_models.write_markov_llama`, whose next token hangs mostly on the
last one, so that heads can be right without training.
"""

import torch
from transformers import LlamaForCausalLM, Qwen3Config

from tests.engine.tiny_models import HIDDEN_SIZE, VOCAB_SIZE, write_checkpoint

NUM_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS

MASK_TOKEN = 0
"""Stands in the places to be drafted; ordinary text has none."""

TARGET_LAYERS = [0, 1]
"""Their hidden states come with the context; the heads hardly look at them."""

SURE = 2.0
"""Log-odds that the confidence head always gives."""


def write_dflash_head(folder, target):
    """Write a DFlash head whose every place repeats its guess of the first token.

    Each place attends to the newest token of the text, the anchor, and hands its
    embedding to the target's output layer. Ordinary tokens and the mask lie on two
    sides of a plane, by which queries and keys find each other.
    """
    model = LlamaForCausalLM.from_pretrained(target).model
    embedding = model.embed_tokens.weight.detach().clone()
    side = torch.zeros(HIDDEN_SIZE)
    side[-1] = 1.0
    embedding[:, -1] = 0.1
    embedding[MASK_TOKEN] = -0.1 * side
    # The slowest of the rotary frequencies: places hardly turn it.
    direction = torch.zeros(HEAD_DIM)
    direction[HEAD_DIM // 2 - 1] = 1.0
    finder = torch.outer(direction.repeat(NUM_HEADS), side)
    weights = _make_backbone()
    weights |= {
        # Nothing of the context: it would lie on both sides.
        "fc.weight": torch.zeros_like(weights["fc.weight"]),
        "embed_tokens.weight": embedding,
        "layers.0.self_attn.q_proj.weight": -finder,
        "layers.0.self_attn.k_proj.weight": finder,
        "layers.0.self_attn.v_proj.weight": torch.eye(HIDDEN_SIZE),
        "layers.0.self_attn.o_proj.weight": torch.eye(HIDDEN_SIZE),
    }
    drafting = {"mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYERS}
    config = _make_config("DFlashDraftModel") | {"dflash_config": drafting}
    return write_checkpoint(folder, config, weights)


def write_dspark_head(folder, target):
    """Write a DSpark head whose Markov part is the target's own.

    Its backbone says next to nothing; its confidence head is always as sure.
    """
    model = LlamaForCausalLM.from_pretrained(target)
    embedding = model.model.embed_tokens.weight.detach()
    # A token that ordinary text has none of may be embedded as nothing at all.
    scale = embedding.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)
    weights = _make_backbone()
    weights |= {
        "norm.weight": torch.full((HIDDEN_SIZE,), 1e-3),
        "markov_head.markov_w1.weight": embedding / scale,
        "markov_head.markov_w2.weight": model.lm_head.weight.detach().clone(),
        "confidence_head.proj.weight": torch.zeros(1, 2 * HIDDEN_SIZE),
        "confidence_head.proj.bias": torch.tensor([SURE]),
    }
    config = _make_config("Qwen3DSparkModel") | {
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": TARGET_LAYERS,
        "markov_rank": HIDDEN_SIZE,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return write_checkpoint(folder, config, weights)


def _make_config(architecture):
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return {**config.to_dict(), "architectures": [architecture]}


def _make_backbone():
    """Make one decoder layer whose parts add little."""
    square = (HIDDEN_SIZE, HIDDEN_SIZE)
    shapes = {
        "fc": (HIDDEN_SIZE, len(TARGET_LAYERS) * HIDDEN_SIZE),
        **{f"layers.0.self_attn.{name}_proj": square for name in "qkvo"},
        **{f"layers.0.mlp.{name}_proj": square for name in ("gate", "up", "down")},
    }
    wide = ("hidden_norm", "norm", "layers.0.input_layernorm")
    norms = dict.fromkeys([*wide, "layers.0.post_attention_layernorm"], HIDDEN_SIZE)
    norms |= {f"layers.0.self_attn.{name}_norm": HEAD_DIM for name in "qk"}
    torch.manual_seed(1)
    return {
        **{f"{name}.weight": 0.01 * torch.randn(of) for name, of in shapes.items()},
        **{f"{name}.weight": torch.ones(of) for name, of in norms.items()},
    }
