"""Which requests an engine may take: of its own fronts, and others that fit.

An update has engines and fronts of two builds of the application at work. A front
speaks for the engines of its own build; what waits in it when the last of those goes
needs one of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serving.engine.shared.replay import emitted_token_ids_of


@dataclass(frozen=True, slots=True)
class Kin:
    """What a front and the engines it speaks for have in common.

    Attributes:
        fingerprint: Equal for engines that give a request the same law.
        build: When the application was built, ns; later for the later one.
    """

    fingerprint: str
    build: int


def may_take(own: Kin, max_model_len: int, other: Kin, request: Any) -> bool:
    """Return whether an engine may have a front's request.

    Args:
        own: The engine's.
        max_model_len: The engine's, tokens.
        other: The front's.
        request: An `EngineCoreRequest`, with what has come out of it so far.
    """
    if own == other:
        return True
    if own.fingerprint != other.fingerprint:
        return False
    num_prompt = len(request.prompt_token_ids or ())
    params = request.sampling_params
    if num_prompt + len(emitted_token_ids_of(params)) >= max_model_len:
        return False
    # A limit that was lowered holds for what was taken before, too: there is no other
    # engine to come. One that was raised must not be cut short by the engines before.
    return other.build < own.build or num_prompt + params.max_tokens <= max_model_len
