"""The OpenAI API, spoken by the stock client."""

import json
import time
from typing import Any

import httpx
import pytest

from loadtest.compare.processes import find_processes
from loadtest.models.tasks import TOOLS
from tests.serving.conftest import MODEL, STREAM_INTERVAL_S, wait_until

pytestmark = pytest.mark.ray

QUESTION = [{"role": "user", "content": "Count from 3 to 20."}]
ANSWER = ", ".join(map(str, range(3, 21))) + "."
# The same question as a prompt, for routes that apply no chat template.
PROMPT = "<|im_start|>user\nCount from 3 to 20.<|im_end|>\n<|im_start|>assistant\n"


def chat(client: Any, messages: Any = QUESTION, **options: Any) -> Any:
    given = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**given | options)


def test_a_conversation_is_answered(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert 0 < answer.usage.completion_tokens <= 60
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_stream_brings_the_same_text_in_pieces_and_the_usage_last(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == ANSWER
    assert len(chunks) > 3
    assert chunks[-1].choices == []
    # Only streams tell how much a prompt added to the prefix cache.
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert chunks[-1].usage.model_dump(include=counts) == whole.usage.model_dump(
        include=counts
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_usage_tells_what_the_prefix_cache_supplied(client, stream):
    text = f"{'Streamed' if stream else 'Whole'}: count from 3 to 20, please. " * 20
    options: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    usages = []
    # There may be two replicas, each with a cache of its own.
    for _ in range(3):
        answer = chat(client, max_tokens=1, **options)
        usages.append(list(answer)[-1].usage if stream else answer.usage)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] == 0
    assert 0 < max(cached) < usages[0].prompt_tokens


def test_a_stream_comes_in_chunks_of_what_an_interval_brought(client):
    """However short the engine's steps are, a client is not sent each by itself."""
    began_s = time.monotonic()
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=300,
            temperature=0,
            stream=True,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
    )
    took_s = time.monotonic() - began_s
    tokens = [chunk.choices[0].logprobs.tokens for chunk in chunks]
    assert sum(map(len, tokens)) == 300
    # The first and the last two (the end has one of its own) do not wait.
    assert len(chunks) <= took_s / STREAM_INTERVAL_S + 3


def test_a_stream_ends_with_done(server):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    response = server.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_a_prompt_is_completed_streaming_or_not(client):
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60}
    whole = client.completions.create(**options, temperature=0)
    pieces = client.completions.create(**options, temperature=0, stream=True)
    assert whole.choices[0].text == ANSWER
    assert "".join(p.choices[0].text for p in pieces) == ANSWER


def test_several_choices_and_stop_strings_are_honoured(client):
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, max_tokens=8, temperature=1.0, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0, stop=[" 7", "8"]
    )
    (choice,) = stopped.choices
    assert choice.finish_reason == "stop"
    assert choice.text == ANSWER[: ANSWER.index(" 7")]


def test_models_are_listed_and_described(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).created == model.created


def test_logprobs_come_with_alternatives(client):
    answer = chat(client, max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_output_follows_a_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        [{"role": "user", "content": "Describe a pet as JSON."}],
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "pet", "schema": schema, "strict": True},
        },
    )
    pet = json.loads(answer.choices[0].message.content or "")
    assert pet["kind"] in {"cat", "dog"}
    assert pet["old"] in {True, False}


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_named_tool_is_called_with_arguments_of_its_schema(client):
    answer = chat(
        client,
        [{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in {"Oslo", "Rome"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_model_calls_a_tool_by_itself_and_reads_its_result(client, stream):
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    options = {"tools": list(TOOLS), "max_tokens": 200}
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
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {
            "role": "tool",
            "tool_call_id": call_id,
            "content": json.dumps({"sky": "sunny", "degrees": 12}),
        },
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


def test_each_answer_carries_its_acceptance_figures(server):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    figures = server.post("/v1/completions", json=body).json()["metrics"]
    speculation = figures["speculative_decoding"]
    assert speculation["num_spec_steps"] > 0
    assert speculation["num_accepted_draft_tokens"] <= speculation["num_draft_tokens"]


def test_a_request_can_switch_speculation_off_and_gets_the_same_text(server):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    drafted = server.post("/v1/completions", json=body).json()
    body["vllm_xargs"] = {"speculative_decoding": "off"}
    plain = server.post("/v1/completions", json=body).json()
    figures = plain["metrics"]["speculative_decoding"]
    assert not figures or figures["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"] == ANSWER


def test_the_health_routes_answer(server):
    health = httpx.get(f"{server.url}/health", timeout=60, trust_env=False)
    assert health.status_code == 200
    assert health.json()["running_replicas"] >= 1
    serve_health = httpx.get(f"{server.url}/-/healthz", timeout=60, trust_env=False)
    assert serve_health.status_code == 200


def test_health_says_so_when_its_count_is_old(server):
    """Serve's controller counts the replicas; they serve on without it."""

    def ask() -> dict[str, Any]:
        response = httpx.get(f"{server.url}/health", timeout=60, trust_env=False)
        assert response.status_code == 200
        return dict(response.json())

    count = ask()["running_replicas"]
    [controller] = (
        process
        for role, process in find_processes(server.command.process.pid)
        if role == "controller"
    )
    controller.suspend()
    try:
        stale = wait_until(lambda: (e := ask())["status"] == "stale" and e, 30)
        assert stale["running_replicas"] == count
        assert stale["age_s"] > 0
        assert server.client().completions.create(model=MODEL, prompt="one").choices
        assert ask()["age_s"] > stale["age_s"]
    finally:
        controller.resume()
    fresh = wait_until(lambda: (e := ask())["status"] == "ok" and e, 60)
    assert "age_s" not in fresh


def test_the_dashboard_is_up(server):
    line = next(x for x in server.command.output.splitlines() if "dashboard" in x)
    url = next(word for word in line.split() if word.startswith("http"))
    page = httpx.get(url, timeout=60, trust_env=False, follow_redirects=True)
    assert page.status_code == 200
    assert "<html" in page.text
