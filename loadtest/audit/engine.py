"""One engine whose planner is exchanged between blocks of requests."""

from collections.abc import Mapping
from typing import Any, Final

from loadtest.engine.measurement import measure, subtract
from loadtest.engine.plan import Block
from loadtest.engine.worker import ArmEngine
from policies.audit.audited import AuditedPlanner
from policies.baselines import FixedPlanner

AUDITED: Final = "audited"
POLICY: Final = "policy"
HELD: Final = "held"
"""The policy with its audit, by itself, and nobody: depth 0 in the same engine."""


class AlternatingEngine(ArmEngine):
    """Runs blocks of requests under one planner or another.

    An audit is in charge of the steady part of its own blocks alone, which is what is
    measured: it sees what it is compared with, all of it, and nothing else.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine."""
        self._planners: dict[str, Any] = {}
        super().__init__(arguments)

    def _put_before(self, planner: Any) -> Any:
        """Keep a planner, and who may stand in its place."""
        self._planners = {AUDITED: planner, POLICY: planner, HELD: FixedPlanner(0)}
        if isinstance(planner, AuditedPlanner):
            self._planners[POLICY] = planner.inner
        return planner

    def run_as(self, mode: str, block: Block) -> dict[str, Any]:
        """Answer requests that come as fast as their places get free.

        Returns:
            Of the steady part seconds and output tokens; of an audit, steps and what
            `_count` counts in it, and what the audit reports after it.
        """
        audited: Any = self._planners.get(AUDITED)
        is_audited = mode == AUDITED and isinstance(audited, AuditedPlanner)
        found: dict[str, Any] = {}

        def on_mark(name: str) -> None:
            if name == "start" and is_audited:
                found["counts"] = _count(audited, block.concurrency)
                self._put_in_charge(AUDITED)
            elif name == "end" and is_audited:
                self._put_in_charge(POLICY)
                audited.pause()
                now = _count(audited, block.concurrency)
                found["counts"] = subtract(now, found["counts"])
                found["report"] = audited.report()

        self._put_in_charge(POLICY if is_audited else mode)
        steady = measure(self._answer(block, None, on_mark)[0])
        if is_audited:
            # The ledger knows of those alone that were timed.
            found["counts"]["steps"] = steady["num_steps"]
        found |= {"seconds": steady["window_s"], "num_tokens": steady["num_tokens"]}
        return found

    def forget(self) -> None:
        """Let an audit begin anew, after warming up; what is held back stays so."""
        own = self._planners[AUDITED]
        if isinstance(own, AuditedPlanner):
            anew = AuditedPlanner(own.inner, own.schedule, holding=own.holding)
            self._planners[AUDITED] = anew

    def _put_in_charge(self, mode: str) -> None:
        if self._planners:
            self._engine.wrap_planner(lambda _: self._planners[mode])


def _count(audited: AuditedPlanner, num_reqs: int) -> dict[str, float]:
    """Return how many steps drafted or were audited, and how many were held.

    And how many trials have ended at a load of so many requests.
    """
    loads = audited.ledger.total().values()
    return {
        "tried": sum(sums.num + sums.num_audited for sums in loads),
        "held": audited.holding.num_held,
        "trials": audited.holding.at(num_reqs).num_ended,
    }
