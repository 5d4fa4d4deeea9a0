"""An update has fronts and engines of two builds at work (`fake_fleet`)."""

import dataclasses

import pytest

from serving.front import failover, failures
from serving.replica.kinship import Kin, may_take
from tests.front.fake_fleet import KIN, make_request, until

pytestmark = pytest.mark.anyio

LATER = dataclasses.replace(KIN, build=KIN.build + 1)
EARLIER = dataclasses.replace(KIN, build=KIN.build - 1)
ANOTHER = Kin("another model", KIN.build + 1)


@pytest.mark.parametrize(
    ("front", "num_prompt", "max_tokens", "emitted", "may"),
    [
        (KIN, 9, 30, [], True),  # It has looked at that itself.
        (ANOTHER, 1, 1, [], False),
        (EARLIER, 9, 1, [], True),
        (EARLIER, 10, 1, [], False),
        (EARLIER, 9, 30, [], True),  # Cut short: such is the new limit.
        (EARLIER, 8, 30, [1], True),
        (EARLIER, 8, 30, [1, 2], False),
        (LATER, 5, 5, [], True),
        (LATER, 5, 6, [], False),  # An engine of its own would not cut it short.
        (LATER, 5, 5, [1, 2], True),
    ],
)
def test_an_engine_takes_what_it_can_go_on_with(
    front: Kin, num_prompt: int, max_tokens: int, emitted: list[int], may: bool
) -> None:
    from serving.engine.shared.replay import EMITTED_TOKEN_IDS

    extra = {"extra_args": {EMITTED_TOKEN_IDS: emitted}} if emitted else {}
    request = make_request("a", [7] * num_prompt, max_tokens=max_tokens, **extra)
    assert may_take(KIN, 10, front, request) is may


async def test_streams_move_to_the_next_build_of_the_same_model(scene):
    before = scene.add_replica()
    requests = await scene.begin(3, max_tokens=200)
    after = scene.add_replica(kin=LATER)
    scene.fleet.replicas.remove(before)
    await before.close()
    await scene.check_all(requests)
    assert sorted(scene.replays) == 3 * ["connection closed"]
    assert len(after.taken) == 3
    # One by one, each looked at: no lease of another build's is kept.
    num_opened = len(scene.fleet.opened)
    await scene.check_all(await scene.send(1, "next "))
    await scene.check_all(await scene.send(1, "last "))
    assert len(scene.fleet.opened) == num_opened + 2


async def test_a_longer_request_waits_for_an_engine_of_its_own_build(scene):
    before = scene.add_replica(kin=EARLIER, max_model_len=20)
    (short,) = await scene.send(1, "short ", max_tokens=10)
    (long,) = await scene.send(1, "long ", max_tokens=30)
    await scene.check_all([short])
    after = scene.add_replica()
    await scene.check_all([long])
    assert [one.request_id for one in before.taken] == ["short 0"]
    assert len(after.taken) == 1


async def test_what_waits_for_a_model_that_was_replaced_is_told_so(scene, monkeypatch):
    monkeypatch.setattr(failover, "MAX_STRANGERS", 3)
    replica = scene.add_replica(kin=ANOTHER)
    await scene.send(2)
    await until(lambda: len(scene.failures) == 2)
    for error in scene.failures.values():
        assert str(error) == failures.REPLACED
    assert not replica.taken
    # While one of its own runs, it waits for that, whoever else refuses.
    own = scene.add_replica()
    scene.failures.clear()
    await scene.check_all(await scene.send(20, "next "))
    assert len(own.taken) == 20
