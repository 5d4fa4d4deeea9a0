"""The chat page, in a real browser: against a fake server, and against a real one."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from tests.serving.conftest import wait_until
from tests.serving.fake_site import page_route, run_site

expect.set_options(timeout=30_000)

EVIL = "<img src=x onerror=document.title='owned'>"
OWN_ID, OTHER_ID = "chatcmpl-0001-0000aaaa", "chatcmpl-0001-0000bbbb"


def row(tag: str, drafted: int, admitted: int, accepted: int) -> dict[str, Any]:
    return {
        "tag": tag[-8:],
        "number": 1,
        "survival": [0.5] * drafted,
        "drafted": drafted,
        "admitted": admitted,
        "accepted": accepted,
        "emitted": accepted + 1,
        "draft_text": [" Paris", EVIL, "\n", "x"][:drafted],
    }


STEPS = [
    {"step": 1, "requests": [row(OWN_ID, 4, 3, 1), row(OTHER_ID, 2, 2, 2)]},
    {"step": 2, "requests": [row(OTHER_ID, 2, 2, 2), row(OWN_ID, 2, 2, 2)]},
]


@dataclass
class FakeServer:
    """A fake of the three routes that the page uses, told by the question what to do.

    Its board shows the same steps again and again.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    card: dict[str, Any] = field(default_factory=dict)
    board: list[dict[str, Any]] = field(default_factory=lambda: STEPS)
    others: list[dict[str, Any]] = field(default_factory=list)
    models_status: int = 200
    watchers: int = 0
    looks: int = 0
    refusals: int = 0

    async def chat(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question.isdigit() and self.refusals:
            self.refusals -= 1
            return refuse(int(question))
        if "long" in question:
            return JSONResponse({"error": {"message": "at most 8 tokens fit"}}, 400)
        return StreamingResponse(self._chunks(question), media_type="text/event-stream")

    async def _chunks(self, question: str) -> AsyncIterator[str]:
        yield chunk(content="", finish=None)
        if "Think" in question:
            yield chunk(reasoning=f"They ask {EVIL}\n", finish=None)
            yield chunk(reasoning="for a capital.", finish=None)
        yield chunk(content=f"Paris. {EVIL}\n```python\n", finish=None)
        try:
            while "for ever" in question:
                yield chunk(content="on ", finish=None)
                await asyncio.sleep(0.05)
        finally:
            self.hung_up.set()
        if "break" in question:
            error = {"error": {"message": "The engine died."}}
            yield f"data: {json.dumps(error)}\n\n"
            return
        if "lose" in question:
            return
        yield chunk(content="print()\n```\nDone.", finish=None)
        yield chunk(content="", finish="stop")
        yield "data: [DONE]\n\n"

    async def steps(self) -> AsyncIterator[str]:
        self.watchers += 1
        replica = {"replica": "a", "policy": "tetris", "totals": {"steps": 2}}
        try:
            while True:
                event = {"replicas": [{**replica, "steps": self.board}, *self.others]}
                self.looks += 1
                yield f"data: {json.dumps(event)}\n\n"
                await asyncio.sleep(0.1)
        finally:
            self.watchers -= 1


def refuse(status: int) -> JSONResponse:
    refusal = {"error": {"message": f"This is a {status}"}}
    return JSONResponse(refusal, status, {"Retry-After": "3"})


def chunk(finish: str | None, **delta: str) -> str:
    choice = {"delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': OWN_ID, 'choices': [choice]})}\n\n"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    fake, app = FakeServer(), FastAPI()

    @app.get("/")
    async def page() -> HTMLResponse:
        return page_route("chat")

    @app.get("/v1/models")
    async def models() -> Response:
        if fake.models_status != 200:
            return refuse(fake.models_status)
        return JSONResponse({"data": [{"id": "fake", **fake.card}]})

    @app.get("/board/events")
    async def board() -> StreamingResponse:
        return StreamingResponse(fake.steps(), media_type="text/event-stream")

    app.post("/v1/chat/completions")(fake.chat)
    with run_site(app) as fake.url:
        yield fake


@pytest.fixture
def page(browser: Page, fake: FakeServer) -> Page:
    browser.goto(f"{fake.url}/")
    expect(browser.locator("#model")).to_have_text("fake")
    return browser


def ask(page: Page, question: str) -> None:
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.insert_text(question)
    page.keyboard.press("Enter")


def texts_of(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def figures_of(page: Page) -> dict[str, str]:
    names, values = texts_of(page, "#board dt"), texts_of(page, "#board dd")
    return dict(zip(names, values, strict=True))


def test_an_answer_streams_in_as_text_and_code(page, fake):
    ask(page, "What is the capital of France?")
    expect(page.locator(".assistant pre")).to_have_text("print()")
    expect(page.locator("#send")).to_have_text("Send")
    (answer,) = texts_of(page, ".assistant")
    assert answer.startswith(f"Paris. {EVIL}")

    ask(page, "And of Spain?")
    expect(page.locator(".assistant")).to_have_count(2)
    expect(page.locator("#send")).to_have_text("Send")
    sent = fake.bodies[-1]
    assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"].endswith("```\nDone.")
    assert sent["stream"]
    assert sent["model"] == "fake"


def test_what_a_model_thinks_is_shown_and_never_sent_back(page, fake):
    ask(page, "Think, and break")
    expect(page.locator(".error span")).to_contain_text("The engine died.")
    expect(page.locator(".thought div")).to_have_text(f"They ask {EVIL} for a capital.")
    assert page.evaluate("document.querySelector('.thought + .assistant') !== null")
    page.locator(".error button").click()
    wait_until(lambda: len(fake.bodies) == 2, 30)
    expect(page.locator(".error span")).to_contain_text("The engine died.")
    expect(page.locator(".thought, .assistant")).to_have_count(2)
    ask(page, "Think")
    expect(page.locator(".assistant").last).to_contain_text("Done.")
    expect(page.locator("#send")).to_have_text("Send")
    assert "capital" not in json.dumps(fake.bodies)
    assert page.evaluate("document.images.length") == 0


def test_the_board_beside_it_shows_the_tokens_of_this_request_alone(page, fake):
    ask(page, "What is the capital of France?")
    expect(page.locator("#steps .row")).to_have_count(2)
    expect(page.locator("#send")).to_have_text("Send")
    figures = figures_of(page)
    expected = {"drafted": "6", "admitted": "5", "accepted": "3", "engine steps": "2"}
    assert figures.items() >= (expected | {"tokens a step": "2.50"}).items()
    expect(page.locator("#missed")).to_be_hidden()
    newest, oldest = texts_of(page, "#steps .row")
    assert newest.split("\n")[:3] == ["2", "·Paris", EVIL]
    assert oldest.split("\n") == ["1", "·Paris", EVIL, "⏎", "x", "+1"]
    expect(page.locator("#steps .accepted")).to_have_count(3)
    expect(page.locator("#steps .rejected")).to_have_count(1)
    assert texts_of(page, "#state") == ["1 other request"]
    # What a model or a neighbour writes is never markup.
    assert page.evaluate("document.images.length") == 0
    assert page.title() == "Tetris Serve: chat"
    before = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "a phone's"
    expect(page.locator("#send")).to_be_in_viewport(ratio=0.99)
    page.set_viewport_size(before)
    # Who leaves the page alone watches no longer.
    assert fake.watchers == 1
    page.evaluate("clearTimeout(closing); unwatch('Paused')")
    wait_until(lambda: not fake.watchers, 10)
    assert texts_of(page, "#state") == ["Paused"]


def test_the_board_says_which_steps_it_did_not_see(page, fake):
    others = [row(OTHER_ID, 2, 2, 2)]
    fake.board = [
        {"step": 3, "requests": others, "left_out": 5},
        {**STEPS[0], "step": 4},
        # One that did not come, one cut short, and one whose request only waits.
        {"step": 6, "requests": others, "left_out": 5},
        {"step": 7, "requests": others, "left_out": 0},
        {**STEPS[1], "step": 8},
    ]
    looks = fake.looks
    wait_until(lambda: fake.looks > looks + 2, 10, period_s=0.05)
    ask(page, "What is the capital of France?")
    expect(page.locator("#missed")).to_contain_text("2 of these steps were not seen")
    expected = {"drafted": "6", "engine steps": "4", "tokens a step": "2.50"}
    assert figures_of(page).items() >= expected.items()


def test_the_board_says_when_no_engine_answers(page, fake):
    error = "The engine does not answer."
    fake.others = [{"replica": "b", "policy": "tetris", "error": error}]
    looks = fake.looks
    wait_until(lambda: fake.looks > looks + 2, 10, period_s=0.05)
    # The steps of one that answers are shown all the same.
    expect(page.locator("#state")).to_have_text("2 other requests")
    page.evaluate(
        "receive({ data: JSON.stringify({ replicas: [{ replica: 'b', policy: 'tetris',"
        f" error: '{error}' }}] }}) }}); unwatch(state.textContent)"
    )
    expect(page.locator("#state")).to_have_text(error)


def test_escape_stops_an_answer_and_new_forgets_the_conversation(page, fake):
    ask(page, "Go on for ever")
    expect(page.locator(".assistant")).to_contain_text("on on")
    expect(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    # The server hears of it, so that the engine stops too.
    assert fake.hung_up.wait(10)
    # The conversation goes on, until it is forgotten, even in the middle.
    ask(page, "And on, for ever")
    wait_until(lambda: len(fake.bodies) == 2, 30)
    assert "on on" in fake.bodies[-1]["messages"][1]["content"]
    page.locator("#clear").click()
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".message, .note, .error")).to_have_count(0)
    ask(page, "Hello")
    expect(page.locator(".assistant")).to_contain_text("Done.")
    assert [one["content"] for one in fake.bodies[-1]["messages"]] == ["Hello"]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("Please break", "The answer broke off: The engine died."),
        ("Please lose", "The answer broke off: the connection was lost."),
        ("401", "The server refused this: This is a 401."),
        ("403", "The server refused this: This is a 403."),
        ("404", "The server refused this: This is a 404."),
        ("429", "Too much was asked: This is a 429. Try again in 3 s."),
        ("500", "The server failed: This is a 500."),
        ("503", "The server is busy: This is a 503. Try again in 3 s."),
    ],
)
def test_what_goes_wrong_is_said_and_can_be_tried_again(question, reason, page, fake):
    fake.refusals = 1
    ask(page, question)
    expect(page.locator(".error span")).to_have_text(reason)
    expect(page.locator("#send")).to_have_text("Send")
    page.locator(".error button").click()
    wait_until(lambda: len(fake.bodies) == 2, 30)
    # The same again, without what was begun.
    assert fake.bodies[1] == fake.bodies[0]
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".assistant")).to_have_count(1)
    if question.isdigit():
        expect(page.locator(".assistant")).to_contain_text("Done.")
        expect(page.locator(".error")).to_have_count(0)


def test_a_server_that_names_no_model_is_asked_again(browser, fake):
    fake.models_status = 503
    browser.goto(f"{fake.url}/")
    reason = "The server is busy: This is a 503. Try again in 3 s."
    expect(browser.locator("#model")).to_have_text(reason)
    ask(browser, "Hello")
    # No answer has begun that could break off.
    expect(browser.locator(".error span")).to_have_text(reason)
    fake.models_status = 200
    browser.locator(".error button").click()
    expect(browser.locator(".assistant")).to_contain_text("Done.")

    # One that is replaced by another has its new model.
    fake.card, fake.refusals = {"id": "another"}, 1
    expect(browser.locator("#send")).to_have_text("Send")
    ask(browser, "404")
    browser.locator(".error button").click()
    expect(browser.locator("#model")).to_have_text("another")
    wait_until(lambda: fake.bodies[-1]["model"] == "another", 30)


def test_a_question_that_does_not_fit_is_given_back(page, fake):
    ask(page, "What is the capital of France?")
    expect(page.locator("#send")).to_have_text("Send")
    ask(page, "Too long")
    expect(page.locator(".error span")).to_have_text(
        "The server refused this: at most 8 tokens fit."
        " Change your question, or begin afresh with New."
    )
    expect(page.locator("#text")).to_have_value("Too long")
    assert texts_of(page, ".user") == ["What is the capital of France?"]
    # Afresh, the same question may fit; here it is not asked again.
    page.locator(".error button").click()
    expect(page.locator("#text")).to_have_value("Too long")
    page.locator("#text").fill("")
    ask(page, "Too long again")
    expect(page.locator(".error")).to_have_count(1)
    page.locator("#text").fill("")
    ask(page, "Hello")
    expect(page.locator(".assistant")).to_contain_text("Done.")
    assert [one["content"] for one in fake.bodies[-1]["messages"]] == ["Hello"]
    assert texts_of(page, ".user") == ["Hello"]


@pytest.mark.parametrize(
    ("card", "max_tokens"),
    [
        ({}, 512),
        ({"max_model_len": 8192}, 512),
        ({"max_model_len": 64}, 32),
        ({"metadata": {"max_request_context_length": 100}}, 50),
        ({"metadata": {"max_request_context_length": None}}, 512),
    ],
)
def test_a_small_context_has_room_for_the_question(card, max_tokens, browser, fake):
    fake.card = card
    browser.goto(f"{fake.url}/")
    ask(browser, "Hello")
    expect(browser.locator(".assistant")).to_contain_text("Done.")
    assert [one["max_tokens"] for one in fake.bodies] == [max_tokens]


@pytest.mark.ray
def test_a_newcomer_sees_the_drafts_of_their_own_answer(browser, server):
    response = browser.goto(server.url)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    expect(browser.locator("#model")).to_have_text("demo")
    ask(browser, "Count from 1 to 30.")
    accepted = browser.locator("#steps .accepted")
    # On a loopback address drafts are shown as text, not as ticks.
    expect(accepted.filter(has_text=re.compile(r"\w")).first).to_be_attached(
        timeout=120_000
    )
    expect(browser.locator("#send")).to_have_text("Send", timeout=120_000)
    expect(browser.locator(".error")).to_have_count(0)
