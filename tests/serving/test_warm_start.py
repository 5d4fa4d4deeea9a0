"""A new replica takes over what a running one has learnt, or starts on its own.

Real ones do so in test_failover.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.engine_args import planner_key_of
from tests.serving.test_settings import deployment_of

pytestmark = pytest.mark.anyio

STATE = {"cost": 1}
REFUSED = {"cost": -1}


class FakePeers:
    """Stands in for the running replicas of a deployment."""

    def __init__(self, answer: Any, num_running: int) -> None:
        self._answer, self._num_running = answer, num_running

    async def count(self) -> int:
        return self._num_running

    async def export_state(self) -> Any:
        from serving.replica.warm_start import package_state

        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        is_package = isinstance(self._answer, tuple)
        return package_state(*self._answer) if is_package else self._answer


@pytest.mark.parametrize(
    ("num_running", "answer", "outcome"),
    [
        (1, ("ours", STATE), "warm"),
        (1, ("ours", {}), "nothing_learnt"),
        (1, ("old", STATE), "other_policy"),
        (1, ("ours", REFUSED), "refused"),
        (1, ConnectionError("gone"), "failed"),
        (1, {"something": "else"}, "failed"),
        # A peer that is busy.
        (1, None, "failed"),
        (0, None, "no_peer"),
    ],
)
async def test_without_a_fitting_state_the_replica_starts_on_its_own(
    num_running, answer, outcome
):
    from serving.replica.warm_start import WarmStart

    taken: list[dict[str, Any]] = []

    async def import_state(state: dict[str, Any]) -> None:
        if state == REFUSED:
            raise ValueError("calibration state has depth 3")
        taken.append(state)

    start = WarmStart(FakePeers(answer, num_running), import_state, timeout_s=0.1)
    assert await start.begin("ours") == outcome
    assert taken == [STATE] * (outcome == "warm")


async def test_a_policy_that_changes_right_after_the_start_is_taken_over_warm():
    from serving.replica.warm_start import WarmStart

    taken: list[dict[str, Any]] = []

    async def start(peers_key: str, *changes: str) -> list[Any]:
        async def import_state(state: dict[str, Any]) -> None:
            taken.append(state)

        warm = WarmStart(FakePeers((peers_key, STATE), 1), import_state, timeout_s=1.0)
        return [await warm.begin("a"), *[await warm.go_on(key) for key in changes]]

    assert await start("a to b", "a to b") == ["other_policy", "warm"]
    # Once, for what it has learnt since then is its own.
    later = await start("a to b", "a to c", "a to b")
    assert later == ["other_policy", None, None]
    assert await start("a", "a to b", "a") == ["warm", None, None]
    assert taken == 2 * [STATE]


def test_replicas_share_only_what_was_learnt_about_the_same_work():
    def key(settings: str) -> str:
        return planner_key_of(deployment_of(settings))

    assert key("") == key("replicas.max=3")
    others = (
        "policy.name=dynamic",
        "policy.max_draft_tokens=5",
        "model.draft=org/other",
        "engine.dtype=float32",
    )
    assert len({key(""), *map(key, others)}) == 5
