"""A new replica takes over what a running one has learnt, or starts on its own.

Real ones do so in test_failover.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.engine_args import planner_key_of
from serving.settings.model import parse_settings
from tests.serving.test_settings import minimal

pytestmark = pytest.mark.filterwarnings(
    # Ray warns about itself while it is imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


class FakePeers:
    """Stands in for the running replicas of a deployment."""

    def __init__(self, package: Any, num_running: int = 1) -> None:
        self._package, self._num_running = package, num_running

    async def count(self) -> int:
        return self._num_running

    async def export_state(self) -> Any:
        if isinstance(self._package, Exception):
            raise self._package
        if self._package is None:
            await asyncio.Event().wait()
        return self._package


def start(peers: FakePeers, refuses: bool = False) -> tuple[str, list[dict[str, Any]]]:
    from serving.replica.warm_start import start_warm

    taken: list[dict[str, Any]] = []

    async def import_state(state: dict[str, Any]) -> None:
        if refuses:
            raise ValueError("calibration state has depth 3")
        taken.append(state)

    return asyncio.run(start_warm(peers, import_state, "ours", timeout_s=0.2)), taken


def package(state: dict[str, Any], key: str = "ours") -> dict[str, Any]:
    from serving.replica.warm_start import package_state

    return package_state(key, state)


def test_what_a_running_replica_learnt_is_taken_over() -> None:
    assert start(FakePeers(package({"cost": 1}))) == ("warm", [{"cost": 1}])


@pytest.mark.parametrize(
    ("peers", "outcome"),
    [
        (FakePeers({"state": {"cost": 1}}, num_running=0), "no_peer"),
        (FakePeers({"planner_key": "ours", "state": {}}), "nothing_learnt"),
        (FakePeers({"planner_key": "old", "state": {"cost": 1}}), "other_policy"),
        (FakePeers(ConnectionError("gone")), "failed"),
        (FakePeers({"something": "else"}), "failed"),
        (FakePeers(None), "failed"),
    ],
    ids=["alone", "novice", "update", "dead peer", "nonsense", "busy peer"],
)
def test_without_a_fitting_state_the_replica_starts_on_its_own(
    peers: FakePeers, outcome: str
) -> None:
    assert start(peers) == (outcome, [])


def test_a_state_that_the_planner_refuses_is_a_cold_start_counted_as_such() -> None:
    assert start(FakePeers(package({"cost": 1})), refuses=True) == ("refused", [])


def test_replicas_share_only_what_was_learnt_about_the_same_work() -> None:
    def key(**sections: dict[str, Any]) -> str:
        return planner_key_of(parse_settings(minimal(**sections)))

    assert key() == key(replicas={"max": 3})
    others = [
        key(policy={"name": "dynamic"}),
        key(policy={"max_draft_tokens": 5}),
        key(model={"draft": "org/other"}),
        key(engine={"dtype": "float32"}),
    ]
    assert len({key(), *others}) == 5
