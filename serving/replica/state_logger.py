"""Tells fronts after every step what a router wants to know of this engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from policies.estimators.request_cost import RequestCost
from serving.engine.compat import StatLoggerBase
from serving.replica.token_channel import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.replica.token_channel import TokenRelay


class StateLogger(StatLoggerBase):
    """Learns what steps cost from vLLM's own figures, and hands on both.

    Attributes:
        state: What fronts were told last.
    """

    def __init__(
        self,
        relay: TokenRelay,
        num_kv_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nothing yet.

        Args:
            relay: To the fronts.
            num_kv_tokens: Tokens for which there are KV blocks.
            clock: Seconds.
        """
        self._relay = relay
        self._num_kv_tokens = num_kv_tokens
        self._clock = clock
        self.state = ReplicaState()
        self._cost = RequestCost()
        # When the step before ended, and how many requests were left in the batch.
        self._before_s, self._num_before = 0.0, 0

    def record(self, scheduler_stats: Any, *_args: Any, **_kwargs: Any) -> None:
        """Take over the figures of a step."""
        if scheduler_stats is None:
            return
        self._learn(scheduler_stats)
        usage = scheduler_stats.kv_cache_usage
        base_ms, request_ms, prompt_token_ms = self._cost.costs_ms or (0.0, 0.0, 0.0)
        self.state = ReplicaState(
            num_running=scheduler_stats.num_running_reqs,
            num_waiting=scheduler_stats.num_waiting_reqs,
            kv_cache_usage=usage,
            num_free_kv_tokens=int((1.0 - usage) * self._num_kv_tokens),
            base_ms=base_ms,
            request_ms=request_ms,
            prompt_token_ms=prompt_token_ms,
            tokens_per_step=self._cost.tokens_per_step,
        )
        self._relay.set_state(self.state)

    def log_engine_initialized(self) -> None:
        """Say nothing."""

    def _learn(self, stats: Any) -> None:
        """Learn from the time since the step before, if the engine was busy all along.

        Prompt tokens are those of requests that entered the batch, less what the prefix
        cache supplied; a long prompt takes several steps, but is counted in the first.
        """
        now_s, num_before = self._clock(), self._num_before
        step_ms = 1e3 * (now_s - self._before_s)
        self._before_s, self._num_before = now_s, stats.num_running_reqs
        if num_before == 0:
            return
        prefix = stats.prefix_cache_stats
        num_prompt_tokens = max(0, prefix.queries - prefix.hits)
        num_requests = max(num_before, stats.num_running_reqs)
        self._cost.observe_step(step_ms, num_requests, num_prompt_tokens)
        drafts = stats.spec_decoding_stats
        num_accepted = 0 if drafts is None else drafts.num_accepted_tokens
        self._cost.observe_tokens(num_requests, num_accepted)
