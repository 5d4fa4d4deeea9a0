"""The chat page, in a real browser: against a fake server, and against a real one."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Page
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from serving.front.board import CHAT_PAGE, PAGE_HEADERS
from tests.pictures import open_browser
from tests.serving.conftest import find_free_ports, wait_until

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


@dataclass
class FakeServer:
    """A fake of the three routes that the page uses, told by the question what to do.

    A board that is looked at shows two steps of the page's request and one of another.
    """

    port: int
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    watchers: int = 0
    refusals: int = 0

    async def chat(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if "Busy" in question and self.refusals:
            self.refusals -= 1
            refusal = {"error": {"message": "All replicas are busy."}}
            return JSONResponse(refusal, 503, {"Retry-After": "3"})
        if "long" in question:
            return JSONResponse({"error": {"message": "at most 8 tokens fit"}}, 400)
        return StreamingResponse(self._chunks(question), media_type="text/event-stream")

    async def _chunks(self, question: str) -> AsyncIterator[str]:
        yield chunk(content="", finish=None)
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
        first = {"step": 1, "requests": [row(OWN_ID, 4, 3, 1), row(OTHER_ID, 2, 2, 2)]}
        second = {"step": 2, "requests": [row(OTHER_ID, 2, 2, 2), row(OWN_ID, 2, 2, 2)]}
        replica = {"replica": "a", "policy": "tetris", "totals": {"steps": 2}}
        event = {"replicas": [{**replica, "steps": [first, second]}]}
        try:
            while True:
                yield f"data: {json.dumps(event)}\n\n"
                await asyncio.sleep(0.1)
        finally:
            self.watchers -= 1


def chunk(content: str, finish: str | None) -> str:
    choice = {"delta": {"content": content}, "finish_reason": finish}
    return f"data: {json.dumps({'id': OWN_ID, 'choices': [choice]})}\n\n"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    (port,) = find_free_ports(1)
    fake, app = FakeServer(port), FastAPI()

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(CHAT_PAGE.read_text("utf-8"), headers=PAGE_HEADERS)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    @app.get("/board/events")
    async def board() -> StreamingResponse:
        return StreamingResponse(fake.steps(), media_type="text/event-stream")

    app.post("/v1/chat/completions")(fake.chat)
    config = uvicorn.Config(
        app, port=port, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, 30, period_s=0.02)
    yield fake
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_browser() as page:
        yield page


@pytest.fixture
def page(browser: Page, fake: FakeServer) -> Page:
    browser.goto(f"http://127.0.0.1:{fake.port}/")
    wait_for(browser, "document.querySelector('#model')?.textContent === 'fake'")
    return browser


def wait_for(page: Page, condition: str, timeout_s: float = 30.0) -> None:
    """Wait until something holds; polled from here, for pages may not evaluate text."""
    wait_until(lambda: page.evaluate(condition), timeout_s, period_s=0.05)


def ask(page: Page, question: str) -> None:
    wait_for(page, "document.activeElement.id === 'text'")
    page.keyboard.insert_text(question)
    page.keyboard.press("Enter")


def text_of(page: Page, selector: str) -> list[str]:
    found = f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"
    texts: list[str] = page.evaluate(found)
    return texts


def wait_for_whole_answer(page: Page) -> None:
    last = "[...document.querySelectorAll('.assistant')].at(-1)?.innerText"
    wait_for(page, f"{last}?.endsWith('Done.')")


def wait_for_answer(page: Page) -> None:
    wait_for(page, "document.querySelector('#send').textContent === 'Send'")


def test_an_answer_streams_in_as_text_and_code(page, fake):
    ask(page, "What is the capital of France?")
    wait_for(page, "document.querySelector('.assistant pre') !== null")
    wait_for_answer(page)
    (answer,) = text_of(page, ".assistant")
    assert answer.startswith(f"Paris. {EVIL}")
    assert text_of(page, ".assistant pre") == ["print()"]

    ask(page, "And of Spain?")
    wait_for(page, "document.querySelectorAll('.assistant').length === 2")
    wait_for_answer(page)
    sent = fake.bodies[-1]
    assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"].endswith("```\nDone.")
    assert sent["stream"]
    assert sent["model"] == "fake"


def test_the_board_beside_it_shows_the_tokens_of_this_request_alone(page, fake):
    ask(page, "What is the capital of France?")
    wait_for(page, "document.querySelectorAll('#steps .row').length === 2")
    wait_for_answer(page)
    figures = dict(
        zip(text_of(page, "#board dt"), text_of(page, "#board dd"), strict=True)
    )
    expected = {"drafted": "6", "admitted": "5", "accepted": "3", "engine steps": "2"}
    assert figures.items() >= (expected | {"tokens a step": "2.50"}).items()
    newest, oldest = text_of(page, "#steps .row")
    assert newest.split("\n")[:3] == ["2", "·Paris", EVIL]
    assert oldest.split("\n") == ["1", "·Paris", EVIL, "⏎", "x", "+1"]
    assert len(text_of(page, "#steps .accepted")) == 3
    assert len(text_of(page, "#steps .rejected")) == 1
    assert text_of(page, "#state") == ["1 other request"]
    # What a model or a neighbour writes is never markup.
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.title") == "Tetris Serve: chat"
    before = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "a phone's"
    rectangle = "document.querySelector('#send').getBoundingClientRect().toJSON()"
    box = page.evaluate(rectangle)
    assert box["right"] <= 390
    assert box["bottom"] <= 844
    page.set_viewport_size(before)
    # Who leaves the page alone watches no longer.
    assert fake.watchers == 1
    page.evaluate("clearTimeout(closing); unwatch('Paused')")
    wait_until(lambda: not fake.watchers, 10)
    assert text_of(page, "#state") == ["Paused"]


def test_escape_stops_an_answer_and_new_forgets_the_conversation(page, fake):
    ask(page, "Go on for ever")
    wait_for(page, "document.querySelector('.assistant')?.innerText.includes('on on')")
    assert text_of(page, "#send") == ["Stop"]
    page.keyboard.press("Escape")
    wait_for_answer(page)
    assert text_of(page, ".note") == ["Stopped."]
    # The server hears of it, so that the engine stops too.
    assert fake.hung_up.wait(10)
    # The conversation goes on, until it is forgotten, even in the middle.
    ask(page, "And on, for ever")
    wait_until(lambda: len(fake.bodies) == 2, 30)
    assert "on on" in fake.bodies[-1]["messages"][1]["content"]
    page.evaluate("document.querySelector('#clear').click()")
    wait_for_answer(page)
    assert text_of(page, ".message, .note, .error") == []
    ask(page, "Hello")
    wait_for_whole_answer(page)
    assert [one["content"] for one in fake.bodies[-1]["messages"]] == ["Hello"]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("Too long", "The server refused this: at most 8 tokens fit"),
        ("Please break", "The answer broke off: The engine died."),
        ("Please lose", "The answer broke off: the connection was lost."),
        ("Busy?", "The server is busy: All replicas are busy. Try again in 3 s."),
    ],
)
def test_what_goes_wrong_is_said_and_can_be_tried_again(question, reason, page, fake):
    fake.refusals = 1
    ask(page, question)
    wait_for(page, "document.querySelector('.error') !== null")
    assert text_of(page, ".error span") == [reason]
    assert text_of(page, "#send") == ["Send"]
    page.evaluate("document.querySelector('.error button').click()")
    wait_until(lambda: len(fake.bodies) == 2, 30)
    assert fake.bodies[1]["messages"][:1] == fake.bodies[0]["messages"]
    if question == "Busy?":
        wait_for_whole_answer(page)
        assert text_of(page, ".error") == []


@pytest.mark.ray
def test_a_newcomer_sees_the_drafts_of_their_own_answer(browser, server):
    response = httpx.get(server.url, timeout=60, trust_env=False)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    browser.goto(server.url)
    wait_for(browser, "document.querySelector('#model')?.textContent === 'demo'")
    ask(browser, "Count from 1 to 30.")
    wait_for(browser, "document.querySelector('#steps .accepted') !== null", 120)
    wait_for(browser, "document.querySelector('#send').textContent === 'Send'", 120)
    accepted = text_of(browser, "#steps .accepted")
    # On a loopback address drafts are shown as text, not as ticks.
    assert any(any(letter.isalnum() for letter in token) for token in accepted)
    assert text_of(browser, ".error") == []
