"""What a front lets in, and in which order, by what made-up replicas say."""

import contextlib
from collections import Counter
from typing import Any

import pytest

from serving.engine.compat import GracefulHTTPError
from serving.front import admission, refusal
from serving.front.in_flight import InFlight, Standing
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
    """The first of the other's is next, though twenty of the flood wait."""
    await busy.send_all(20, "flood", "flood")
    await busy.send_all(5, "other", "other")
    assert busy.client.count_waiting() == {"default": 2, "flood": 20, "other": 5}
    order = await busy.go_on(1 + 5 + 25)
    assert order.index("other 0") <= 1 + 3 + 2
    # Its share is less than one of two seats, so that the second waits for its turn.
    assert order.index("other 1") > order.index("other 0") + 1
    # Each of the other's goes after one of the flood's and of those before, or two.
    assert order.index("other 4") <= 1 + 5 + 2 * 5 + 2
    assert not busy.refusals


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


async def test_a_deadline_is_judged_though_the_last_replica_has_just_died(
    busy, monkeypatch
):
    """What replicas said is known for a moment longer than they are connected."""
    monkeypatch.setattr(admission, "LOOK_AGAIN_S", 60.0)
    busy.replica.die()
    await until(lambda: not busy.client.num_links)
    await busy.send("waits", deadline_ms=60_000.0)
    assert not busy.refusals


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


async def test_a_request_for_two_answers_has_begun_with_the_first_of_them(busy):
    """A client that reads one of them is not cut off because the other waits."""
    streams, waits, another = (
        InFlight(make_request(name), standing=Standing(due_s=0.0))
        for name in ("0_both", "1_both", "1_others")
    )
    streams.emitted.append(1)
    # Clients may give several requests one name.
    streams.request.external_req_id = another.request.external_req_id = "name"
    expire = busy.client.admission.expire
    assert expire([streams, waits, another]) == [another]
    assert busy.refusals == {"expired": 1}
    # The first may be whole before the other begins, and between two looks.
    busy.client.admission._places.take(streams.standing.turn.flow)
    busy.client.admission.note_gone(streams, [waits, another])
    assert expire([waits, another]) == [another]


async def test_a_completion_of_two_prompts_has_begun_with_the_first_of_them(busy):
    begun, waits, another = (
        InFlight(make_request(name), standing=Standing(due_s=0.0))
        for name in ("cmpl-x-0-f00", "0_cmpl-x-1-ba5", "cmpl-y-0-f00")
    )
    for one, name in ((begun, "x-0"), (waits, "x-1"), (another, "y-0")):
        one.request.external_req_id = f"cmpl-{name}"
    begun.emitted.append(1)
    assert busy.client.admission.expire([begun, waits, another]) == [another]


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": ["a"], "_bad_words_token_ids": [[1] * 1025]},
        {"_all_stop_token_ids": set(range(129)), "min_tokens": 1},
        # As the second answer of a request for two gets it.
        {"seed": 2**63},
    ],
    ids=lambda params: next(iter(params)).strip("_"),
)
async def test_what_kills_an_engine_on_a_gpu_never_gets_there(busy, params):
    """The runner that vLLM has for them raises on it within a step."""
    request = make_request("deadly")
    for name, value in params.items():
        setattr(request.sampling_params, name, value)
    with pytest.raises(GracefulHTTPError, match="must be at most") as refused:
        await busy.client.add_request_async(request)
    assert refused.value.http_status == 400
    assert busy.client.admission._places.num_taken == 5


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


async def test_a_refused_client_is_told_when_to_come_back(busy):
    """How HTTP says so is in helm/test_live."""
    noted: list[int] = []
    refusal._retry_after_s.set(noted)
    await busy.send_all(30, "before")
    with pytest.raises(GracefulHTTPError, match="deadline_ms of 1000"):
        await busy.send("late", deadline_ms=1_000.0)
    # After 32 and itself, each half of 334 ms, it waits for 5.5 s, and may wait for a
    # quarter of the 666 ms that it does not need itself.
    assert noted == [6]
