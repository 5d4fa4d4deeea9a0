"""Bad input: an OpenAI error object that names the field, and nobody else disturbed."""

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import MODEL, Server

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 4} | fields


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "one two", "max_tokens": 4} | fields


BAD_REQUESTS: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("an unknown model", CHAT, chat(model="gpt-9"), 404, "model"),
    ("a model of the wrong type", CHAT, chat(model=7), 400, "model"),
    ("no messages", CHAT, {"model": MODEL}, 400, "messages"),
    ("empty messages", CHAT, chat(messages=[]), 400, "messages"),
    ("messages that are text", CHAT, chat(messages="Hi"), 400, "messages"),
    (
        "content of the wrong type",
        CHAT,
        chat(messages=[{"role": "user", "content": 5}]),
        400,
        "messages.0.content",
    ),
    ("max_tokens that are text", CHAT, chat(max_tokens="few"), 400, "max_tokens"),
    ("negative max_tokens", CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    ("huge max_tokens", CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    ("a negative temperature", CHAT, chat(temperature=-1), 400, "temperature"),
    ("a huge temperature", CHAT, chat(temperature=99), 400, "temperature"),
    ("top_p beyond one", CHAT, chat(top_p=1.5), 400, "top_p"),
    ("no choices", COMPLETIONS, prompt(n=0), 400, "n"),
    (
        "too many logprobs",
        CHAT,
        chat(logprobs=True, top_logprobs=99),
        400,
        "top_logprobs",
    ),
    ("an empty prompt", COMPLETIONS, prompt(prompt=""), 400, "prompt"),
    (
        "a prompt beyond the context",
        COMPLETIONS,
        prompt(prompt="a b " * 4000),
        400,
        "prompt",
    ),
    (
        "a long conversation",
        CHAT,
        chat(messages=[{"role": "user", "content": "a b " * 4000}]),
        400,
        "messages",
    ),
    (
        "a long prompt that asks for a stream",
        COMPLETIONS,
        prompt(prompt="a b " * 4000, stream=True),
        400,
        "prompt",
    ),
    (
        "a schema that is none",
        CHAT,
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wibble"}},
            }
        ),
        400,
        "response_format",
    ),
    ("min_p, which speculation rules out", CHAT, chat(min_p=0.2), 400, "min_p"),
    (
        "logit_bias, which speculation rules out",
        CHAT,
        chat(logit_bias={"5": 3}),
        400,
        "logit_bias",
    ),
    ("messages that are null", CHAT, chat(messages=None), 400, None),
    (
        "messages that are null and a prompt",
        CHAT,
        chat(messages=None, prompt=""),
        400,
        None,
    ),
    ("messages that hold null", CHAT, chat(messages=[None]), 400, "messages.0"),
    (
        "content parts that are none",
        CHAT,
        chat(messages=[{"role": "user", "content": [[None, None]]}]),
        400,
        "messages.0.content",
    ),
    (
        "content parts that are none, to tokenize",
        "/tokenize",
        {"messages": [{"role": "user", "content": [[None, None]]}]},
        400,
        "messages.0.content",
    ),
    ("half a surrogate pair", COMPLETIONS, prompt(prompt="a\ud800"), 400, None),
    ("half a pair, to tokenize", "/tokenize", {"prompt": "\ud800"}, 400, None),
    ("half a pair as a name", "/detokenize", {"tokens": [1], "\ud800": 1}, 400, None),
    ("too many choices", CHAT, chat(n=1000), 400, "n"),
    (
        "a role that is none",
        CHAT,
        chat(messages=[{"role": "robot", "content": "Hi"}]),
        400,
        "messages.0.role",
    ),
    (
        "a word that is no switch",
        CHAT,
        chat(vllm_xargs={"speculative_decoding": "maybe"}),
        400,
        "vllm_xargs",
    ),
    ("tools that are a number", CHAT, chat(tools=5), 400, "tools"),
    ("tokens that are text", "/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
    ("an unknown route", "/v1/nothing", {}, 404, None),
]


def send(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    """Post a body; httpx itself could not write half a surrogate pair."""
    headers = {"content-type": "application/json"}
    return server.post(path, content=json.dumps(body).encode(), headers=headers)


def assert_is_openai_error(
    body: dict[str, Any], status: int, param: str | None
) -> None:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == status
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [case[1:] for case in BAD_REQUESTS],
    ids=[case[0] for case in BAD_REQUESTS],
)
def test_bad_input_is_refused_with_the_fields_name(
    server: Server, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = send(server, path, body)
    assert response.status_code == status
    assert_is_openai_error(response.json(), status, param)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": }', b"[]", b"\xff\xfe{"])
def test_a_body_that_is_no_json_object_is_refused(
    server: Server, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    response = server.post(CHAT, content=content, headers=headers)
    assert response.status_code == 400
    assert_is_openai_error(response.json(), 400, None)


def test_an_oversized_body_is_refused_with_or_without_its_length(
    server: Server,
) -> None:
    huge = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    declared = server.post(COMPLETIONS, content=huge)
    parts = (huge[i : i + 65536] for i in range(0, len(huge), 65536))
    undeclared = server.post(COMPLETIONS, content=parts)
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert_is_openai_error(response.json(), 413, None)


def test_a_wrong_method_is_refused_in_the_same_form(server: Server) -> None:
    response = server.post("/v1/models")
    assert response.status_code == 405
    assert_is_openai_error(response.json(), 405, None)


def test_unknown_fields_are_ignored_as_vllm_does(server: Server) -> None:
    assert server.post(CHAT, json=chat(wibble=1)).status_code == 200
    for messages in (None, 5):
        assert server.post(COMPLETIONS, json=prompt(messages=messages)).is_success
        body = {"prompt": "one", "messages": messages}
        assert server.post("/tokenize", json=body).is_success


def test_messages_do_not_repeat_the_clients_input(server: Server) -> None:
    secret = "hunter2"
    response = server.post(CHAT, json=chat(max_tokens=secret, temperature=secret))
    assert secret not in response.text


def test_the_stock_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=[USER])
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as negative:
        client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=-1)
    assert negative.value.param == "max_tokens"


def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever its type: libraries raise ValueError for their own faults too."""
    from serving.front.app import build_api

    api = build_api(max_body_bytes=1024)

    @api.get("/fails")
    def fail() -> None:
        raise ValueError("no key in /opt/secret.py")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://server/fails")

    # Ray's logger hands nothing on to the root's, where pytest listens.
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    try:
        response = asyncio.run(ask())
    finally:
        logger.removeHandler(caplog.handler)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal server error."
    assert_is_openai_error(response.json(), 500, None)
    assert "secret" in caplog.text


def test_bad_requests_disturb_no_good_one(server: Server) -> None:
    good = prompt(max_tokens=32, temperature=0)
    expected = server.post(COMPLETIONS, json=good).json()["choices"][0]["text"]

    def ask(case: int) -> tuple[int, str]:
        if case % 4 == 0:
            response = server.post(COMPLETIONS, json=good)
            return response.status_code, response.json()["choices"][0]["text"]
        _, path, body, *_ = BAD_REQUESTS[case % len(BAD_REQUESTS)]
        return send(server, path, body).status_code, ""

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(48)))
    good_results = results[::4]
    assert all(status == 200 for status, _ in good_results)
    # The same tokens up to bf16 near-ties, which other batch shapes settle otherwise.
    assert all(text[:8] == expected[:8] for _, text in good_results)
    assert all(400 <= s < 500 for i, (s, _) in enumerate(results) if i % 4)


def test_streams_keep_vllms_own_failures_to_the_log() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from serving.front.errors import reword_streamed_errors

    def event(code: int, message: str) -> str:
        kind = {"message": message, "type": "Any", "param": None, "code": code}
        return f"data: {json.dumps({'error': kind})}\n\n"

    def read(events: str) -> list[tuple[int, str]]:
        bodies = [json.loads(line[6:]) for line in events.splitlines() if line]
        return [(body["error"]["code"], body["error"]["message"]) for body in bodies]

    internal = reword_streamed_errors(event(500, "CUDA error in /opt/x.cu"))
    assert read(internal) == [(500, "Internal server error.")]
    dead = reword_streamed_errors(event(500, str(EngineDeadError())))
    ((code, message),) = read(dead)
    assert code == 503
    assert "retry" in message
    refused = event(400, "Too long.")
    choice = {"text": '{"error": 1}'}
    text = f"data: {json.dumps({'choices': [choice]})}\n\n"
    assert reword_streamed_errors(text + refused) == text + refused
    # What arrives together is reworded one by one.
    assert reword_streamed_errors(text + event(500, "x") + refused).startswith(text)
    assert reword_streamed_errors(event(500, "x") + refused).endswith(refused)
