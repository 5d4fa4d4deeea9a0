"""What a replica's leases do when links break; the engine is made up (`fake_fleet`)."""

import pytest

from serving.front.in_flight import MAX_SHARED_DEATHS, InFlight
from tests.front.fake_fleet import make_request, until

pytestmark = pytest.mark.anyio


async def test_a_lone_request_is_given_up_when_its_link_breaks_while_it_waits(scene):
    """Its slot may be another's by then, and nobody would hear that it has ended."""
    replica = scene.add_replica()
    other = scene.make_client(b"another")
    await other.add_request_async(make_request("keeps it waiting", max_tokens=100))
    await until(lambda: replica.running)
    replica.is_held = True
    suspect = make_request("suspect", (3, 7))
    one = InFlight(suspect, num_deaths=MAX_SHARED_DEATHS)
    scene.client.admission.admit(one, scene.client._queue)
    scene.client._requests.add(one)
    scene.client._enqueue(one)
    await until(lambda: replica.leases._lone)
    (link,) = scene.client._links
    link.close("gap")
    await until(lambda: b"a front" not in replica.leases._seats)
    replica.is_held = False
    await scene.check_all([suspect])
    await until(lambda: replica.leases._lone is None)
    assert not replica.leases.num_running
