"""How large the parts of a request may be, looked at before anything reads them.

vLLM's own limits are those of its engine: they allow 16,384 choices, and schemas and
expressions of any size, whose compilation would keep an engine from everybody else.
These are the server's, the same for all; the body's size is a setting
(`http.max_body_bytes`), and the prompt's is the model's.
"""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from serving.engine.compat import GracefulHTTPError
from serving.front.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_DEPTH: Final = 64
"""Of lists and objects in each other; schemas are compiled recursively."""

MAX_ITEMS: Final = {
    "messages": 2048,
    "tools": 128,
    "stop": 16,
    "stop_token_ids": 128,
    "bad_words": 128,
    "allowed_token_ids": 1024,
    "logit_bias": 1024,
    "logprob_token_ids": 128,
    "documents": 256,
}
"""Of what is in the field; OpenAI allows 4 stop strings and 128 tools, and vLLM's
runner for GPUs holds 1,024 tokens that are allowed or have a bias."""

MAX_PROMPTS: Final = 256
"""Of one request; a list of numbers is one prompt."""

MAX_NUMBERS: Final = {
    "n": 128,
    "best_of": 128,
    "top_k": 2**31 - 1,
    "stream_interval": 2**31 - 1,
}
"""Of choices OpenAI allows as many; the others must fit on their way to an engine."""

MAX_CHOICES: Final = 256
"""Of a request, `n` for each prompt: all are made before the first is let in."""

MAX_BAD_TOKENS: Final = 1024
MAX_STOP_TOKENS: Final = 128
MAX_SEED: Final = 2**63 - 1
"""What vLLM's runner for GPUs holds of a request, the model's own stop tokens included.
Given more it raises within a step, of which the engine dies."""

MAX_GRAMMAR_CHARS: Final = 65_536
MAX_REGEX_CHARS: Final = 4096
MAX_SCHEMA_NODES: Final = 10_000

_INTERNAL: Final = ("kv_transfer_params", "ec_transfer_params", "request_id")
"""What routers of vLLM's say to engines, and what names a request there: both could
reach into other people's requests."""

_GRAMMARS: Final = ("response_format", "structured_outputs", "tools")
_SPECULATION: Final = "speculative_decoding"
_SPECULATION_WORDS: Final = frozenset(
    ("on", "true", "yes", "1", "off", "false", "no", "0")
)
"""The engine takes the last four for off, and anything else for on."""

_ROLES: Final = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function")
)


def check_limits(value: Mapping[str, Any]) -> None:
    """Refuse what is too large or not meant for clients.

    Args:
        value: A body's JSON.

    Raises:
        ApiError: 400, with the field's name.
    """
    _count_nodes(value, "body", MAX_DEPTH, None)
    for name, most in MAX_ITEMS.items():
        if isinstance(value.get(name), list | dict) and len(value[name]) > most:
            raise ApiError(400, f"{name}: must hold at most {most} items", name)
    check_numbers(value)
    prompts = value.get("prompt")
    if not isinstance(prompts, list):
        prompts = []
    if len(prompts) > MAX_PROMPTS and any(not isinstance(one, int) for one in prompts):
        raise ApiError(400, f"prompt: must hold at most {MAX_PROMPTS}", "prompt")
    for name in _GRAMMARS:
        _check_grammar(name, value.get(name))
    _check_messages(value.get("messages"))
    _check_xargs(value.get("vllm_xargs"))


def check_numbers(value: Mapping[str, Any]) -> None:
    """Refuse numbers that are too large, also those written as text.

    Args:
        value: A body's JSON, or the fields that its validation has made of it.

    Raises:
        ApiError: 400, with the field's name.
    """
    for name, most in MAX_NUMBERS.items():
        given = value.get(name)
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                given = float(given)
        if isinstance(given, int | float) and given > most:
            raise ApiError(400, f"{name}: must be at most {most}", name)


def check_choices(fields: Mapping[str, Any]) -> None:
    """Refuse too many answers at once.

    Args:
        fields: What the validation has made of a body.

    Raises:
        ApiError: 400, with the field's name.
    """
    prompts, num_prompts = fields.get("prompt"), 1
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        num_prompts = len(prompts)
    if num_prompts * (fields.get("n") or 1) > MAX_CHOICES:
        raise ApiError(400, f"n: prompts times n must be at most {MAX_CHOICES}", "n")


def check_sampling(params: Any) -> None:
    """Refuse what an engine cannot hold, as far as only its tokens tell.

    Args:
        params: vLLM's `SamplingParams` as an engine gets them.

    Raises:
        GracefulHTTPError: 400, with the field's name.
    """
    bad = sum(map(len, params.bad_words_token_ids or ()))
    stops = len(params.all_stop_token_ids) if params.min_tokens else 0
    for name, given, most in (
        ("bad_words: tokens", bad, MAX_BAD_TOKENS),
        ("stop_token_ids: with min_tokens they", stops, MAX_STOP_TOKENS),
        ("seed:", params.seed or 0, MAX_SEED),
    ):
        if given > most:
            raise GracefulHTTPError(
                f"{name} must be at most {most} (got {given})", HTTPStatus.BAD_REQUEST
            )


def strip_internal(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without what only servers say to each other."""
    return {name: part for name, part in value.items() if name not in _INTERNAL}


def _check_grammar(name: str, value: Any) -> None:
    _count_nodes(value, name, MAX_DEPTH, MAX_SCHEMA_NODES)
    for key, text in _texts(value):
        most = MAX_REGEX_CHARS if key in {"regex", "pattern"} else MAX_GRAMMAR_CHARS
        if len(text) > most:
            raise ApiError(
                400, f"{name}: a text in it is longer than {most} characters", name
            )


def _count_nodes(value: Any, name: str, depth: int, most: int | None) -> None:
    """Walk level by level: recursion would end in a RecursionError of its own."""
    level, num_nodes = [value], 0
    while level:
        if depth < 0:
            raise ApiError(400, f"{name}: is nested more than {MAX_DEPTH} deep", name)
        num_nodes += len(level)
        if most is not None and num_nodes > most:
            raise ApiError(400, f"{name}: has more than {most} parts", name)
        level = [part for one in level for part in _parts(one)]
        depth -= 1


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    # Its depth has been checked.
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, key)


def _check_messages(messages: Any) -> None:
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        role, field = message.get("role"), f"messages.{number}"
        if isinstance(role, str) and role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise ApiError(
                400, f"{field}.role: must be one of {known}", f"{field}.role"
            )
        for key, text in _texts(message.get("content")):
            is_address = key == "url" or key.endswith("_url")
            if is_address and not text.startswith("data:"):
                raise ApiError(
                    400,
                    f"{field}.content: this server fetches nothing; send the content "
                    "itself as a data: URL",
                    f"{field}.content",
                )


def _check_xargs(xargs: Any) -> None:
    given = xargs.get(_SPECULATION) if isinstance(xargs, dict) else None
    if given is not None and str(given).lower() not in _SPECULATION_WORDS:
        raise ApiError(
            400, f"vllm_xargs.{_SPECULATION}: must be true or false", "vllm_xargs"
        )
