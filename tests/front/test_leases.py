"""A replica's seats for fronts, whose word comes when it comes."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from serving.engine.compat import MsgpackEncoder
from serving.replica.leases import ACCEPTED, OFFER, Leases
from serving.replica.token_channel import GOODBYE, HELLO
from tests.front.fake_fleet import KIN, WAIT_S, make_request, until

pytestmark = pytest.mark.anyio

FRONT = b"a front that only the replica knows"


@pytest.fixture
async def leases(scene) -> Leases:
    return scene.add_replica().leases


async def hold_one(leases: Leases) -> AsyncGenerator[tuple[str, bytes], None]:
    frames = MsgpackEncoder().encode(make_request("one"))
    holding = leases.hold(FRONT, KIN, frames, alone=False)
    assert (await anext(holding))[0] == OFFER
    return holding


async def test_a_seat_is_kept_for_a_front_that_has_said_goodbye_and_comes_again(leases):
    """Its link broke, and its next request was here before it was connected again."""
    flushed = asyncio.Event()
    leases._flush = flushed.wait
    leases.hear(FRONT, HELLO, b"")
    leases.hear(FRONT, GOODBYE, b"")
    holding = await hold_one(leases)
    accepted = asyncio.ensure_future(anext(holding))
    flushed.set()
    await asyncio.wait(leases._leaving)
    leases.hear(FRONT, HELLO, b"")
    assert (await asyncio.wait_for(accepted, WAIT_S))[0] == ACCEPTED
    await holding.aclose()


async def test_a_front_that_never_connects_leaves_no_seat_taken(leases):
    """Its client has left while it was invited."""
    holding = await hold_one(leases)
    assert leases._seats.find(FRONT)
    await holding.aclose()
    await until(lambda: leases._seats.find(FRONT) is None)
