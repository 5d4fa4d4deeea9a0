"""Prometheus metrics of speculation, recorded in the replica's process.

The engine core runs in a process of its own, whose metrics Ray does not export. Its
counters arrive as snapshots of cumulative figures; here their growth becomes Ray
metrics, which the node's metrics agent exports with a `ray_` prefix and the labels
`application`, `deployment` and `replica`.

Useful ratios (PromQL, over any window):
    acceptance rate       rate(accepted) / rate(verified)
    share verified        rate(verified) / rate(proposed)
    budget use            rate(verified) / rate(budget_tokens)
    selection time        rate(selection_seconds) / rate(selections)
    planning time         rate(planning_seconds) / rate(engine_steps)
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from ray.serve import metrics

logger = logging.getLogger("ray.serve")

SNAPSHOT_PERIOD_S: Final = 1.0
_SNAPSHOT_TIMEOUT_S: Final = 5.0

_COUNTERS: Final = {
    "num_steps": ("tetris_engine_steps_total", "Engine steps."),
    "num_drafts": ("tetris_drafts_total", "Drafts verified, one per request and step."),
    "num_proposed_tokens": (
        "tetris_draft_tokens_proposed_total",
        "Draft tokens the drafter proposed.",
    ),
    "num_verified_tokens": (
        "tetris_draft_tokens_verified_total",
        "Draft tokens the target model verified.",
    ),
    "num_accepted_tokens": (
        "tetris_draft_tokens_accepted_total",
        "Draft tokens the target model accepted.",
    ),
    "num_expected_accepted": (
        "tetris_draft_tokens_expected_accepted_total",
        "Draft tokens the policy expected the target to accept.",
    ),
    "draft_budget_total": (
        "tetris_draft_budget_tokens_total",
        "Draft tokens that could have been verified, summed over steps.",
    ),
    "num_selections": ("tetris_selections_total", "Selections of draft tokens."),
    "selection_seconds_total": (
        "tetris_selection_seconds_total",
        "Time spent selecting draft tokens, in seconds.",
    ),
    "planning_seconds_total": (
        "tetris_planning_seconds_total",
        "Time that all planning took of the engine's steps, in seconds.",
    ),
    "num_aged_requests": (
        "tetris_aged_requests_total",
        "Requests that became as urgent as any by waiting.",
    ),
}
_PLANNER_COUNTERS: Final = {
    "num_dropped_timings": (
        "tetris_dropped_timings_total",
        "Step timings that no working clock gives; nothing was learnt from them.",
    ),
    "num_cost_resets": (
        "tetris_cost_resets_total",
        "Learnt prices that lost all sense and were dropped for the start-up profile.",
    ),
}
"""Counted by policies that learn, and part of their report."""
_COUNTERS_BY_POSITION: Final = {
    "num_verified_tokens_per_pos": (
        "tetris_draft_tokens_verified_by_position_total",
        "Draft tokens verified, by position in the draft (from 0).",
    ),
    "num_accepted_tokens_per_pos": (
        "tetris_draft_tokens_accepted_by_position_total",
        "Draft tokens accepted, by position in the draft (from 0).",
    ),
}
_COUNTERS_BY_REASON: Final = {
    "num_fallbacks": (
        "tetris_fallbacks_total",
        "Parts of steps that failed, or no policy decided; vLLM went on without.",
    ),
    "num_cut_tokens": (
        "tetris_draft_tokens_cut_total",
        "Draft tokens not verified, by reason; those of `depth` were not proposed.",
    ),
    "num_quarantines": (
        "tetris_quarantines_total",
        "Times that acceptance collapsed so that drafts were left out, by where.",
    ),
}
_GAUGES: Final = {
    "last_draft_budget": ("tetris_draft_budget", "Budget of the latest step, tokens."),
    "draft_depth": ("tetris_draft_depth", "Draft tokens per request now drafted."),
    "num_running": ("tetris_running_requests", "Requests in the engine's batch."),
    "num_waiting": ("tetris_waiting_requests", "Requests the engine lets wait."),
    "kv_cache_usage": ("tetris_kv_cache_usage_ratio", "KV blocks held by requests."),
}
_PLANNER_GAUGES: Final = {
    "expected_goodput_per_s": (
        "tetris_expected_goodput_tokens_per_second",
        "Goodput the policy expects at the present load.",
        1.0,
    ),
    "calibration_error": (
        "tetris_calibration_error_ratio",
        "Expected calibration error of predicted acceptance.",
        1.0,
    ),
    "step_time_error": (
        "tetris_step_time_error_ratio",
        "Recent mean relative error of predicted step times.",
        1.0,
    ),
    "predicted_step_ms": (
        "tetris_predicted_step_seconds",
        "Predicted time of the latest step.",
        1e-3,
    ),
    "measured_step_ms": (
        "tetris_measured_step_seconds",
        "Measured time of the latest step.",
        1e-3,
    ),
    "audited_step_share": (
        "tetris_audited_steps_ratio",
        "Share of the last hour's steps that audits took.",
        1.0,
    ),
    "audit_cost_share": (
        "tetris_audit_cost_ratio",
        "Share of the last hour's time that audits cost.",
        1.0,
    ),
    "speculation_held": (
        "tetris_speculation_held",
        "Whether speculation is held back because it lost: 1 or 0.",
        1.0,
    ),
    "warm_depth0_ms": (
        "tetris_warm_depth0_cost_seconds",
        "Predicted cost per step of a drafter that drafts nothing but runs along.",
        1e-3,
    ),
}
"""What policies that learn report about themselves, and the factor to base units."""

_GAINS: Final = {
    "": ("tetris_speculation_gain_ratio", "Times the tokens per second of `over`."),
    "_lower": (
        "tetris_speculation_gain_lower_ratio",
        "Lower end of its 95 % interval.",
    ),
    "_upper": (
        "tetris_speculation_gain_upper_ratio",
        "Upper end of its 95 % interval.",
    ),
}
"""What an audit finds out, by the end of its name in the report; none where it cannot
tell yet."""
_OVER: Final = ("none", "best_fixed")

CAPACITY_PERIOD_S: Final = 5.0

_SNAPSHOT_FAILURES: Final = "tetris_snapshot_failures_total"


def growth(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, float | list[float] | dict[str, float]]:
    """Tell how far cumulative figures have grown between two snapshots.

    An engine that was restarted counts from zero again: `num_steps` falls, and then
    all of `after` is growth. Figures missing from `before` start at zero too.

    Args:
        before: The earlier snapshot; empty for none.
        after: The later snapshot.

    Returns:
        For each counter in `after`: the growth, as a number, a list by position or a
        mapping by reason, as the snapshot has it. Never negative.
    """
    if after.get("num_steps", 0) < before.get("num_steps", 0):
        before = {}
    grown: dict[str, float | list[float] | dict[str, float]] = {}
    for name in _COUNTERS:
        if name in after:
            grown[name] = max(0, after[name] - before.get(name, 0))
    reported, reported_before = after.get("planner", {}), before.get("planner", {})
    for name in _PLANNER_COUNTERS:
        if name in reported:
            grown[name] = max(0, reported[name] - reported_before.get(name, 0))
    for name in _COUNTERS_BY_POSITION:
        now, then = after.get(name, []), before.get(name, [])
        then = [*then, *[0] * (len(now) - len(then))]
        grown[name] = [max(0, n - t) for n, t in zip(now, then, strict=False)]
    for name in _COUNTERS_BY_REASON:
        then = before.get(name, {})
        grown[name] = {
            reason: max(0, value - then.get(reason, 0))
            for reason, value in after.get(name, {}).items()
        }
    return grown


class SnapshotRecorder(Protocol):
    """What snapshots are handed to."""

    def record(self, snapshot: Mapping[str, Any], /) -> None:
        """Take over a snapshot."""

    def record_failure(self) -> None:
        """Count a snapshot that failed or came too late."""


async def poll_snapshots(
    take_snapshot: Callable[[], Awaitable[Mapping[str, Any]]],
    recorder: SnapshotRecorder,
    period_s: float = SNAPSHOT_PERIOD_S,
) -> None:
    """Take and record snapshots until cancelled; no failure stops it.

    A failure is counted every time and logged once, until a snapshot comes through
    again.

    Args:
        take_snapshot: Fetches the engine's cumulative figures.
        recorder: Where they go.
        period_s: Seconds between two snapshots.
    """
    failing = False
    while True:
        await asyncio.sleep(period_s)
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                snapshot = await take_snapshot()
            recorder.record(snapshot)
            failing = False
        except Exception:
            recorder.record_failure()
            if not failing:
                logger.exception("Some metrics are missing until this passes")
            failing = True


class SpeculationMetrics:
    """Ray metrics of one replica's engine.

    Must be made in the replica's process: the labels come from its Serve context.
    """

    def __init__(self, policy: str) -> None:
        """Register the metrics, labelled with the policy's name."""
        self._labels = {"policy": policy}
        self._before: Mapping[str, Any] = {}
        plain = {
            **_COUNTERS,
            **_PLANNER_COUNTERS,
            "snapshot_failures": (
                _SNAPSHOT_FAILURES,
                "Snapshots of the engine that failed or came too late.",
            ),
        }
        self._counters = _make_counters(plain)
        self._by_position = _make_counters(_COUNTERS_BY_POSITION, "position")
        self._by_reason = _make_counters(_COUNTERS_BY_REASON, "reason")
        self._gauges = {
            name: metrics.Gauge(metric, description, ("policy",))
            for name, (metric, description) in _GAUGES.items()
        }
        self._quarantined = metrics.Gauge(
            "tetris_quarantined_requests",
            "Requests whose drafts are left out now, by where acceptance collapsed.",
            ("policy", "reason"),
        )
        self._quarantined_for: set[str] = set()
        self._planner_gauges = {
            name: (metrics.Gauge(metric, description, ("policy",)), factor)
            for name, (metric, description, factor) in _PLANNER_GAUGES.items()
        }

        self._gains = {
            end: metrics.Gauge(metric, description, ("policy", "over"))
            for end, (metric, description) in _GAINS.items()
        }

    def note_policy(self, policy: str) -> None:
        """Label all that follows with another policy's name."""
        for gauge in [
            *self._gauges.values(),
            *(g for g, _ in self._planner_gauges.values()),
        ]:
            gauge.set(0.0, self._labels)
        for reason in self._quarantined_for:
            self._quarantined.set(0.0, {**self._labels, "reason": reason})
        self._labels = {"policy": policy}

    def record(self, snapshot: Mapping[str, Any]) -> None:
        """Add what has happened since the snapshot before this one."""
        grown = growth(self._before, snapshot)
        for name, counter in self._counters.items():
            _add(counter, grown.get(name, 0), self._labels)
        for name, counter in self._by_position.items():
            for position, value in enumerate(grown[name]):  # type: ignore[arg-type]  # a list, by the name
                _add(counter, value, {**self._labels, "position": str(position)})
        for name, counter in self._by_reason.items():
            for reason, value in grown[name].items():  # type: ignore[union-attr]  # a dict, by the name
                _add(counter, value, {**self._labels, "reason": reason})
        for name, gauge in self._gauges.items():
            if name in snapshot:
                gauge.set(snapshot[name], self._labels)
        quarantined = snapshot.get("num_quarantined", {})
        # Once there was one, none is worth saying.
        self._quarantined_for |= quarantined.keys()
        for reason in self._quarantined_for:
            labels = {**self._labels, "reason": reason}
            self._quarantined.set(quarantined.get(reason, 0), labels)
        report = snapshot.get("planner", {})
        for name, (gauge, factor) in self._planner_gauges.items():
            if name in report:
                gauge.set(factor * report[name], self._labels)
        for (end, gauge), over in itertools.product(self._gains.items(), _OVER):
            if (name := f"speculation_gain_{over}{end}") in report:
                gauge.set(report[name], {**self._labels, "over": over})
        self._before = snapshot

    def record_failure(self) -> None:
        """Count a snapshot that failed or came too late."""
        self._counters["snapshot_failures"].inc(1, self._labels)


class CapacityMetrics:
    """Ray metrics of what is left of a replica's device."""

    def __init__(self) -> None:
        """Register the metrics."""
        self._share = metrics.Gauge(
            "tetris_capacity_ratio",
            "Share of the replica's cores or GPUs, by signal.",
            ("signal",),
        )
        self._failures = metrics.Counter(
            "tetris_capacity_failures_total", "Readings that failed."
        )

    def record(self, signals: Mapping[str, Any]) -> None:
        """Set one gauge for each signal there is."""
        for signal, share in signals.items():
            self._share.set(share, {"signal": signal})

    def record_failure(self) -> None:
        """Count a reading that failed."""
        self._failures.inc(1)


def count_begun() -> Callable[[], None]:
    """Register a counter of requests, and return what counts one."""
    counter = metrics.Counter(
        "tetris_begun_requests_total", "Requests that the engine was given."
    )
    return functools.partial(counter.inc, 1)


def _make_counters(
    names: Mapping[str, tuple[str, str]], *labels: str
) -> dict[str, metrics.Counter]:
    return {
        name: metrics.Counter(metric, description, ("policy", *labels))
        for name, (metric, description) in names.items()
    }


def _add(counter: metrics.Counter, value: Any, labels: dict[str, str]) -> None:
    if value > 0:  # Ray rejects an increment of zero.
        counter.inc(value, labels)
