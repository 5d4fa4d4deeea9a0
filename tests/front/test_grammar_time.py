"""Grammars are compiled once beforehand, within a limit, in a process of their own."""

import asyncio
import json
import time
from itertools import product

import pytest
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from serving.front import grammar_time as grammar_time_module
from serving.front.caller import Caller, caller
from serving.front.errors import ApiError
from serving.front.grammar_time import GrammarTime, find_grammars
from serving.front.grammar_trial import FINE
from tests.front.fake_fleet import until

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}
TOOL_GRAMMAR = ("json", '{"a": 1}')


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


class HeldTrials(GrammarTime):
    """Its trials end when they are let go; it keeps which were `begun`, in order."""

    def __init__(self):
        super().__init__(describe_tokenizer)
        self.begun = []
        self.may_end = asyncio.Event()

    async def _exchange(self, line):
        self.begun += [text for _, text in json.loads(line)]
        await self.may_end.wait()
        return FINE

    def ask(self, *texts, key=None):
        """Let whoever has the key ask for regular expressions, one by one."""
        whose = key and Caller(key, None, lambda _: None, lambda _: None)
        token = caller.set(whose)
        try:
            return [asyncio.create_task(self.check(with_regex(one))) for one in texts]
        finally:
            caller.reset(token)

    async def hold(self, *texts, **whose):
        """Return once the first is being tried and the others wait."""
        asking = self.ask(texts[0], **whose)
        await until(lambda: self.begun)
        asking += self.ask(*texts[1:], **whose)
        await asyncio.sleep(0)
        return asking


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


async def test_what_takes_too_long_is_refused_and_in_nobodys_way(grammar_time):
    """What is known is answered meanwhile, and what is new gets its own answer."""
    many = {f"p{number}": {"type": "string"} for number in range(2000)}
    slow = chat(response_format=as_schema({"type": "object", "properties": many}))
    known, new = with_regex("a+"), with_regex("b+")
    await grammar_time.check(known)
    asking = asyncio.ensure_future(grammar_time.check(slow))
    await until(lambda: grammar_time._trials and not grammar_time._waiting)
    async with asyncio.timeout(0.5):
        await grammar_time.check(known)
    # Its client leaves, and what was found out is remembered.
    asking.cancel()
    await grammar_time.check(new)
    started_s = time.monotonic()
    with pytest.raises(ApiError, match="longer than 5 s to compile") as refused:
        await grammar_time.check(slow)
    assert time.monotonic() - started_s < 1.0
    assert (refused.value.status, refused.value.param) == (400, "response_format")


async def test_what_nobody_waits_for_any_more_is_not_tried():
    trials = HeldTrials()
    leaving = await trials.hold("a", "b", "c", "d")
    # Of two that wait for the same, one stays.
    staying = trials.ask("c", "e")
    await asyncio.sleep(0)
    for one in leaving:
        one.cancel()
    await asyncio.wait(leaving)
    trials.may_end.set()
    await asyncio.gather(*staying)
    assert trials.begun == ["a", "c", "e"]
    assert not trials._trials


async def test_callers_have_their_grammars_tried_in_turn():
    trials = HeldTrials()
    asking = await trials.hold("a1", "a2", "a3", "a4", key="ann")
    asking += trials.ask("b1", "b2", key="ben") + trials.ask("c1", key="cyd")
    await asyncio.sleep(0)
    trials.may_end.set()
    await asyncio.gather(*asking)
    assert trials.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_only_so_many_grammars_of_a_caller_wait(monkeypatch):
    monkeypatch.setattr(grammar_time_module, "MAX_WAITING", 2)
    trials = HeldTrials()
    asking = await trials.hold("a1", "a2", "a3", key="ann")
    (refused,) = trials.ask("a4", key="ann")
    with pytest.raises(ApiError) as error:
        await refused
    assert error.value.status == 503
    assert error.value.retry_after_s > 1
    # What waits already takes no more room, nor do others' grammars.
    asking += trials.ask("a3", key="ann") + trials.ask("b1", key="ben")
    await asyncio.sleep(0)
    trials.may_end.set()
    await asyncio.gather(*asking)
    assert trials.begun == ["a1", "a2", "b1", "a3"]


async def test_a_grammar_that_waits_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(grammar_time_module, "MAX_WAIT_S", 0.05)
    trials = HeldTrials()
    for one in await trials.hold("a", "b"):
        with pytest.raises(ApiError, match="retry") as error:
            await one
        assert error.value.status == 503
    assert not trials._waiting


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
