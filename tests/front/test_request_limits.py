"""What clients may not send: too much, too deep, or what only servers say."""

import asyncio
from typing import Any

import pytest
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from serving.engine.shared.replay import EMITTED_TOKEN_IDS
from serving.front import errors
from serving.front.app import Front
from serving.front.errors import ApiError, BodyLimitMiddleware
from serving.front.live_limits import LiveLimits
from serving.front.request_body import ChatBody, CompletionBody, DetokenizeBody
from serving.front.request_limits import MAX_DEPTH, check_limits

USER = {"role": "user", "content": "Hi"}
IMAGE_ELSEWHERE = {
    "type": "image_url",
    "image_url": {"url": "http://169.254.169.254/latest/meta-data"},
}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


TOO_MUCH: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER] * 2049},
    "tools": {"tools": [{}] * 129},
    "stop": {"stop": ["a"] * 17},
    "n": {"n": 1000},
    "best_of": {"best_of": 129},
    "top_k": {"top_k": 10**20},
    "allowed_token_ids": {"allowed_token_ids": [1] * 1025},
    "logit_bias": {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
    "stream_interval": {"stream_interval": 2**63},
    "prompt": {"prompt": ["a"] * 257},
    "body": {"chat_template_kwargs": nested(100_000)},
    "response_format": {
        "response_format": {"properties": {str(i): {} for i in range(10_001)}}
    },
    "structured_outputs": {"structured_outputs": {"regex": "a" * 4097}},
    "messages.0.role": {"messages": [USER | {"role": "robot"}]},
    "messages.0.content": {"messages": [USER | {"content": [IMAGE_ELSEWHERE]}]},
    "vllm_xargs": {"vllm_xargs": {"speculative_decoding": "maybe"}},
}


@pytest.mark.parametrize(("field", "body"), TOO_MUCH.items(), ids=TOO_MUCH)
def test_what_is_too_much_is_refused_by_its_name(field, body):
    with pytest.raises(ApiError) as refused:
        check_limits(body)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_what_is_usual_passes():
    image = {"url": "data:image/png;base64,AAAA"}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "?"}]
    for switch in (True, False, 0, 1, "off", "On", None):
        check_limits({"vllm_xargs": {"speculative_decoding": switch}})
    check_limits({"messages": [{"role": "user", "content": content}], "n": 128})
    check_limits({"prompt": list(range(10_000)), "stop": "x"})
    check_limits({"response_format": nested(MAX_DEPTH - 3), "tools": None})
    # Whatever has the wrong type is left to the validation behind.
    check_limits({"messages": 5, "n": "x", "tools": {}, "vllm_xargs": []})


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[1], [2], [3]]])
def test_prompts_have_no_more_answers_together_than_one_server_can_begin(prompt):
    validate = TypeAdapter(CompletionBody).validate_python
    assert validate({"model": "m", "prompt": prompt, "n": 85}).n == 85
    assert validate({"model": "m", "prompt": [1, 2, 3], "n": 86}).n == 86
    with pytest.raises(ApiError, match="at most 256") as refused:
        validate({"model": "m", "prompt": prompt, "n": "86"})
    assert (refused.value.status, refused.value.param) == (400, "n")


each_kind = pytest.mark.parametrize(
    ("kind", "rest"),
    [(ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "a"})],
)


@each_kind
@pytest.mark.parametrize("field", ["n", "best_of"])
def test_a_number_is_no_smaller_as_text(field, kind, rest):
    """Validation makes numbers of it, and vLLM makes that many choices at once."""
    rest = {**rest, "model": "m"}
    for given in ("1000", " +16_384 ", "1000.0", 1000.0, 10**400, "9" * 400):
        with pytest.raises(ApiError) as refused:
            TypeAdapter(kind).validate_python({**rest, field: given})
        assert (refused.value.status, refused.value.param) == (400, field)
    body = TypeAdapter(kind).validate_python({**rest, "n": "128", "best_of": None})
    assert body.n == 128


def test_what_no_tokenizer_holds_is_refused_by_its_name():
    """Other bodies that vLLM would choke on are in `bodies`, for test_any_bytes."""
    for token in (2**32, 2.0**40, str(2**62)):
        with pytest.raises(ApiError, match="tokens") as refused:
            TypeAdapter(DetokenizeBody).validate_python({"tokens": [1, token]})
        assert (refused.value.status, refused.value.param) == (400, "tokens")
    body = TypeAdapter(DetokenizeBody).validate_python({"tokens": [2**32 - 1]})
    assert body.tokens == [2**32 - 1]


@each_kind
def test_what_servers_say_to_each_other_is_stripped(kind, rest):
    body = TypeAdapter(kind).validate_python(
        {
            **rest,
            "model": "demo",
            "request_id": "mine",
            "kv_transfer_params": {"remote_host": "x"},
            "vllm_xargs": {
                EMITTED_TOKEN_IDS: [1],
                "tetris_else": 1,
                "kv_transfer_params": "x",
                "own": 1,
            },
        }
    )
    assert body.kv_transfer_params is None
    assert body.request_id != "mine"
    front = object.__new__(Front)
    front._limits, front._policy_name = LiveLimits({}, 1, 1, 0), "none"
    front._prepare(body)
    assert body.vllm_xargs == {"own": 1}


@pytest.mark.anyio
async def test_a_body_that_lingers_is_given_up(monkeypatch):
    monkeypatch.setattr(errors, "MAX_BODY_S", 0.05)
    parts = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Event().wait()

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    limited = BodyLimitMiddleware(read, max_body_bytes=10)
    with pytest.raises(HTTPException, match="408"):
        await limited({"type": "http", "headers": []}, receive, receive)
