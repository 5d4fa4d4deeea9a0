"""What a replica tells of its steps, from vLLM's figures and a made-up clock."""

from typing import Any

import pytest
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from serving.replica.state_logger import StateLogger
from serving.replica.token_channel import ReplicaState


class Relay:
    state = ReplicaState()

    def set_state(self, state: ReplicaState) -> None:
        self.state = state


def stats(num_running: int, prompt: int = 0, cached: int = 0, accepted: int = 0) -> Any:
    made = SchedulerStats(num_running_reqs=num_running, kv_cache_usage=0.25)
    made.prefix_cache_stats = PrefixCacheStats(queries=prompt + cached, hits=cached)
    drafts = SpecDecodingStats.new(4)
    drafts.observe_draft(num_draft_tokens=4, num_accepted_tokens=accepted)
    made.spec_decoding_stats = drafts
    return made


def test_costs_are_learnt_from_busy_steps_alone():
    now_s, relay = 0.0, Relay()
    logger = StateLogger(relay, 1_000, clock=lambda: now_s)  # type: ignore[arg-type]
    logger.record(stats(0))
    now_s = 3600.0
    logger.record(stats(2))
    assert relay.state.base_ms == 0.0, "an hour of idling is no step"
    for step in range(300):
        num_running, prompt = 2 + 6 * (step % 2), 100 * (step % 7 == 0)
        # The batch that a step had is the one that the step before left behind.
        num_requests = max(2 + 6 * ((step + 1) % 2), num_running) if step else 2
        now_s += 1e-3 * (8.0 + 0.5 * num_requests + 0.1 * prompt)
        logger.record(stats(num_running, prompt, 900, accepted=4))
    told = relay.state
    assert told.base_ms + 8 * told.request_ms == pytest.approx(12.0, rel=0.1)
    assert told.prompt_token_ms == pytest.approx(0.1, rel=0.2)
    assert told.tokens_per_step == pytest.approx(1.5, rel=0.05)
    assert told.num_free_kv_tokens == 750
    logger.record(None)
    assert relay.state is told
