"""A front that lost a link and opens another; engines are made up (`fake_fleet`)."""

import asyncio

import pytest

from serving.replica.token_channel import HELLO
from tests.front.fake_fleet import until

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

LATE_S = 0.02
"""Some steps of the made-up engine."""


def cut_unnoticed(replica, monkeypatch) -> None:
    """Let what the replica sends vanish, as on a broken network, until a new link.

    Its actor is busy too: it learns of a new link and begins a request some steps late.
    """
    relay, leases = replica.relay, replica.leases
    send, hold = relay._send, leases.hold
    is_cut = True

    def send_or_lose(front, frames):
        if is_cut:
            relay._fronts[front].num_messages += 1
        else:
            send(front, frames)

    def hear_late(front, kind, payload):
        nonlocal is_cut
        loop.call_soon_threadsafe(
            loop.call_later, LATE_S, leases.hear, front, kind, payload
        )
        is_cut = is_cut and kind != HELLO

    async def hold_late(*args, **options):
        await asyncio.sleep(LATE_S)
        async for event in hold(*args, **options):
            await asyncio.sleep(LATE_S)
            yield event

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(relay, "_send", send_or_lose)
    monkeypatch.setattr(relay, "_on_message", hear_late)
    monkeypatch.setattr(leases, "hold", hold_late)


async def test_no_token_is_missing_where_a_lease_began_over_the_link_before(
    scene, monkeypatch
):
    replica = scene.add_replica()
    requests = await scene.begin(3, max_tokens=100)
    cut_unnoticed(replica, monkeypatch)
    (link,) = scene.client._links
    link.close("silence")
    await scene.check_all(requests)
    await until(lambda: not replica.leases.num_running)
