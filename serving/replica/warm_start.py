"""A new replica starts from what a running one has learnt.

The newcomer asks some running replica of its own deployment for its planner's state.
Whatever goes wrong, it starts from its own profile instead, as the first replica does;
what happened is counted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from ray import serve
from ray.serve import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("ray.serve")

WARM_START_TIMEOUT_S: Final = 5.0
"""A newcomer is needed soon; a peer that takes longer has no time for it."""

Outcome = Literal[
    "warm", "no_peer", "nothing_learnt", "other_policy", "refused", "failed"
]
"""`no_peer`: no replica is running yet; `other_policy`: it runs another policy or pair,
as during an update; `refused`: what it has learnt cannot be true, or was learnt by
other code."""


class Peers(Protocol):
    """The running replicas of a deployment."""

    async def count(self) -> int:
        """Return how many there are."""
        ...

    async def export_state(self) -> dict[str, Any]:
        """Return what `package_state` made on one of them."""
        ...


class ServePeers:
    """The running replicas of the deployment this process belongs to."""

    def __init__(self) -> None:
        """Find out which deployment that is."""
        context = serve.get_replica_context()
        self._app, self._deployment = context.app_name, context.deployment

    async def count(self) -> int:
        """Return how many replicas Serve calls running; this one is not among them."""
        return await asyncio.to_thread(self._count)

    async def export_state(self) -> dict[str, Any]:
        """Ask whichever replica Serve's router picks."""
        handle = serve.get_deployment_handle(self._deployment, self._app)
        state: dict[str, Any] = await handle.export_planner_state.remote()
        return state

    def _count(self) -> int:
        application = serve.status().applications.get(self._app)
        if application is None or self._deployment not in application.deployments:
            return 0
        states = application.deployments[self._deployment].replica_states
        return int(states.get("RUNNING", 0))


def package_state(planner_key: str, state: dict[str, Any]) -> dict[str, Any]:
    """Say whose a state is, for `start_warm` on another replica."""
    return {"planner_key": planner_key, "state": state}


async def start_warm(
    peers: Peers,
    import_state: Callable[[dict[str, Any]], Awaitable[None]],
    planner_key: str,
    timeout_s: float = WARM_START_TIMEOUT_S,
) -> Outcome:
    """Take over a peer's state if there is one to take over; never raises.

    Args:
        peers: Whom to ask.
        import_state: Hands a state to this replica's planner; a ValueError refuses it.
        planner_key: Policy, models and device; a state of another key is not taken.
        timeout_s: Longest time that all of it may take.

    Returns:
        What happened.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if await peers.count() == 0:
                return "no_peer"
            package = await peers.export_state()
            if package["planner_key"] != planner_key:
                return "other_policy"
            if not package["state"]:
                return "nothing_learnt"
            return await _hand_over(package["state"], import_state)
    except Exception as error:
        logger.warning(
            "No warm start, step costs are learnt anew (%s: %s)",
            type(error).__name__,
            error,
        )
        return "failed"


async def _hand_over(
    state: dict[str, Any], import_state: Callable[[dict[str, Any]], Awaitable[None]]
) -> Outcome:
    try:
        await import_state(state)
    except ValueError as error:
        logger.warning("No warm start, a running replica's state is refused: %s", error)
        return "refused"
    return "warm"


def count_warm_start(policy: str, outcome: Outcome) -> None:
    """Export what came of it, in the replica's process."""
    counter = metrics.Counter(
        "tetris_warm_starts_total",
        "Starts of a replica, by what it could take over from a running one.",
        ("policy", "outcome"),
    )
    counter.inc(1, {"policy": policy, "outcome": outcome})
