"""What speculation gains, in words, once a minute in the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger

from policies.audit.gain import MIN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What is below `vllm` is written from INFO on; all else from WARNING on.
logger = init_logger(f"vllm.{__name__}")

PERIOD_S: Final = 60.0


class AuditLog:
    """Says it while somebody takes snapshots, and only if there is something new."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Say nothing in the first minute; `clock` gives seconds."""
        self._clock = clock
        self._said_s = clock()
        self._said = ""

    def say(self, report: Mapping[str, float]) -> None:
        """Log what a planner's report says of its gain, if it is time."""
        if self._clock() - self._said_s < PERIOD_S or "audit_cost_share" not in report:
            return
        self._said_s = self._clock()
        line = describe(report)
        if line != self._said:
            logger.info(line)
            self._said = line


def describe(report: Mapping[str, float]) -> str:
    """Return what an audited planner's report says, as a sentence."""
    over = [
        _describe_gain(report, "none", "no speculation"),
        _describe_gain(report, "best_fixed", "the best fixed length"),
    ]
    held = "; held back, for it lost" if report["speculation_held"] else ""
    return (
        f"Speculation: {', '.join(filter(None, over))}{held} (audited "
        f"{report['audited_step_share']:.1%} of the steps of the last hour, at a cost "
        f"of {report['audit_cost_share']:.2%} of the time)"
    )


def _describe_gain(report: Mapping[str, float], arm: str, other: str) -> str:
    name = f"speculation_gain_{arm}"
    if name in report:
        lower, upper = report[f"{name}_lower"], report[f"{name}_upper"]
        gain = f"{report[name]:.2f} ({lower:.2f} to {upper:.2f})"
        return f"{gain} times the tokens of {other}"
    num_blocks = report[f"num_audited_{arm}"]
    if arm != "none" and not num_blocks:
        return ""
    return f"cannot tell yet against {other}: {num_blocks:.0f} of {MIN_BLOCKS} blocks"
