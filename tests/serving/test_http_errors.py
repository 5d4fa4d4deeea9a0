"""Bad input: an OpenAI error object that names the field, and nobody else disturbed."""

from typing import Any

import httpx
import pytest

from tests.serving.conftest import MODEL

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi"}


Asked = tuple[str, dict[str, Any]]


def chat(**fields: Any) -> Asked:
    return CHAT, {"model": MODEL, "messages": [USER], "max_tokens": 4} | fields


def prompt(**fields: Any) -> Asked:
    return COMPLETIONS, {"model": MODEL, "prompt": "one two", "max_tokens": 4} | fields


LONG = "a b " * 4000
# It would take minutes to compile.
MINUTES = {"regex": "".join(f"[a-z]{{1,{900 + number}}}x" for number in range(250))}
WIBBLE = {"name": "x", "schema": {"type": "wibble"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": WIBBLE}
BAD_REQUESTS: dict[str, tuple[Asked, str | None]] = {
    "an unknown model": (chat(model="gpt-9"), "model"),
    "a model of the wrong type": (chat(model=7), "model"),
    "no messages": ((CHAT, {"model": MODEL}), "messages"),
    "wrong content": (chat(messages=[USER | {"content": 5}]), "messages.0.content"),
    "negative max_tokens": (chat(max_tokens=-1), "max_tokens"),
    "huge max_tokens": (chat(max_tokens=10**9), "max_tokens"),
    "a negative temperature": (chat(temperature=-1), "temperature"),
    "no choices": (prompt(n=0), "n"),
    "too many logprobs": (chat(logprobs=True, top_logprobs=99), "top_logprobs"),
    "an empty prompt": (prompt(prompt=""), "prompt"),
    "a prompt beyond the context": (prompt(prompt=LONG), "prompt"),
    "a long prompt to stream": (prompt(prompt=LONG, stream=True), "prompt"),
    "a schema that is none": (chat(response_format=NO_SCHEMA), "response_format"),
    "a slow grammar": (chat(structured_outputs=MINUTES), "structured_outputs"),
    "min_p, which speculation rules out": (chat(min_p=0.2), "min_p"),
    "tools that are a number": (chat(tools=5), "tools"),
    "a deadline that is none": (prompt(deadline_ms="soon"), "deadline_ms"),
    "a deadline beyond floats": (prompt(deadline_ms=10**400), "deadline_ms"),
    "a deadline of true": (prompt(deadline_ms=True), "deadline_ms"),
    "a deadline of nothing": (prompt(deadline_ms=0), "deadline_ms"),
    "a deadline in the past": (chat(vllm_xargs={"deadline_ms": -5}), "deadline_ms"),
    "tokens that are text": (("/detokenize", {"tokens": ["a"]}), "tokens.0"),
    "an unknown route": (("/v1/nothing", {}), None),
}


def check(response: httpx.Response, status: int, param: str | None = None) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["code"], error["param"]) == (status, param)


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_input_is_refused_with_the_fields_name(server, case):
    (path, body), param = BAD_REQUESTS[case]
    status = 404 if case.startswith("an unknown") else 400
    check(server.post(path, json=body), status, param)


def test_what_is_no_request_at_all_is_refused_in_the_same_form(server):
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"\xff\xfe{"):
        check(server.post(CHAT, content=content, headers=headers), 400)
    huge = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    # With its length, and without.
    for content in (huge, iter([huge])):
        check(server.post(COMPLETIONS, content=content), 413)
    check(server.post("/v1/models"), 405)


def test_unknown_fields_are_ignored_and_input_is_not_repeated(server):
    def ask(asked: Asked) -> httpx.Response:
        return server.post(asked[0], json=asked[1])

    assert ask(chat(wibble=1)).is_success
    for messages in (None, 5):
        assert ask(prompt(messages=messages)).is_success
        assert ask(("/tokenize", {"prompt": "one", "messages": messages})).is_success
    secret = "hunter2"
    assert secret not in ask(chat(max_tokens=secret, top_p=secret)).text
