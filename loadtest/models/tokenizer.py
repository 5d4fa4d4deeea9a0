"""A model's tokenizer, and chats by its template; the pair's is byte-level BPE, ChatML.

The pair's lies with its target: numbers below a hundred are single tokens, so that to
count is to know what follows.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from .tasks import TOOLS, Message


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model directory."""
    return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(path))


def copy_tokenizer(source: Path, output: Path) -> None:
    """Give a model directory another one's tokenizer and chat template."""
    for file in (*source.glob("token*"), *source.glob("*.jinja")):
        shutil.copy(file, output)


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    with_tools: bool = False,
    reply_follows: bool = False,
) -> list[int]:
    """Turn a conversation into token ids through the chat template.

    It can list the demo tools, and end with the opening of an assistant turn.
    """
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=cast(Any, list(TOOLS)) if with_tools else None,
        add_generation_prompt=reply_follows,
        tokenize=False,
    )
    return cast(list[int], tokenizer.encode(str(text), add_special_tokens=False))
