"""Pairs of models whose draft is mostly right, and now and then far off."""

import torch
from transformers import AutoConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.engine.tiny_models import write_llama_pair, write_tokenizer

NOISE = 0.006

SHARPNESS = 3.5
"""Factor of the logits, which makes most next tokens a choice between few."""

CONFUSED_EVERY = 12
"""Of the tokens, the draft takes one in this many for another. What it proposes then is
nearly impossible under the target: a draft token that is kept against the rule
stands out there, as it does where a real draft model is out of its depth."""


def write_law_pair(folder, *, noise=NOISE, confused_every=CONFUSED_EVERY):
    """Write a target and a draft, `target/` and `draft/`, float32, with tokenizers.

    Args:
        folder: Where they go.
        noise: Of the draft's weights, relative to each one's own. At 0 the draft is the
            target itself: it is never rejected, so that whatever goes wrong comes from
            the selection of drafts.
        confused_every: See `CONFUSED_EVERY`.
    """
    paths = write_llama_pair(folder, noise=noise)
    for path in paths:
        model = LlamaForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.lm_head.weight.mul_(SHARPNESS)
            if path == paths[1] and noise != 0.0:
                rows = model.lm_head.weight
                rows[::confused_every] = rows[::confused_every].roll(1, dims=0)
        model.save_pretrained(path)
        write_tokenizer(path)
    return paths


def load_reference(folder):
    """Load a target in float64, without what only drafts."""
    if AutoConfig.from_pretrained(folder).model_type == Qwen2Config.model_type:
        return Qwen2ForCausalLM.from_pretrained(folder).double()
    return LlamaForCausalLM.from_pretrained(folder).double()
