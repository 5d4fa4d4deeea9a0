"""Tiny random models for engine tests: real architectures, a few thousand weights."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 64

HIDDEN_SIZE = 64

ALPHABET = 'abcdefghijklmnopqrstuvwxyzABCDEFGHI0123456789 {}[]":,.-_\n!?/;'
"""One ordinary token each, from id 3 on: enough for words, numbers and JSON."""

FEW = "eagle3 of few tokens"
"""A head that drafts half of the target's."""

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def write_llama_pair(folder, *, noise, seed=0, **config):
    """Write a random target and a draft that is the target plus weight noise, float32.

    The noise's standard deviation is relative to each weight's own, and sets how often
    the target accepts. In the configuration is what is not as in `_TINY`.
    """
    torch.manual_seed(seed)
    sizes = {**_TINY, "num_hidden_layers": 2, "head_dim": 32, **config}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).float()
    target, draft = folder / "target", folder / "draft"
    model.save_pretrained(target)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * weight.std() * noise)
    model.save_pretrained(draft)
    return target, draft


def write_tokenizer(folder, special=SPECIAL, alphabet=ALPHABET):
    """Give a model folder a tokenizer whose tokens are single characters."""
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = [to_byte_level.pre_tokenize_str(char)[0][0] for char in alphabet]
    vocab = {name: i for i, name in enumerate([*special.values(), *names])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = to_byte_level
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)


def write_markov_llama(folder, *, seed=0):
    """Write a target whose next token hangs mostly on the last one.

    A head that sees one token can then be right more often than not, without having
    been trained.
    """
    model = _make_markov(LlamaForCausalLM, LlamaConfig(**_TINY, head_dim=32), seed)
    model.save_pretrained(folder)
    return folder


def write_eagle_head(folder, *, seed=1):
    """Write an EAGLE head for `write_markov_llama`; it predicts from the last token.

    The target lends it the embedding and the output layer.
    """
    weights = _make_head_layer(LlamaForCausalLM, LlamaConfig, seed)
    weights = {name.removeprefix("model."): w for name, w in weights.items()}
    # EAGLE's first layer has no norm of its own.
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.cat([_eye(), torch.zeros_like(_eye())], dim=1)
    return write_checkpoint(folder, _head_config("LlamaForCausalLM"), weights)


def write_eagle3_head(folder, target, *, seed=1, every=1):
    """Write an EAGLE-3 head for `write_markov_llama`; it predicts from the last token.

    Of the target's tokens it knows one in `every`.

    Its attention looks at the token itself: queries and keys are the embedding, which
    is most like its own, and what comes out outweighs the residual.
    """
    weights = _make_head_layer(LlamaForCausalLM, LlamaConfig, seed)
    weights = {
        name.replace("model.layers.0", "midlayer"): w for name, w in weights.items()
    }
    embedding = torch.cat([_eye(), torch.zeros_like(_eye())], dim=1)
    for name, scale in (("q_proj", 2.0), ("k_proj", 2.0), ("v_proj", 1.0)):
        weights[f"midlayer.self_attn.{name}.weight"] = scale * embedding
    weights["midlayer.self_attn.o_proj.weight"] = 4.0 * _eye()
    weights["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN_SIZE)
    weights["norm.weight"] = torch.ones(HIDDEN_SIZE)
    # Three layers of the target are handed over; they are hardly needed.
    weights["fc.weight"] = 0.02 * torch.randn(HIDDEN_SIZE, 3 * HIDDEN_SIZE)
    model = LlamaForCausalLM.from_pretrained(target)
    weights["lm_head.weight"] = model.lm_head.weight.detach()[::every].clone()
    known = torch.arange(0, VOCAB_SIZE, every)
    if every > 1:
        weights["d2t"] = known - torch.arange(len(known))
    config = _head_config("LlamaForCausalLMEagle3")
    config |= {"draft_vocab_size": len(known), "norm_before_residual": True}
    return write_checkpoint(folder, config, weights)


def write_mimo(folder, *, seed=0):
    """Write a Markov target with its own multi-token-prediction layer (MiMo)."""
    model = _make_markov(Qwen2ForCausalLM, Qwen2Config(**_TINY), seed)
    weights = {name: w.detach().clone() for name, w in model.named_parameters()}
    own = _make_head_layer(Qwen2ForCausalLM, Qwen2Config, seed + 1)
    weights |= {name.replace("layers.0", "mtp_layers.0"): w for name, w in own.items()}
    prefix = "model.mtp_layers.0."
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN_SIZE)
    # [hidden state, embedding] in this order; embeddings arrive normed.
    embedding = torch.cat([torch.zeros_like(_eye()), _eye()], dim=1)
    weights[f"{prefix}input_proj.weight"] = _INITIALIZER_RANGE * embedding
    config = model.config.to_dict()
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return write_checkpoint(folder, config, weights)


def write_heads(folder):
    """Write Markov targets and what drafts for them; return both by method."""
    llama = write_markov_llama(folder / "target")
    return {
        "eagle": (llama, write_eagle_head(folder / "eagle")),
        "eagle3": (llama, write_eagle3_head(folder / "eagle3", llama)),
        FEW: (llama, write_eagle3_head(folder / "few", llama, every=2)),
        "mtp": (write_mimo(folder / "mimo"), None),
    }


_INITIALIZER_RANGE = 0.15

_TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": _INITIALIZER_RANGE,
}


def _eye():
    return torch.eye(HIDDEN_SIZE)


def _make_markov(model_cls, config, seed):
    """Build a model whose layers add little to the embedding of the last token."""
    torch.manual_seed(seed)
    model = model_cls(config).float()
    with torch.no_grad():
        # Decided predictions: logits spread over tens, not tenths.
        model.lm_head.weight.mul_(7.0)
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.02)
    return model


def _make_head_layer(model_cls, config_cls, seed):
    """Build one decoder layer that adds little, named as in a whole model."""
    config = config_cls(**_TINY | {"num_hidden_layers": 1})
    model = _make_markov(model_cls, config, seed)
    return {
        name: weight.detach().clone()
        for name, weight in model.named_parameters()
        if ".layers.0." in name
    }


def _head_config(architecture):
    config = LlamaConfig(**{**_TINY, "num_hidden_layers": 1}, head_dim=32)
    return {**config.to_dict(), "architectures": [architecture]}


def write_checkpoint(folder, config, weights):
    """Write a model folder, float32."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors")
    return folder
