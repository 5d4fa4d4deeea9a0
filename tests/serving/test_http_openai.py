"""The OpenAI API, spoken by the stock client."""

import json
import re
import time
from typing import Any

import httpx
import pytest

from loadtest.models.tasks import TOOLS
from tests.serving.conftest import MODEL, STREAM_INTERVAL_S, wait_until
from tests.serving.fleet import processes

pytestmark = pytest.mark.ray

QUESTION = [{"role": "user", "content": "Count from 3 to 20."}]
ANSWER = ", ".join(map(str, range(3, 21))) + "."
# The same question as a prompt, for routes that apply no chat template.
PROMPT = "<|im_start|>user\nCount from 3 to 20.<|im_end|>\n<|im_start|>assistant\n"


def chat(client: Any, messages: Any = QUESTION, **options: Any) -> Any:
    given = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**given | options)


def complete(client: Any, **options: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    return client.completions.create(**given | options)


def test_a_conversation_is_answered_whole_or_in_pieces_with_the_usage_last(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 60
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
    # The role, the first token at once, and the rest: a fast machine has all of it
    # within one interval.
    assert len(chunks) >= 3
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    # Only streams tell how much a prompt added to the prefix cache.
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert last.usage.model_dump(include=counts) == usage.model_dump(include=counts)


def test_the_usage_tells_what_the_prefix_cache_supplied(client):
    for kind in ("Whole", "Streamed"):
        text = f"{kind}: count from 3 to 20, please. " * 20
        options: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if kind == "Streamed":
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        # There may be two replicas, each with a cache of its own.
        usages = []
        for _ in range(3):
            answer = chat(client, max_tokens=1, **options)
            last = list(answer)[-1] if kind == "Streamed" else answer
            usages.append(last.usage)
        cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
        assert cached[0] == 0
        assert 0 < max(cached) < usages[0].prompt_tokens


def test_a_stream_comes_in_chunks_of_what_an_interval_brought(server):
    """However short the engine's steps are, a client is not sent each by itself."""
    began_s = time.monotonic()
    chunks = list(server.stream(300, temperature=0, logprobs=1))
    took_s = time.monotonic() - began_s
    tokens = [chunk.choices[0].logprobs.tokens for chunk in chunks]
    assert sum(map(len, tokens)) == 300
    # The first and the last two (the end has one of its own) do not wait.
    assert len(chunks) <= took_s / STREAM_INTERVAL_S + 3


def test_prompts_choices_stop_strings_and_logprobs_are_honoured(client):
    assert complete(client).choices[0].text == ANSWER
    answer = complete(client, n=2, max_tokens=8, temperature=1.0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    (choice,) = complete(client, stop=[" 7", "8"]).choices
    assert choice.finish_reason == "stop"
    assert choice.text == ANSWER[: ANSWER.index(" 7")]
    answer = chat(client, max_tokens=3, logprobs=True, top_logprobs=2)
    for token in answer.choices[0].logprobs.content:
        best, second = token.top_logprobs
        assert token.logprob <= 0
        assert best.logprob >= second.logprob


def test_answers_and_arguments_of_a_named_tool_follow_their_schema(client):
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    schema = {"name": "place", "schema": parameters, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = chat(client, response_format=form, max_tokens=200)
    assert json.loads(answer.choices[0].message.content)["city"] in {"Oslo", "Rome"}
    function = {"name": "get_weather", "description": "", "parameters": parameters}
    answer = chat(
        client,
        [{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in {"Oslo", "Rome"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_model_calls_a_tool_by_itself_and_reads_its_result(client, stream):
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    options: dict[str, Any] = {"tools": list(TOOLS), "max_tokens": 200}
    if stream:
        calls = [
            call
            for chunk in chat(client, messages, stream=True, **options)
            if chunk.choices
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        call_id, name = calls[0].id, calls[0].function.name
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        answer = chat(client, messages, **options)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        call_id, name, arguments = call.id, call.function.name, call.function.arguments
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})

    function = {"name": name, "arguments": arguments}
    made = {"id": call_id, "type": "function", "function": function}
    result = json.dumps({"sky": "sunny", "degrees": 12})
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
    final = chat(client, messages, **options)
    assert final.choices[0].message.content == "It is sunny, 12 degrees."


def test_tokens_and_text_convert_both_ways(server):
    text = "one tree and 12 apples"
    tokens = server.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = server.post(
        "/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}
    ).json()
    assert back["prompt"].removeprefix("<s>").strip().endswith(text)
    # A conversation, with the chat template.
    talk, plain = (
        server.post("/tokenize", json={"model": MODEL, **what}).json()["count"]
        for what in ({"messages": QUESTION}, {"prompt": QUESTION[0]["content"]})
    )
    assert talk > plain


def test_a_request_can_switch_speculation_off_and_gets_the_same_text(server):
    drafted, plain = (
        server.complete(
            prompt=PROMPT,
            max_tokens=60,
            temperature=0,
            vllm_xargs={"speculative_decoding": switch},
        ).json()
        for switch in ("on", "off")
    )
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"] == ANSWER
    # Each answer carries its acceptance figures.
    figures = plain["metrics"]["speculative_decoding"]
    assert not figures or figures["num_draft_tokens"] == 0
    figures = drafted["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] > 0
    assert 0 <= figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
    assert figures["num_draft_tokens"] > 0


def test_health_says_so_when_its_count_is_old(server):
    """Serve's controller counts the replicas; they serve on without it."""

    def ask() -> dict[str, Any]:
        status, said = server.health()
        assert status == 200
        return said

    count = ask()["running_replicas"]
    assert count >= 1
    [controller] = processes(server, "controller")
    controller.suspend()
    try:
        stale = wait_until(lambda: (e := ask())["status"] == "stale" and e, 30)
        assert stale["running_replicas"] == count
        assert stale["age_s"] > 0
        assert server.complete().is_success
        assert ask()["age_s"] > stale["age_s"]
    finally:
        controller.resume()
    fresh = wait_until(lambda: (e := ask())["status"] == "ok" and e, 60)
    assert "age_s" not in fresh


def test_models_the_dashboard_and_serves_own_health_route_are_there(server, client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).created == model.created
    (url,) = re.findall(r"^  dashboard +(\S+)", server.command.output, re.MULTILINE)
    page = httpx.get(url, timeout=60, trust_env=False, follow_redirects=True)
    assert "<html" in page.text
    well = httpx.get(f"{server.url}/-/healthz", timeout=60, trust_env=False)
    assert (page.status_code, well.status_code) == (200, 200)
