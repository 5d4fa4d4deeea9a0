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
as during an update, or one that is about to be handed to this replica too; `refused`:
what it has learnt cannot be true, or was learnt by other code."""


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
    """Say whose a state is, for `WarmStart` on another replica."""
    return {"planner_key": planner_key, "state": state}


class WarmStart:
    """What one new replica takes over from a running one.

    A policy that changed while its deployment ran reaches a new replica right after its
    start: then what the peer said is what it needs, and would be too late to ask for.
    """

    def __init__(
        self,
        peers: Peers,
        import_state: Callable[[dict[str, Any]], Awaitable[None]],
        timeout_s: float = WARM_START_TIMEOUT_S,
    ) -> None:
        """Take nothing yet.

        Args:
            peers: Whom to ask.
            import_state: Hands a state to this replica's planner; a ValueError refuses
                it.
            timeout_s: Longest time that all of it may take.
        """
        self._peers, self._import_state = peers, import_state
        self._timeout_s = timeout_s
        self._of_another_policy: dict[str, Any] | None = None

    async def begin(self, planner_key: str) -> Outcome:
        """Take over a peer's state if there is one to take over; never raises.

        Args:
            planner_key: Policy, models and device; a state of another key is not taken.

        Returns:
            What happened.
        """

        async def ask_and_take() -> Outcome:
            if await self._peers.count() == 0:
                return "no_peer"
            return await self._take(await self._peers.export_state(), planner_key)

        return await self._in_time(ask_and_take())

    async def go_on(self, planner_key: str) -> Outcome | None:
        """Take over what was of another policy at the start, if it is of this one.

        Args:
            planner_key: As in `begin`, after a change of policy.

        Returns:
            What happened; None if there is nothing of this policy.
        """
        package, self._of_another_policy = self._of_another_policy, None
        if package is None or package["planner_key"] != planner_key:
            return None
        return await self._in_time(self._take(package, planner_key))

    async def _in_time(self, taking: Awaitable[Outcome]) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await taking
        except Exception as error:
            logger.warning(
                "No warm start, step costs are learnt anew (%s: %s)",
                type(error).__name__,
                error,
            )
            return "failed"

    async def _take(self, package: dict[str, Any], planner_key: str) -> Outcome:
        if package["planner_key"] != planner_key:
            self._of_another_policy = package
            return "other_policy"
        if not package["state"]:
            return "nothing_learnt"
        try:
            await self._import_state(package["state"])
        except ValueError as error:
            logger.warning(
                "No warm start, a running replica's state is refused: %s", error
            )
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
