"""The pair's shared tokenizer: byte-level BPE, ChatML turns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .tasks import TOOLS, TRAINING_TASKS, Message, generate_chat

TURN_START, TURN_END, _PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
_MAX_LENGTH = 2048

# Numbers below a hundred are single tokens, so that to count is to know what follows.
# Signs take the space before a number ("3, 4" is three tokens), words the one before
# themselves.
_PIECES = (
    r" ?[^\s\p{L}\p{N}]+ ?(?=\p{N})| ?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_TAGS = ["<tool_call>", "</tool_call>", "<tools>", "</tools>"]
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(
    *, vocab_size: int, num_chats: int, seed: int
) -> PreTrainedTokenizerFast:
    """Train one, with chat template, end-of-turn and padding token, on seeded chats."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_TAGS),
        special_tokens=[_PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_chats, seed), trainer)
    tokenizer.add_tokens(_TAGS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=_PAD,
        additional_special_tokens=[TURN_START],
        model_max_length=_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE.read_text(),
    )


def _texts(num_chats: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(num_chats):
        chat = generate_chat(TRAINING_TASKS, rng)
        yield from (message["content"] for message in chat.messages)
    yield from (str(tool) for tool in TOOLS)
    yield _TEMPLATE.read_text()


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
