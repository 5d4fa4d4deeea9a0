"""How long a request's grammars take to compile, found out before an engine does it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from serving.front.errors import ApiError
from serving.front.grammar_trial import FINE, MAX_COMPILE_S, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("ray.serve")

Grammar = tuple[str, str]
"""Its kind, one of those that `grammar_trial` knows, and its text."""

_FIELDS: Final = ("structured_outputs", "response_format", "tools")
_MAX_KNOWN: Final = 4096
_TIMEOUT_S: Final = 60.0
"""For an answer, on a machine that has little time for the trial."""


class GrammarTime:
    """Refuses requests whose grammars take too long, and remembers which do.

    A schema of 60 KB, or an expression of 4, may keep a core busy for minutes. The
    process that tries them starts with the first grammar; where it cannot be had,
    which is logged, requests pass.
    """

    def __init__(self, describe_tokenizer: Callable[[], str]) -> None:
        """Start nothing yet; `describe_tokenizer` returns what xgrammar serialises."""
        self._describe_tokenizer = describe_tokenizer
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._turn = asyncio.Lock()
        self._trial: asyncio.subprocess.Process | None = None

    async def check(self, body: Any) -> None:
        """Refuse a request that would keep an engine.

        Args:
            body: vLLM's chat or completion request.

        Raises:
            ApiError: 400.
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
        """Tell whether they compile in time, all together."""
        line = json.dumps(grammars)
        digest = hashlib.sha256(line.encode()).digest()
        if digest not in self._known:
            # A client that leaves must not leave its answer to the next one.
            trial = asyncio.ensure_future(self._try(line, digest))
            return await asyncio.shield(trial)
        self._known.move_to_end(digest)
        return self._known[digest]

    async def _try(self, line: str, digest: bytes) -> bool:
        async with self._turn:
            if digest not in self._known:
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
