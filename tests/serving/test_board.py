"""The live board, from the recorder to the browser."""

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serving.front.board import MAX_WATCHERS, BoardFeed, TooManyWatchersError
from serving.replica.draft_texts import DraftTexts
from tests.pictures import open_browser, picture_path

pytestmark = pytest.mark.anyio

PATIENCE_S = 120
NUM_STREAMS = 6


def read(event: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return content


class Replica:
    """A stand-in for a replica's answers, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, int]] = []

    async def answer(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        self.asked.append(after)
        totals = {"steps": 10 * len(self.asked)}
        return [{"replica": "a", "steps": [], "totals": totals}]


async def test_all_watchers_share_one_question_and_nobody_asks_without_them():
    replica = Replica()
    feed = BoardFeed(replica.answer, period_s=0.01)
    watchers = [feed.watch() for _ in range(3)]
    for _ in range(4):
        events = await asyncio.gather(*map(anext, watchers))
        assert events[0] == events[1] == events[2]
    for watcher in watchers:
        await watcher.aclose()
    await asyncio.sleep(0.05)
    num_asked = len(replica.asked)
    await asyncio.sleep(0.05)
    assert len(replica.asked) == num_asked < 12
    assert replica.asked[:2] == [{}, {"a": 10}]


async def test_who_does_not_read_or_does_not_answer_holds_nobody_up():
    replica, num_failures = Replica(), 1

    async def ask(after: Mapping[str, int]) -> list[dict[str, Any]]:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise TimeoutError
        return await replica.answer(after)

    feed = BoardFeed(ask, period_s=0.001)
    slow, quick = feed.watch(), feed.watch()
    assert "error" in read(await anext(slow))
    seen = [read(await anext(quick)) for _ in range(31)]
    assert seen[-1]["replicas"][0]["totals"]["steps"] >= 300
    late = read(await anext(slow))
    assert late["replicas"][0]["totals"]["steps"] > 200


async def test_a_replica_whose_engine_is_silent_is_asked_for_what_is_new():
    asked: list[Mapping[str, int]] = []

    async def ask(after: Mapping[str, int]) -> list[dict[str, Any]]:
        asked.append(after)
        silent = {"replica": "a", "error": "The engine does not answer."}
        return [silent if len(asked) == 2 else {"replica": "a", "totals": {"steps": 7}}]

    watcher = BoardFeed(ask, period_s=0.001).watch()
    for _ in range(3):
        await anext(watcher)
    assert asked[:3] == [{}, {"a": 7}, {"a": 7}]


async def test_too_many_watchers_are_refused():
    feed = BoardFeed(Replica().answer)
    watchers = [feed.watch() for _ in range(MAX_WATCHERS)]
    await asyncio.gather(*map(anext, watchers))
    with pytest.raises(TooManyWatchersError):
        feed.watch()
    await watchers[0].aclose()
    await anext(feed.watch())


def test_no_token_is_decoded_twice():
    decoded: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids)
        return f"<{ids[0]}>"

    texts = DraftTexts(decode)
    for _ in range(100):
        steps = [{"requests": [{"draft_ids": [7, 8, 7]}, {"draft_ids": []}]}]
        texts.write(steps)
        shown = [{"draft_text": ["<7>", "<8>", "<7>"]}, {"draft_text": []}]
        assert steps == [{"requests": shown}]
    assert decoded == [[7], [8]]


@pytest.mark.ray
def test_the_board_streams_steps_with_drafts_but_never_prompts(server):
    steps: list[dict[str, Any]] = []
    url = f"{server.url}/board/events"
    with httpx.stream("GET", url, timeout=60, trust_env=False) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = (line for line in stream.iter_lines() if line)
        next(events)
        server.complete(prompt="Zebra", max_tokens=64, ignore_eos=True)
        # The first look may see no step with drafts, or no replica that answers.
        until_s = time.monotonic() + PATIENCE_S
        while not any(one["drafted"] for step in steps for one in step["requests"]):
            assert time.monotonic() < until_s
            for replica in read(next(events)).get("replicas", ()):
                steps += replica["steps"]
    for one in [one for step in steps for one in step["requests"]]:
        assert one["accepted"] <= one["admitted"] <= one["drafted"]
        # Nobody has forbidden it, and the server listens on a loopback address.
        assert len(one["draft_text"]) == len(one["survival"]) == one["drafted"]
        assert "draft_ids" not in one
        assert "Zebra" not in json.dumps(one)
    numbers = [step["step"] for step in steps]
    assert numbers == sorted(numbers)


@pytest.mark.ray
def test_a_browser_shows_the_drafts_of_running_requests(server, tmp_path):
    with open_browser() as page, ThreadPoolExecutor(NUM_STREAMS) as pool:
        response = page.goto(f"{server.url}/board")
        assert "default-src 'none'" in response.headers["content-security-policy"]
        # A function polled in the page would be refused as evaluated text.
        page.wait_for_selector("#state:text-matches('^Live')")
        for _ in range(NUM_STREAMS):
            pool.submit(server.complete, max_tokens=500, ignore_eos=True)
        page.wait_for_selector(".column .block.admitted")
        figures = page.evaluate(
            # Other replicas of the deployment stand idle beside it.
            "[...document.querySelector('.column').closest('section')"
            ".querySelectorAll('dd')].map(d => d.textContent)"
        )
        assert len(figures) == 8
        assert int(figures[5]) >= 1
        picture = picture_path("board.png", tmp_path)
        assert page.screenshot(path=picture).startswith(b"\x89PNG")
        page.evaluate("document.getElementById('pause').click()")
        assert page.text_content("#state") == "Paused"
