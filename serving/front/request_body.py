"""What is checked of a request's body around vLLM's own validation of it."""

import logging
from collections.abc import Callable
from typing import Annotated, Any

import pydantic_core
from pydantic import ValidationError, WrapValidator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.exceptions import VLLMClientError

from serving.front.errors import ApiError
from serving.front.request_limits import (
    check_choices,
    check_limits,
    check_numbers,
    strip_internal,
)

logger = logging.getLogger("ray.serve")

_LAZY_FIELDS = ("content", "tool_calls")
"""Of messages: pydantic checks lists there only when they are read."""


def check_body(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate a body, as a pydantic wrap validator, so that it fails here or never.

    Args:
        value: The parsed JSON.
        validate: Makes a request of it.

    Returns:
        The request.

    Raises:
        ApiError: The body is malformed in a way that pydantic or vLLM trips over.
    """
    if isinstance(value, dict):
        check_limits(value)
        _check_text(value)
        value = strip_internal(value)
    try:
        body = validate(value)
    except (ValidationError, VLLMClientError):
        raise
    except Exception as error:
        # vLLM's validators look into the JSON before pydantic has checked its types.
        logger.warning("A body was refused because its validation failed: %r", error)
        raise ApiError(
            400, "The request is not valid: a field has a value of the wrong type."
        ) from None
    # Validation makes numbers of texts, by rules of its own.
    check_numbers(vars(body))
    check_choices(vars(body))
    _read_lists(body)
    if isinstance(body, DetokenizeRequest) and max(body.tokens, default=0) >= 2**32:
        # No tokenizer holds such an id; vLLM lets 63 bits pass.
        raise ApiError(400, "tokens: ids must be below 2**32", "tokens")
    return body


def _check_text(value: dict[str, Any]) -> None:
    try:
        pydantic_core.to_json(value)
    except (UnicodeEncodeError, pydantic_core.PydanticSerializationError):
        raise ApiError(
            400,
            "The request holds text that is not valid Unicode (half a surrogate pair).",
        ) from None


def _read_lists(body: Any) -> None:
    # Beside a prompt, `messages` is an unknown field, which vLLM lets through unread.
    if "messages" not in type(body).model_fields:
        return
    for number, message in enumerate(body.messages):
        if not isinstance(message, dict):
            # vLLM takes OpenAI's Harmony form too, and then trips over it.
            raise ApiError(
                400, f"messages.{number}: must have a role", f"messages.{number}"
            )
        for name in _LAZY_FIELDS:
            part = message.get(name)
            if part is None or isinstance(part, str | list):
                continue
            field = f"messages.{number}.{name}"
            try:
                message[name] = list(part)
            except Exception:
                raise ApiError(
                    400, f"{field}: one of its parts is malformed", field
                ) from None


_CHECKED = WrapValidator(check_body)

CompletionBody = Annotated[CompletionRequest, _CHECKED]
ChatBody = Annotated[ChatCompletionRequest, _CHECKED]
TokenizeBody = Annotated[TokenizeCompletionRequest | TokenizeChatRequest, _CHECKED]
DetokenizeBody = Annotated[DetokenizeRequest, _CHECKED]
