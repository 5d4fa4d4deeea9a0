"""Greedy replies of a model to many prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM


@torch.inference_mode()
def greedy_replies(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[list[int]]:
    """Decode greedily until the end-of-turn token.

    Args:
        model: The model; its generation config names end and padding token.
        prompts: Token ids of each prompt, of any lengths.
        max_new_tokens: Where a reply is cut that does not end by itself.

    Returns:
        Token ids of each reply, with the end-of-turn token if it was reached.
    """
    config = model.generation_config
    pad, end = config.pad_token_id, config.eos_token_id
    width = max(map(len, prompts))
    token_ids = torch.full((len(prompts), width), pad)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[width - len(prompt) :] = torch.tensor(prompt)
    padding = width - torch.tensor([len(prompt) for prompt in prompts])
    generated = cast(Any, model).generate(
        input_ids=token_ids,
        attention_mask=(torch.arange(width) >= padding[:, None]).long(),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    return [_until_end(row, end) for row in generated[:, width:].tolist()]


def _until_end(reply: list[int], end: int) -> list[int]:
    return reply[: reply.index(end) + 1] if end in reply else reply
