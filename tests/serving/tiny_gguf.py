"""A GGUF file of a few kilobytes, written by the format's own library."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

Q8_0 = gguf.GGMLQuantizationType.Q8_0
WIDTH, HEADS, KV_HEADS, FFN = 64, 4, 2, 96
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")


def write_gguf(
    file: Path, *, architecture: str = "llama", split: str = "smollm"
) -> dict[str, NDArray[np.float32]]:
    """Write a Llama of one layer with a byte-level vocabulary.

    Returns the weights before they were quantized, by transformers' names.
    """
    # The merged token is a blank line.
    newline = bytes_to_unicode()[ord("\n")]
    tokens = [*SPECIAL_TOKENS, *bytes_to_unicode().values(), 2 * newline]
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.normal(scale=0.1, size=shape).astype(np.float32)

    kv_width = KV_HEADS * WIDTH // HEADS
    matrices = {
        "token_embd": draw(len(tokens), WIDTH),
        "blk.0.attn_q": draw(WIDTH, WIDTH),
        "blk.0.attn_k": draw(kv_width, WIDTH),
        "blk.0.attn_v": draw(kv_width, WIDTH),
        "blk.0.attn_output": draw(WIDTH, WIDTH),
        "blk.0.ffn_gate": draw(FFN, WIDTH),
        "blk.0.ffn_up": draw(FFN, WIDTH),
        "blk.0.ffn_down": draw(WIDTH, FFN),
    }
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([f"{newline} {newline}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weights in matrices.items():
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        stored = weights if heads is None else _interleave(weights, heads)
        stored = gguf.quants.quantize(stored, Q8_0)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=Q8_0)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "model.embed_tokens.weight": matrices["token_embd"],
        "model.layers.0.self_attn.q_proj.weight": matrices["blk.0.attn_q"],
        "model.layers.0.mlp.down_proj.weight": matrices["blk.0.ffn_down"],
    }


def _interleave(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Order the rows of each head as llama.cpp's RoPE wants them."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
