"""vLLM's metrics of many steps at once: they are read every few seconds."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any, Final

from serving.engine.compat import (
    PrefixCacheStats,
    PrometheusStatLogger,
    SchedulerStats,
    SpecDecodingStats,
    StatLoggerBase,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INTERVAL_S: Final = 0.1
"""For which figures of steps may wait."""

_LATEST: Final = {
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "num_kv_fetch_reqs_by_stage",
    "step_counter",
    "current_wave",
    "kv_cache_usage",
}
_SUMMED: Final = {"prefix_cache_stats", "spec_decoding_stats"}
_OTHERS: Final = tuple(
    one.name
    for one in dataclasses.fields(SchedulerStats)
    if one.name not in _LATEST | _SUMMED
)
"""What cannot be merged, or is new: unless it is empty, it goes out at once."""

_PREFIX_SUMS: Final = (
    "requests",
    "queries",
    "hits",
    "preempted_requests",
    "preempted_queries",
    "preempted_hits",
)
_DRAFT_SUMS: Final = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_DRAFT_SUMS_PER_POS: Final = (
    "num_accepted_tokens_per_pos",
    "num_draft_tokens_per_pos",
)


class MergedStats(StatLoggerBase):
    """Stands in front of vLLM's Prometheus logger, and hands it many steps as one.

    Each of its gauges and counters costs microseconds to set, and there are dozens of
    them for a step of milliseconds. Counts add up, of levels the latest is handed on.
    The last step before the engine falls idle goes out at once, for nothing would come
    after it; of an engine that stops without one, the rest goes out with `log`.
    """

    def __init__(self, inner: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Let nothing wait yet.

        Args:
            inner: vLLM's logger.
            clock: Seconds.
        """
        self._inner = inner
        self._clock = clock
        self._waiting: list[Any] = []
        self._engine_idx = 0
        self._due_s = 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take over the figures of a step."""
        if engine_idx != self._engine_idx:
            self._send()
            self._engine_idx = engine_idx
        if (
            scheduler_stats is None
            or iteration_stats is not None
            or (mm_cache_stats is not None and mm_cache_stats.queries)
            or not _can_be_merged(scheduler_stats)
        ):
            self._send()
            self._inner.record(
                scheduler_stats,
                iteration_stats,
                mm_cache_stats=mm_cache_stats,
                engine_idx=engine_idx,
            )
            return
        self._waiting.append(scheduler_stats)
        if _is_idle(scheduler_stats) or self._clock() >= self._due_s:
            self._send()

    def log(self) -> None:
        """Hand on what waits."""
        self._send()
        self._inner.log()

    def log_engine_initialized(self) -> None:
        """Hand it on."""
        self._inner.log_engine_initialized()

    def record_sleep_state(self, *state: Any) -> None:
        """Hand it on."""
        self._inner.record_sleep_state(*state)

    def record_admission_rejection(self, reason: str) -> None:
        """Hand it on."""
        self._inner.record_admission_rejection(reason)

    def _send(self) -> None:
        if not self._waiting:
            return
        steps, self._waiting = self._waiting, []
        self._due_s = self._clock() + INTERVAL_S
        self._inner.record(_merge(steps), None, engine_idx=self._engine_idx)


def merge_stats(stat_loggers: list[Any]) -> None:
    """Put `MergedStats` before vLLM's Prometheus logger, in place."""
    for place, logger in enumerate(stat_loggers):
        if isinstance(logger, PrometheusStatLogger):
            stat_loggers[place] = MergedStats(logger)


def _can_be_merged(stats: Any) -> bool:
    prefix = stats.prefix_cache_stats
    if prefix.reset or prefix.hits_by_source:
        return False
    return not any(getattr(stats, name) for name in _OTHERS)


def _is_idle(stats: Any) -> bool:
    return not (
        stats.num_running_reqs
        or stats.num_waiting_reqs
        or stats.num_skipped_waiting_reqs
    )


def _merge(steps: Sequence[Any]) -> Any:
    """Return the figures of several steps as those of one; theirs stay as they are."""
    if len(steps) == 1:
        return steps[0]
    prefix = _add([one.prefix_cache_stats for one in steps], _PREFIX_SUMS)
    drafts = [one.spec_decoding_stats for one in steps if one.spec_decoding_stats]
    return dataclasses.replace(
        steps[-1],
        prefix_cache_stats=PrefixCacheStats(**prefix),
        spec_decoding_stats=_merge_drafts(drafts) if drafts else None,
    )


def _merge_drafts(drafts: Sequence[Any]) -> Any:
    per_pos = {
        name: [
            sum(counts)
            for counts in itertools.zip_longest(
                *(getattr(one, name) for one in drafts), fillvalue=0
            )
        ]
        for name in _DRAFT_SUMS_PER_POS
    }
    return SpecDecodingStats(
        num_spec_tokens=max(one.num_spec_tokens for one in drafts),
        **_add(drafts, _DRAFT_SUMS),
        **per_pos,
    )


def _add(parts: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: sum(getattr(one, name) for one in parts) for name in names}
