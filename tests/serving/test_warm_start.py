"""A new replica takes over what a running one has learnt, or starts on its own.

Real ones do so in test_failover.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine_args import planner_key_of
from tests.serving.test_settings import deployment_of

STATE = {"cost": 1}
REFUSED = {"cost": -1}


async def export(answer: Any) -> Any:
    """What a running replica answers, if it does."""
    from serving.replica.warm_start import package_state

    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        await asyncio.Event().wait()
    return package_state(*answer) if isinstance(answer, tuple) else answer


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (("ours", STATE), "warm"),
        (("ours", {}), "nothing_learnt"),
        (("old", STATE), "other_policy"),
        (("ours", REFUSED), "refused"),
        (ConnectionError("gone"), "failed"),
        ({"something": "else"}, "failed"),
        # Too busy to answer.
        (None, "failed"),
        (("ours", STATE), "no_peer"),
    ],
)
def test_without_a_fitting_state_the_replica_starts_on_its_own(answer, outcome):
    from serving.replica.warm_start import start_warm

    taken: list[dict[str, Any]] = []

    async def import_state(state: dict[str, Any]) -> None:
        if state == REFUSED:
            raise ValueError("calibration state has depth 3")
        taken.append(state)

    async def count() -> int:
        return int(outcome != "no_peer")

    peers: Any = SimpleNamespace(count=count, export_state=lambda: export(answer))
    found = asyncio.run(start_warm(peers, import_state, "ours", timeout_s=0.1))
    assert found == outcome
    assert taken == [STATE] * (found == "warm")


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
