"""Grammars are compiled once beforehand, within a limit, in a process of their own."""

import asyncio
import json
import time
from itertools import product

import pytest
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from serving.front.errors import ApiError
from serving.front.grammar_time import GrammarTime, find_grammars

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}
TOOL_GRAMMAR = ("json", '{"a": 1}')


SLOW = "".join(f"[a-z]{{1,{900 + number}}}x" for number in range(250))


def describe_tokenizer():
    """As many tokens as real models have, on which the time depends."""
    letters = 'abcdefghijklmnopqrstuvwxyz"{}:, '
    parts = ["".join(part) for n in (1, 2, 3) for part in product(letters, repeat=n)]
    return xgrammar.TokenizerInfo(parts, stop_token_ids=[0]).serialize_json()


@pytest.fixture
async def grammar_time():
    trials = GrammarTime(describe_tokenizer)
    yield trials
    await trials.close()


def chat(**fields):
    return ChatCompletionRequest(messages=[USER], model="m", **fields)


def with_regex(text):
    return chat(structured_outputs={"regex": text})


def as_schema(schema):
    form = {"name": "n", "schema": schema}
    return {"type": "json_schema", "json_schema": form}


@pytest.mark.parametrize(
    ("body", "grammars"),
    [
        (chat(), []),
        (chat(response_format={"type": "json_object"}), []),
        (chat(response_format=as_schema({"b": 2})), [("json", '{"b": 2}')]),
        (with_regex("a+"), [("regex", "a+")]),
        (
            CompletionRequest(prompt="a", structured_outputs={"choice": ['"', "b"]}),
            [("grammar", 'root ::= "\\"" | "b"')],
        ),
        (chat(tools=[TOOL]), []),
        (chat(tools=[TOOL], tool_choice="required"), [TOOL_GRAMMAR]),
    ],
)
def test_what_would_be_compiled_is_found(body, grammars):
    assert find_grammars(body) == grammars


@pytest.mark.anyio
async def test_what_takes_too_long_is_refused_and_remembered(grammar_time):
    many = {f"p{number}": {"type": "string"} for number in range(2000)}
    slow = chat(response_format=as_schema({"type": "object", "properties": many}))
    with pytest.raises(ApiError, match="longer than 5 s to compile") as refused:
        await grammar_time.check(slow)
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    started_s = time.monotonic()
    with pytest.raises(ApiError):
        await grammar_time.check(slow)
    assert time.monotonic() - started_s < 1.0


@pytest.mark.anyio
async def test_a_slow_one_whose_client_leaves_is_in_nobodys_way(grammar_time):
    """What is known is answered meanwhile, and what is new gets its own answer."""
    known, new = with_regex("a+"), with_regex("b+")
    await grammar_time.check(known)
    slow = asyncio.ensure_future(grammar_time.check(with_regex(SLOW)))
    while not grammar_time._turn.locked():
        await asyncio.sleep(0.01)
    async with asyncio.timeout(0.5):
        await grammar_time.check(known)
    slow.cancel()
    await grammar_time.check(new)
    started_s = time.monotonic()
    with pytest.raises(ApiError):
        await grammar_time.check(with_regex(SLOW))
    assert time.monotonic() - started_s < 1.0


@pytest.mark.anyio
async def test_what_is_usual_or_makes_no_sense_passes(grammar_time):
    few = {f"p{number}": {"type": "string"} for number in range(100)}
    for body in (
        chat(response_format=as_schema({"type": "object", "properties": few})),
        with_regex("[a-z]{1,1000}"),
        with_regex("("),
        chat(structured_outputs={"grammar": "root ::= nothing"}),
        chat(structured_outputs={"json": "{"}),
    ):
        await grammar_time.check(body)


@pytest.mark.anyio
async def test_nobody_waits_for_a_trial_that_cannot_be_had(grammar_time, serve_log):
    no_tokenizer = GrammarTime(lambda: json.dumps({"no": "tokenizer"}))
    await no_tokenizer.check(with_regex("a"))
    assert "No grammar can be tried beforehand" in serve_log.text
    # One that is killed is started again.
    await grammar_time.check(with_regex("a"))
    grammar_time._trial.kill()
    await grammar_time._trial.wait()
    await grammar_time.check(with_regex("b"))
    await grammar_time.check(with_regex("c"))
    assert grammar_time._trial.returncode is None
