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


Asked = tuple[str, dict[str, Any]]


def chat(**fields: Any) -> Asked:
    return CHAT, {"model": MODEL, "messages": [USER], "max_tokens": 4} | fields


def prompt(**fields: Any) -> Asked:
    return COMPLETIONS, {"model": MODEL, "prompt": "one two", "max_tokens": 4} | fields


def say(content: Any, role: str = "user") -> Asked:
    return chat(messages=[{"role": role, "content": content}])


LONG = "a b " * 4000
NO_PARTS = [[None, None]]
NO_SCHEMA = {"name": "x", "schema": {"type": "wibble"}}
BAD_REQUESTS: dict[str, tuple[Asked, str | None]] = {
    "an unknown model": (chat(model="gpt-9"), "model"),
    "a model of the wrong type": (chat(model=7), "model"),
    "no messages": ((CHAT, {"model": MODEL}), "messages"),
    "empty messages": (chat(messages=[]), "messages"),
    "messages that are text": (chat(messages="Hi"), "messages"),
    "content of the wrong type": (say(5), "messages.0.content"),
    "max_tokens that are text": (chat(max_tokens="few"), "max_tokens"),
    "negative max_tokens": (chat(max_tokens=-1), "max_tokens"),
    "huge max_tokens": (chat(max_tokens=10**9), "max_tokens"),
    "a negative temperature": (chat(temperature=-1), "temperature"),
    "a huge temperature": (chat(temperature=99), "temperature"),
    "top_p beyond one": (chat(top_p=1.5), "top_p"),
    "no choices": (prompt(n=0), "n"),
    "too many logprobs": (chat(logprobs=True, top_logprobs=99), "top_logprobs"),
    "an empty prompt": (prompt(prompt=""), "prompt"),
    "a prompt beyond the context": (prompt(prompt=LONG), "prompt"),
    "a long conversation": (say(LONG), "messages"),
    "a long prompt to stream": (prompt(prompt=LONG, stream=True), "prompt"),
    "a schema that is none": (
        chat(response_format={"type": "json_schema", "json_schema": NO_SCHEMA}),
        "response_format",
    ),
    "min_p, which speculation rules out": (chat(min_p=0.2), "min_p"),
    "logit_bias, which it does too": (chat(logit_bias={"5": 3}), "logit_bias"),
    "messages that are null": (chat(messages=None), None),
    "null messages and a prompt": (chat(messages=None, prompt=""), None),
    "messages that hold null": (chat(messages=[None]), "messages.0"),
    "content parts that are none": (say(NO_PARTS), "messages.0.content"),
    "such parts to tokenize": (("/tokenize", say(NO_PARTS)[1]), "messages.0.content"),
    "half a surrogate pair": (prompt(prompt="a\ud800"), None),
    "half a pair, to tokenize": (("/tokenize", {"prompt": "\ud800"}), None),
    "half a pair as a name": (("/detokenize", {"tokens": [1], "\ud800": 1}), None),
    "too many choices": (chat(n=1000), "n"),
    "a role that is none": (say("Hi", role="robot"), "messages.0.role"),
    "a word that is no switch": (
        chat(vllm_xargs={"speculative_decoding": "maybe"}),
        "vllm_xargs",
    ),
    "tools that are a number": (chat(tools=5), "tools"),
    "tokens that are text": (("/detokenize", {"tokens": ["a"]}), "tokens.0"),
    "an unknown route": (("/v1/nothing", {}), None),
}


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


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_input_is_refused_with_the_fields_name(server, case):
    asked, param = BAD_REQUESTS[case]
    response = send(server, *asked)
    assert response.status_code == (404 if case.startswith("an unknown") else 400)
    assert_is_openai_error(response.json(), response.status_code, param)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": }', b"[]", b"\xff\xfe{"])
def test_a_body_that_is_no_json_object_is_refused(server, content):
    headers = {"content-type": "application/json"}
    response = server.post(CHAT, content=content, headers=headers)
    assert response.status_code == 400
    assert_is_openai_error(response.json(), 400, None)


def test_an_oversized_body_is_refused_with_or_without_its_length(server):
    huge = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    declared = server.post(COMPLETIONS, content=huge)
    parts = (huge[i : i + 65536] for i in range(0, len(huge), 65536))
    undeclared = server.post(COMPLETIONS, content=parts)
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert_is_openai_error(response.json(), 413, None)


def test_a_wrong_method_is_refused_in_the_same_form(server):
    response = server.post("/v1/models")
    assert response.status_code == 405
    assert_is_openai_error(response.json(), 405, None)


def test_unknown_fields_are_ignored_as_vllm_does(server):
    assert send(server, *chat(wibble=1)).status_code == 200
    for messages in (None, 5):
        assert send(server, *prompt(messages=messages)).is_success
        body = {"prompt": "one", "messages": messages}
        assert server.post("/tokenize", json=body).is_success


def test_messages_do_not_repeat_the_clients_input(server):
    secret = "hunter2"
    response = send(server, *chat(max_tokens=secret, temperature=secret))
    assert secret not in response.text


def test_the_stock_client_raises_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=[USER])
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as negative:
        client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=-1)
    assert negative.value.param == "max_tokens"


def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_is_logged(caplog):
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


def test_bad_requests_disturb_no_good_one(server):
    good, bad = prompt(max_tokens=32, temperature=0), [*BAD_REQUESTS.values()]
    expected = send(server, *good).json()["choices"][0]["text"]

    def ask(case: int) -> tuple[int, str]:
        if case % 4 == 0:
            response = send(server, *good)
            return response.status_code, response.json()["choices"][0]["text"]
        asked, _ = bad[case % len(bad)]
        return send(server, *asked).status_code, ""

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(48)))
    good_results = results[::4]
    assert all(status == 200 for status, _ in good_results)
    # The same tokens up to bf16 near-ties, which other batch shapes settle otherwise.
    assert all(text[:8] == expected[:8] for _, text in good_results)
    assert all(400 <= s < 500 for i, (s, _) in enumerate(results) if i % 4)


def test_streams_keep_vllms_own_failures_to_the_log():
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
