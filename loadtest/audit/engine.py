"""One engine whose planner is exchanged between blocks of requests."""

from collections.abc import Mapping
from typing import Any, Final

from loadtest.engine.plan import Block
from loadtest.engine.worker import ArmEngine
from policies.audit.audited import AuditedPlanner
from policies.audit.ledger import Ledger
from policies.baselines import FixedPlanner

AUDITED: Final = "audited"
POLICY: Final = "policy"
HELD: Final = "held"
"""The policy with its audit, by itself, and nobody: depth 0 in the same engine."""


class AlternatingEngine(ArmEngine):
    """Runs blocks of requests under one planner or another.

    Each is told only of its own blocks, so that an audit sees what it is compared with.
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
            Seconds, output tokens, and what the planner reports.
        """
        if self._planners:
            self._engine.wrap_planner(lambda _: self._planners[mode])
        found = self.answer(block)
        return {
            "seconds": found["seconds"],
            "num_tokens": sum(found["num_tokens"]),
            "report": (self._engine.snapshot() or {}).get("planner", {}),
        }

    def forget(self) -> None:
        """Let an audit begin anew, after warming up."""
        audited = self._planners[AUDITED]
        if isinstance(audited, AuditedPlanner):
            audited.ledger, audited.num_unmatched = Ledger(), 0
