"""How long a request's grammars take to compile, found out before an engine does it."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from serving.front.caller import caller
from serving.front.errors import ApiError
from serving.front.grammar_trial import FINE, MAX_COMPILE_S, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("ray.serve")

Grammar = tuple[str, str]
"""Its kind, one of those that `grammar_trial` knows, and its text."""

MAX_WAITING: Final = 128
"""Grammars of one caller that may wait for a trial; without keys all are one."""

MAX_WAIT_S: Final = 90.0
"""For one's turn and the answer; a trial alone has less."""

_FIELDS: Final = ("structured_outputs", "response_format", "tools")
_MAX_KNOWN: Final = 4096
_TIMEOUT_S: Final = 60.0
"""For an answer, on a machine that has little time for the trial."""


@dataclass(eq=False, slots=True)
class _Trial:
    """A request's grammars that are to be tried, or are being tried.

    Attributes:
        line: What the process is asked.
        caller: Whose turn it has; requests of others may have joined since.
        answer: Whether they compile in time.
        num_clients: Requests that wait for the answer.
    """

    line: str
    caller: str
    answer: asyncio.Future[bool]
    num_clients: int = 0


class GrammarTime:
    """Refuses requests whose grammars take too long, and remembers which do.

    A schema of 60 KB, or an expression of 4, may keep a core busy for minutes. The
    process that tries them starts with the first grammar; where it cannot be had,
    which is logged, requests pass. It tries one at a time; callers have turns.
    """

    def __init__(self, describe_tokenizer: Callable[[], str]) -> None:
        """Start nothing yet; `describe_tokenizer` returns what xgrammar serialises."""
        self._describe_tokenizer = describe_tokenizer
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._trials: dict[bytes, _Trial] = {}
        # Of those, what has not begun, by caller; the first one's turn is next.
        self._waiting: dict[str, dict[bytes, _Trial]] = {}
        self._trying: asyncio.Task[None] | None = None
        self._trial: asyncio.subprocess.Process | None = None

    async def check(self, body: Any) -> None:
        """Refuse a request that would keep an engine.

        Args:
            body: vLLM's chat or completion request.

        Raises:
            ApiError: 400; 503 if too much is to be tried before.
        """
        try:
            grammars = find_grammars(body)
        except (ValueError, TypeError):
            return  # What is wrong with them is for vLLM to say.
        if grammars and not await self.is_short(grammars):
            raise ApiError(
                400,
                f"The grammar takes longer than {MAX_COMPILE_S} s to compile: ask for "
                "fewer optional properties, alternatives or repetitions.",
                next(name for name in _FIELDS if getattr(body, name, None)),
            )

    async def is_short(self, grammars: list[Grammar]) -> bool:
        """Tell whether they compile in time, all together.

        Raises:
            ApiError: 503, if too much is to be tried before.
        """
        line = json.dumps(grammars)
        digest = hashlib.sha256(line.encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        trial = self._trials.get(digest) or self._enqueue(line, digest)
        trial.num_clients += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                # A client that leaves must not leave its answer to the next one.
                return await asyncio.shield(trial.answer)
        except TimeoutError:
            raise _busy() from None
        finally:
            trial.num_clients -= 1
            if not trial.num_clients:
                self._drop(trial, digest)

    def _enqueue(self, line: str, digest: bytes) -> _Trial:
        whose = caller.get()
        name = whose.name if whose is not None else ""
        waiting = self._waiting.get(name, {})
        if len(waiting) >= MAX_WAITING:
            raise _busy()
        loop = asyncio.get_running_loop()
        trial = _Trial(line, name, loop.create_future())
        self._trials[digest] = waiting[digest] = trial
        self._waiting[name] = waiting
        if self._trying is None or self._trying.done():
            # In a context of its own, for it outlives the request that begins it.
            self._trying = loop.create_task(
                self._try_all(), context=contextvars.Context()
            )
        return trial

    def _drop(self, trial: _Trial, digest: bytes) -> None:
        """Forget what nobody waits for, unless it has begun: that one is finished."""
        waiting = self._waiting.get(trial.caller, {})
        if waiting.get(digest) is trial:
            del waiting[digest], self._trials[digest]
            if not waiting:
                del self._waiting[trial.caller]

    async def _try_all(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            waiting = self._waiting.pop(name)
            digest = next(iter(waiting))
            trial = waiting.pop(digest)
            if waiting:
                # Behind all other callers.
                self._waiting[name] = waiting
            is_short = True
            try:
                is_short = await self._try(trial.line, digest)
            finally:
                del self._trials[digest]
                trial.answer.set_result(is_short)

    async def _try(self, line: str, digest: bytes) -> bool:
        answer = await self._ask(line)
        if answer not in (FINE, SLOW):
            return True
        self._known[digest] = answer == FINE
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return self._known[digest]

    async def close(self) -> None:
        """End the process; the next grammar starts another."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        assert trial.stdin is not None
        trial.stdin.close()
        if trial.returncode is None:
            trial.kill()
        await trial.wait()

    async def _ask(self, line: str) -> str:
        try:
            return await asyncio.wait_for(self._exchange(line), _TIMEOUT_S)
        except Exception as error:
            # Not every tokenizer is one that xgrammar knows.
            logger.warning("No grammar can be tried beforehand: %r", error)
            await self.close()
            return ""

    async def _exchange(self, line: str) -> str:
        if self._trial is None:
            pipe = asyncio.subprocess.PIPE
            told = await asyncio.to_thread(self._describe_tokenizer)
            self._trial = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serving.front.grammar_trial"),
                stdin=pipe,
                stdout=pipe,
            )
            line = f"{told}\n{line}"
        assert self._trial.stdin is not None
        assert self._trial.stdout is not None
        self._trial.stdin.write(f"{line}\n".encode())
        await self._trial.stdin.drain()
        answer = (await self._trial.stdout.readline()).decode().strip()
        if not answer:
            raise OSError("the process that tries them has ended")
        return answer


def _busy() -> ApiError:
    error = ApiError(503, "Too many new grammars are to be tried before; retry.")
    error.retry_after_s = MAX_COMPILE_S
    return error


def find_grammars(body: Any) -> list[Grammar]:
    """Return what vLLM would compile for a request; JSON as such needs no look.

    Args:
        body: vLLM's chat or completion request.
    """
    found: list[Grammar] = []
    params = body.extract_structured_outputs()
    if params is not None:
        for kind in ("json", "regex", "grammar", "structural_tag"):
            text = getattr(params, kind)
            if text is not None:
                found.append(
                    (kind, text if isinstance(text, str) else json.dumps(text))
                )
        if params.choice:
            choices = " | ".join(json.dumps(text) for text in params.choice)
            found.append(("grammar", f"root ::= {choices}"))
    choice = getattr(body, "tool_choice", None)
    for tool in getattr(body, "tools", None) or ():
        function = tool.function
        is_forced = choice not in (None, "none", "auto")
        if is_forced or getattr(function, "strict", None):
            found.append(("json", json.dumps(function.parameters)))
    return found
