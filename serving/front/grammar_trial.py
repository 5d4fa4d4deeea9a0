"""A process in which grammars are compiled before any engine has to.

What compiles them is machine code that nobody can interrupt, so each request's are
tried in a child of this process, with limits of its own; should one crash it, that is
all that ends. `grammar_time` starts it, says on the first line what the tokenizer is,
and on each later one what to compile; the answers are `FINE` and `SLOW`. It ends with
its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, Final

import psutil
import xgrammar

FINE: Final = "fine"
SLOW: Final = "slow"

MAX_READ_S: Final = 1
"""Of a processor, to read them: a front does that too, and answers nobody meanwhile."""

MAX_COMPILE_S: Final = 5
"""For reading and compiling, which takes an engine's steps a core."""

_MAX_BYTES: Final = 2 << 30
"""Beyond what this process has."""


def main() -> None:
    """Answer until nobody asks."""
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    # One thread, so that its time is the time it takes.
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _try(compiler, json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{SLOW if status else FINE}\n")
        sys.stdout.flush()


def _try(compiler: Any, grammars: list[tuple[str, str]]) -> None:
    """Compile them, and end the process: with a signal if that takes too long."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_bytes = psutil.Process().memory_info().vms + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    for steps, seconds in ((_READERS, MAX_READ_S), (_COMPILERS, MAX_COMPILE_S)):
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        for kind, text in grammars:
            try:
                steps[kind](compiler, text)
            except MemoryError:
                os._exit(1)
            except Exception:
                # What is wrong with it is for vLLM to say.
                continue
    os._exit(0)


def _read_free(_: Any, text: str) -> None:
    try:
        xgrammar.Grammar.from_ebnf(text)
    except RuntimeError:
        xgrammar.Grammar.from_lark(text)


def _compile_free(compiler: Any, text: str) -> None:
    try:
        compiler.compile_grammar(text)
    except RuntimeError:
        compiler.compile_lark(text)


_READERS: Final[dict[str, Any]] = {
    "json": lambda _, text: xgrammar.Grammar.from_json_schema(text),
    "regex": lambda _, text: xgrammar.Grammar.from_regex(text),
    "grammar": _read_free,
    "structural_tag": lambda _, text: xgrammar.Grammar.from_structural_tag(text),
}
_COMPILERS: Final[dict[str, Any]] = {
    "json": lambda compiler, text: compiler.compile_json_schema(text),
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "grammar": _compile_free,
    "structural_tag": lambda compiler, text: compiler.compile_structural_tag(text),
}

if __name__ == "__main__":
    main()
