"""Lets the target invent user messages and answer them, on vLLM."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# An engine in this process leaves nothing behind when it is killed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from .chats import CHATS_PER_SHARD, Chat, Say, WorkDir, read_shard, write_shard

TEMPERATURES = (0.0, 0.7, 1.0)
_USER_TEMPERATURE = 0.8
_TWO_TURNS_EVERY = 8
_USER_TOKENS = (4, 200)
# Left alone, a small model asks for business plans, over and over.
_OPENED = 0.75
_OPENINGS = Path(__file__).with_name("openings.txt").read_text().splitlines()
_ANSWER_TOKENS = 512


def generate(
    target: Path,
    work_dir: WorkDir,
    num_shards: int,
    say: Say,
    *,
    chats_per_shard: int = CHATS_PER_SHARD,
    answer_tokens: int = _ANSWER_TOKENS,
    **engine: Any,
) -> None:
    """Write the shards that are missing among the first ``num_shards``.

    Chat ``n`` has seeds of its own and a fixed temperature, so a shard that was lost
    comes again, but for messages that others have used meanwhile. Messages that do not
    end or repeat another are left out with their chats; answers may be cut at their
    limit. `engine` stands over what vLLM is started with.
    """
    missing = [n for n in range(num_shards) if not work_dir.chats_of(n).exists()]
    if not missing:
        say(f"all {num_shards} shards are there")
        return
    writer = _Writer(target, work_dir, answer_tokens, engine)
    try:
        for done, shard in enumerate(missing, start=1):
            first = shard * chats_per_shard
            chats = writer.write(range(first, first + chats_per_shard))
            write_shard(work_dir.chats_of(shard), chats)
            left = len(missing) - done
            say(f"shard {shard}: {len(chats)} chats kept; {left} shards left")
    finally:
        writer.llm.llm_engine.engine_core.shutdown()


class _Writer:
    """Knows the chat template, and which message is worth an answer."""

    def __init__(
        self, target: Path, work_dir: WorkDir, answer_tokens: int, engine: Any
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target)
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._special = frozenset(tokenizer.all_special_ids)
        self._end: int = tokenizer.eos_token_id
        self._answer_tokens = answer_tokens
        self._before_user, self._before_answer, self._between = _turns(tokenizer)
        if self._before_answer[0] != self._end or self._between[0] != self._end:
            raise ValueError("the chat template does not end turns by the end token")
        self._asked = {
            self._message(chat)
            for shard in work_dir.shards()
            for chat in read_shard(work_dir.chats_of(shard))
        }
        defaults = {
            "max_num_seqs": 96,
            "kv_cache_memory_bytes": 3 << 30,
            # No prompt may be cut in two: vLLM rewinds the generator of a seeded
            # request after such a step, which torch's generators on CPUs cannot.
            "max_num_batched_tokens": 8192,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
        }
        self.llm = LLM(str(target), **defaults | engine)

    def write(self, numbers: Sequence[int]) -> list[Chat]:
        """Write chats, of two turns every eighth; those that succeed are returned."""
        chats = {
            n: Chat(
                self._before_user + self._encode(opening_of(n)),
                [],
                TEMPERATURES[n % len(TEMPERATURES)],
            )
            for n in numbers
        }
        going_on = chats
        for turn in range(2):
            asked, going_on = going_on, {}
            for n, reply in self._continue(asked, 3 - 2 * turn, is_user=True):
                asked[n].token_ids.extend(reply)
                message = self._message(asked[n])
                is_new = turn > 0 or message not in self._asked
                is_short = len(reply if turn else message) < _USER_TOKENS[0]
                if reply[-1] == self._end and is_new and not is_short:
                    self._asked.add(message)
                    asked[n].token_ids.extend(self._before_answer[1:])
                    going_on[n] = asked[n]
            asked, going_on = going_on, {}
            for n, reply in self._continue(asked, 2 - 2 * turn, is_user=False):
                chat, begin = asked[n], len(asked[n].token_ids)
                chat.token_ids.extend(reply)
                chat.answers.append((begin, begin + len(reply)))
                if reply[-1] == self._end and n % _TWO_TURNS_EVERY == 0:
                    chat.token_ids.extend(self._between[1:])
                    going_on[n] = chat
        answered = (chat for chat in chats.values() if chat.answers)
        return [
            chat._replace(token_ids=chat.token_ids[: chat.answers[-1][1]])
            for chat in answered
        ]

    def _continue(
        self, chats: dict[int, Chat], seed: int, *, is_user: bool
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield what comes next in each chat, where no special token stands within."""
        if not chats:
            return
        params = [
            SamplingParams(
                temperature=_USER_TEMPERATURE if is_user else chat.temperature,
                max_tokens=_USER_TOKENS[1] if is_user else self._answer_tokens,
                stop_token_ids=[self._end],
                seed=4 * number + seed,
                detokenize=False,
            )
            for number, chat in chats.items()
        ]
        prompts = [{"prompt_token_ids": list(one.token_ids)} for one in chats.values()]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for number, output in zip(chats, outputs, strict=True):
            reply = list(output.outputs[0].token_ids)
            if not self._special.intersection(reply[:-1]):
                yield number, reply

    def _message(self, chat: Chat) -> tuple[int, ...]:
        """Return a chat's first message."""
        told = chat.token_ids[len(self._before_user) :]
        return tuple(told[: told.index(self._end)] if self._end in told else told)


def opening_of(number: int) -> str:
    """Return the words with which a chat's user begins; they may be none."""
    rng = random.Random(number)
    return rng.choice(_OPENINGS) if rng.random() < _OPENED else ""


def _turns(tokenizer: Any) -> Iterator[list[int]]:
    """Yield what stands before a message, an answer and a second message."""
    roles = ("user", "assistant", "user")
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": f"@@{n}@@"} for n, role in enumerate(roles)],
        tokenize=False,
    )
    for part in re.split(r"@@\d@@", text)[:-1]:
        yield tokenizer.encode(part, add_special_tokens=False)
