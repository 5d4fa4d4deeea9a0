"""Serve's request router for leases: it goes where the front wants it to go.

The front decides (`serving.front.routing`), for it hears of every step of every engine.
Serve still holds the limits, retries, and notices of death.
"""

from __future__ import annotations

import random
from typing import Any, Final

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.front import running_replicas

WANTED: Final = "wanted"
"""The keyword under which a call names its replica."""


class LeaseRouter(RequestRouter):
    """Tries the replica that a call names, then two at random, as Serve's own does.

    Matches requests and replicas one to one: Serve's own lets whichever call came first
    have the replica that was found for a later one.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of who runs."""
        super().update_replicas(replicas)
        running_replicas.note_running(one.replica_id.unique_id for one in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas; Serve takes the shortest queue within one."""
        num_sampled = min(2, len(candidate_replicas))
        ranks = [random.sample(candidate_replicas, num_sampled)]
        kwargs: dict[str, Any] = pending_request.kwargs if pending_request else {}
        if wanted := kwargs.get(WANTED):
            named = [
                one for one in candidate_replicas if one.replica_id.unique_id == wanted
            ]
            ranks.insert(0, named)
        return ranks
