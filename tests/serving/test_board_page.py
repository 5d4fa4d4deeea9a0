"""The board's page, in a real browser, against a fake of what feeds it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect
from starlette.responses import HTMLResponse, Response, StreamingResponse

from tests.serving.conftest import wait_until
from tests.serving.fake_site import page_route, run_site

expect.set_options(timeout=30_000)

REQUEST = {
    "number": 1,
    "survival": [0.5, 0.4],
    "drafted": 2,
    "admitted": 2,
    "accepted": 1,
    "emitted": 2,
}
QUIET_LOOKS = 8


class FakeFeed:
    """A fake of the board's feed: sends what the test puts there, again and again."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.events: list[dict[str, Any]] = [look(0)]
        self.num_sent = self.num_watchers = 0

    def answer(self) -> Response:
        if self.status != 200:
            return Response(status_code=self.status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    def send(self, *events: dict[str, Any]) -> None:
        """Send these once each, the last from then on."""
        self.events = list(events)

    async def _stream(self) -> AsyncIterator[str]:
        self.num_watchers += 1
        try:
            while True:
                event = self.events.pop(0) if self.events[1:] else self.events[0]
                yield f"data: {json.dumps(event)}\n\n"
                self.num_sent += 1
                await asyncio.sleep(0.05)
        finally:
            self.num_watchers -= 1


def look(num_steps: int, *steps: int) -> dict[str, Any]:
    """Return what a look shows after so many steps, of which these are new."""
    totals = {
        "steps": num_steps,
        "drafted": 2 * num_steps,
        "admitted": 2 * num_steps,
        "accepted": num_steps,
        "emitted": 2 * num_steps,
        "seconds": 0.7 * num_steps,
    }
    known = {"budget": 2, "depth": 2, "running": 1, "waiting": 0}
    rows = [{"step": step, "requests": [REQUEST], **known} for step in steps]
    return replica("a", totals=totals, steps=rows)


def replica(name: str, **seen: Any) -> dict[str, Any]:
    return {"replicas": [{"replica": name, "policy": "tetris", **seen}]}


@pytest.fixture
def feed() -> Iterator[FakeFeed]:
    feed, app = FakeFeed(), FastAPI()

    @app.get("/board")
    async def page() -> HTMLResponse:
        return page_route("board")

    @app.get("/board/events")
    async def events() -> Response:
        return feed.answer()

    with run_site(app) as feed.url:
        yield feed


@pytest.fixture
def page(browser: Page, feed: FakeFeed) -> Page:
    browser.goto(f"{feed.url}/board")
    expect(browser.locator("#state")).to_have_text("Live, 1 replica")
    return browser


def wait_for_looks(feed: FakeFeed) -> None:
    so_far = feed.num_sent
    wait_until(lambda: feed.num_sent > so_far + QUIET_LOOKS, 30, period_s=0.05)


def set_clock(page: Page, feed: FakeFeed, now_ms: float) -> None:
    page.evaluate("now => { performance.now = () => now; }", now_ms)
    wait_for_looks(feed)


def test_a_step_that_takes_several_looks_stays_on_the_board(page, feed):
    expect(page.locator(".columns")).to_have_text("No request is running.")
    set_clock(page, feed, 100_000)
    feed.send(look(1, 1), look(1))
    rows = page.locator(".column .row")
    expect(rows).to_have_count(1)
    set_clock(page, feed, 100_700)
    feed.send(look(2, 2), look(2))
    expect(rows).to_have_count(2)
    wait_for_looks(feed)
    figures = page.locator("dd").all_inner_texts()
    # Tokens a second are of the time since the step before, not since the last look.
    assert figures[0] == "3"
    assert figures[3:6] == ["50 %", "700.0 ms", "1"]
    # One that is over goes, after a while.
    set_clock(page, feed, 105_700)
    expect(page.locator(".columns")).to_have_text("No request is running.")
    assert page.locator("dd").all_inner_texts()[0] == "0"


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_board_that_refuses_says_so(status, browser, feed):
    feed.status = status
    browser.goto(f"{feed.url}/board")
    expect(browser.locator("#state")).to_contain_text("The board cannot be watched now")


def hide(page: Page, *, hidden: bool) -> None:
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden',"
        " { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def test_a_page_that_nobody_sees_watches_no_longer(page, feed):
    hide(page, hidden=True)
    wait_until(lambda: not feed.num_watchers, 30, period_s=0.05)
    expect(page.locator("#state")).to_have_text("Paused")
    hide(page, hidden=False)
    expect(page.locator("#state")).to_have_text("Live, 1 replica")
    page.locator("#pause").click()
    wait_until(lambda: not feed.num_watchers, 30, period_s=0.05)
    # Whoever paused it finds it so.
    hide(page, hidden=True)
    hide(page, hidden=False)
    expect(page.locator("#state")).to_have_text("Paused")
    page.locator("#pause").click()
    expect(page.locator("#state")).to_have_text("Live, 1 replica")
    assert feed.num_watchers == 1


def test_a_replica_whose_engine_hangs_says_so_beside_the_others(page, feed):
    silent = replica("b", error="The engine does not answer.")["replicas"]
    both = {"replicas": [*look(1, 1)["replicas"], *silent]}
    feed.send(both, {"replicas": [*look(1)["replicas"], *silent]})
    expect(page.locator("#state")).to_have_text("Live, 2 replicas")
    expect(page.locator(".columns").last).to_have_text("The engine does not answer.")
    expect(page.locator(".columns").first).to_contain_text("#1")
