"""What a front lets in, and in which order, by what made-up replicas say."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from serving.engine.compat import GracefulHTTPError
from serving.front.app import Front, build_api
from serving.front.grammar_time import GrammarTime
from serving.front.request_class import ClassShare
from tests.front.fake_fleet import Scene, make_request, until

pytestmark = pytest.mark.anyio

NUM_SEATS = 2
STEP_MS = 10.0
NUM_PLACES = 60


class Busy:
    """A front whose only replica is full and stands still until it is let go."""

    def __init__(self, scene: Scene, num_seats: int, **options: Any) -> None:
        self.scene, self.replica = scene, scene.add_replica(num_seats=num_seats)
        scene.replace_client(b"busy", **options)
        self.client = scene.client
        self.refusals: Counter[str] = Counter()
        self.client.admission.on_refusal = lambda one: self.refusals.update([one])

    async def stand_still(self) -> None:
        """Answer one request, and then no more."""
        await self.send("first")
        await until(lambda: "first" in self.scene.reasons)
        self.replica.is_held = True

    async def send(self, name: str, of: str = "", **xargs: Any) -> None:
        args = {**({"request_class": of} if of else {}), **xargs}
        await self.client.add_request_async(make_request(name, extra_args=args))

    async def send_all(self, count: int, name: str, of: str = "") -> None:
        for n in range(count):
            await self.send(f"{name} {n}", of)

    def taken(self) -> list[str]:
        return [one.request_id for one in self.replica.taken]

    async def go_on(self, count: int) -> list[str]:
        """Let the replica go on, and return the order in which it took so many."""
        self.replica.is_held = False
        await until(lambda: len(self.taken()) == count)
        return self.taken()


@pytest.fixture
async def busy(scene: Scene) -> Busy:
    hasty = ClassShare(deadline_ms=100.0, priority=5)
    busy = Busy(
        scene,
        NUM_SEATS,
        classes={"flood": ClassShare(), "other": ClassShare(), "hasty": hasty},
        max_requests=lambda _: NUM_PLACES,
    )
    busy.replica.costs = {"base_ms": STEP_MS, "request_ms": 1e-3}
    busy.replica.costs["prompt_token_ms"] = 1e-3
    await busy.stand_still()
    await busy.send_all(5, "runs")
    # One seat more than the engine has, so that a request is there in time.
    await until(lambda: len(busy.taken()) == 1 + NUM_SEATS + 1)
    return busy


async def test_a_flood_of_one_class_does_not_keep_another_waiting(busy):
    await busy.send_all(20, "flood", "flood")
    await busy.send_all(5, "other", "other")
    assert busy.client.count_waiting() == {"default": 2, "flood": 20, "other": 5}
    order = await busy.go_on(1 + 5 + 25)
    # Each of the other's goes after one of the flood's and of those before, or two.
    assert order.index("other 4") <= 1 + 5 + 2 * 5 + 2
    assert not busy.refusals


async def test_who_asks_for_little_goes_before_a_flood(busy):
    """The first of the other's is next, though twenty of the flood wait."""
    await busy.send_all(20, "flood", "flood")
    await busy.send_all(2, "other", "other")
    order = await busy.go_on(1 + 5 + 22)
    # Its share is less than one of two seats, so that the second waits for its turn.
    assert order.index("other 0") <= 1 + 3 + 2
    assert order.index("other 1") > order.index("other 0") + 1


async def test_a_flood_leaves_seats_to_others(scene):
    """Of 32 seats two are kept, and the spare ones, once others have asked."""
    busy = Busy(scene, 32, classes={"flood": ClassShare()})
    running = busy.replica.running
    await busy.stand_still()
    await busy.send_all(50, "flood", "flood")
    await until(lambda: len(running) == 30)
    await busy.send_all(2, "other")
    await until(lambda: len(running) == 32)
    assert {"other 0", "other 1"} <= running.keys()
    assert busy.client.count_waiting() == {"flood": 20}


async def test_a_flood_leaves_places_for_others(busy):
    with contextlib.suppress(GracefulHTTPError):
        await busy.send_all(50, "flood", "flood")
    with pytest.raises(GracefulHTTPError, match="for this class") as refusal:
        await busy.send("one more", "flood")
    assert refusal.value.http_status == 503
    await busy.send("other", "other")
    assert busy.refusals.keys() == {"flow_full"}


async def test_fronts_share_the_places_there_are(busy):
    other = busy.scene.make_client(b"another front")
    await other.add_request_async(make_request("there"))
    await until(lambda: busy.client.admission.num_fronts == 2)
    with contextlib.suppress(GracefulHTTPError):
        await busy.send_all(NUM_PLACES, "r")
    assert busy.client.admission._places.num_taken <= NUM_PLACES // 2
    other.shutdown()


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(busy):
    """Thirty tokens take 300 ms, and a seat must become free before."""
    with pytest.raises(GracefulHTTPError, match="deadline_ms of 200") as refusal:
        await busy.send("late", deadline_ms=200.0)
    assert refusal.value.http_status == 429
    with pytest.raises(GracefulHTTPError, match="deadline_ms of 100"):
        await busy.send("its class's", "hasty")
    await busy.send("its own", "hasty", deadline_ms=60_000.0)
    assert busy.refusals == {"deadline": 2}
    assert busy.client.count_waiting() == {"default": 2, "hasty": 1}


async def test_a_deadline_that_passes_in_the_queue_frees_the_place(busy):
    """What it was let in by did not foresee that the replica would stand still."""
    await busy.send("waits", deadline_ms=2_500.0)
    busy.client.fail_overdue()
    assert not busy.scene.failures

    def has_failed() -> bool:
        busy.client.fail_overdue()
        return "waits" in busy.scene.failures

    await until(has_failed)
    failure = busy.scene.failures["waits"]
    assert isinstance(failure, GracefulHTTPError)
    assert failure.http_status == 429
    assert busy.refusals == {"expired": 1}
    assert busy.client.count_waiting() == {"default": 2}


async def test_who_leaves_frees_place_and_seat_at_once(busy):
    taken = busy.client.admission._places
    await busy.send("waits")
    assert taken.num_taken == 6
    assert busy.client.count_waiting() == {"default": 3}
    await busy.client.abort_requests_async(["waits"])
    assert busy.client.count_waiting() == {"default": 2}
    await busy.client.abort_requests_async(["runs 0"])
    # Its seat goes to the next without any step of the engine's.
    await until(lambda: "runs 3" in busy.taken())
    assert "runs 0" not in busy.replica.running
    assert taken.num_taken == 4
    busy.replica.is_held = False
    await until(lambda: not taken.num_taken)


class Handlers:
    """As vLLM's: a refusal is raised, or is how a stream begins."""

    create_error_response = staticmethod(create_error_response)

    def __init__(self, busy: Busy) -> None:
        self._busy = busy
        self._num_asked = 0

    async def create_completion(self, body: Any, raw_request: Any) -> Any:
        return self._stream(body) if body.stream else await self._answer(body)

    async def _answer(self, body: Any) -> CompletionResponse:
        self._num_asked += 1
        name = f"asked {self._num_asked}"
        scene = self._busy.scene
        try:
            await self._busy.send(name, **(body.vllm_xargs or {}))
            await until(lambda: name in scene.reasons)
        except asyncio.CancelledError:
            await self._busy.client.abort_requests_async([name])
            raise
        usage = {"prompt_tokens": 2, "total_tokens": 32, "completion_tokens": 30}
        return CompletionResponse(model="m", choices=[], usage=usage)

    async def _stream(self, body: Any) -> AsyncIterator[str]:
        try:
            answer = (await self._answer(body)).model_dump_json()
        except GracefulHTTPError as error:
            answer = json.dumps(create_error_response(error).model_dump())
        yield f"data: {answer}\n\n"


@pytest.fixture
async def http(busy: Busy) -> AsyncIterator[httpx.AsyncClient]:
    """The front's own web application over the busy client."""
    front = Front.__new__(Front)
    front._model_card, front._policy_name, front._classes = {"id": "m"}, "none", {}
    front._grammars = GrammarTime(str)
    front._state = SimpleNamespace(openai_serving_completion=Handlers(busy))
    api = build_api(max_body_bytes=1 << 20)
    api.post("/v1/completions")(front.completions)
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as client:
        yield client


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "p", **fields}
    return await http.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["body", "xargs"])
async def test_a_refused_client_is_told_when_to_come_back(busy, http, stream, where):
    await busy.send_all(30, "before")
    late = {"deadline_ms": 1_000}
    fields = late if where == "body" else {"vllm_xargs": late}
    refusal = await ask(http, stream=stream, **fields)
    assert refusal.status_code == 429
    # After 32 and itself, each half of 334 ms, it waits for 5.5 s, and may wait for a
    # quarter of the 666 ms that it does not need itself.
    assert refusal.headers["Retry-After"] == "6"
    assert refusal.json()["error"]["type"] == "RateLimitError"
    busy.replica.is_held = False
    assert (await ask(http, stream=stream, deadline_ms=60_000)).status_code == 200


@pytest.mark.parametrize("deadline_ms", ["soon", 0, -5, True])
async def test_a_deadline_that_is_none_is_the_clients_mistake(http, deadline_ms):
    refusal = await ask(http, deadline_ms=deadline_ms)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == "deadline_ms"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(busy, http, stream):
    asking = asyncio.create_task(ask(http, stream=stream))
    await until(lambda: busy.client.count_waiting() == {"default": 3})
    asking.cancel()
    await until(lambda: busy.client.count_waiting() == {"default": 2})
