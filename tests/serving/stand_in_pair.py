"""A random pair in place of the demo weights, for clones that have not trained them.

Everything around the weights is real; what the models say is noise.
"""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "demo.yaml"
FOLDER = ROOT / ".cache" / "stand_in_pair"

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]


def find_demo_config() -> Path:
    """Return the demo's deployment file, or one like it that names a random pair."""
    content = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    if (CONFIG.parent / content["model"]["target"] / "model.safetensors").is_file():
        return CONFIG
    file = FOLDER / "demo.yaml"
    content["model"] |= {"target": "./target", "draft": "./draft"}
    if not (FOLDER / "draft" / "model.safetensors").is_file():
        _write_pair(content["engine"]["max_model_len"])
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def _write_pair(max_model_len: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=max_model_len,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    for name, num_layers, width in (("target", 3, 128), ("draft", 1, 64)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            max_position_embeddings=max_model_len,
            bos_token_id=1,
            eos_token_id=4,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(FOLDER / name)
        tokenizer.save_pretrained(FOLDER / name)
