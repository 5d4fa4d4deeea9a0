"""The simulated batch against vLLM's own scheduler, token by token.

vLLM schedules, a stand-in for its executor accepts as many drafts as the simulated
request does, and takes the time that the simulated step takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import pytest

from loadtest.simulate import kernel, routers, state
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import Engine, load_engine
from loadtest.simulate.fleet import make_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytestmark += [pytest.mark.filterwarnings("ignore", r"error:::(loadtest|tests)\.")]

SEATS, TOKENS, DEPTH, COUNT = 8, 64, 3, 120


class Executor:
    """vLLM's scheduler, and what stands in for the rest of the engine."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from tests.engine.stand_in_worker import make_config, make_scheduler
        from tests.engine.tiny_models import write_llama_pair, write_tokenizer

        pair = write_llama_pair(folder, noise=0.05)
        write_tokenizer(pair[0])
        config = make_config(
            *pair,
            {"policy": "fixed", "draft_tokens": DEPTH, "max_draft_tokens": DEPTH},
            depth=DEPTH,
            max_num_seqs=SEATS,
            max_num_batched_tokens=TOKENS,
        )
        config.scheduler_config.async_scheduling = False
        self.engine = engine
        self.scheduler: Any = make_scheduler(Scheduler, config)
        self.requests: list[Any] = []

    def add(self, prompt_len: int, max_tokens: int) -> None:
        from tests.engine.stand_in_worker import add_requests

        name = f"{len(self.requests)}-"
        self.requests += add_requests(
            self.scheduler, 1, prompt_len=prompt_len, max_tokens=max_tokens, prefix=name
        )

    def schedule(self) -> tuple[Any, float]:
        """Return what vLLM wants to run, and how long that takes, s."""
        output, costs = self.scheduler.schedule(), self.engine.costs
        num_decoding = len(output.scheduled_spec_decode_tokens)
        step_ms = costs.base_ms + costs.request_ms * num_decoding
        step_ms += costs.token_ms * output.total_num_scheduled_tokens
        step_ms += DEPTH * (costs.draft_pass_ms + costs.draft_token_ms * num_decoding)
        return output, step_ms / 1e3

    def finish(self, output: Any) -> None:
        """Accept what the simulated request accepts, and draft anew."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        ids, sampled, drafts = list(output.num_scheduled_tokens), [], []
        for one in ids:
            number = int(one.partition("-")[0])
            request = self.requests[number]
            has_begun = request.num_computed_tokens >= request.num_prompt_tokens
            accepted = int(self.engine.drafts.num_accepted[number])
            verified = len(output.scheduled_spec_decode_tokens.get(one, ()))
            tokens = [7] * (1 + min(accepted, verified)) if has_begun else []
            sampled.append(tokens)
            drafts.append([7] * DEPTH if has_begun else [])
        rows = {one: row for row, one in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, rows, sampled))
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))


@pytest.mark.parametrize("gap_s", [1e-6, 0.02, 0.2])
def test_every_step_hands_out_what_vllm_s_hands_out(
    gap_s: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, DEPTH + 1, COUNT)
    drafts = state.Drafts(
        survival=np.ones((COUNT, DEPTH)),
        confidence=np.ones((COUNT, DEPTH)),
        num_offered=np.full(COUNT, DEPTH),
        num_accepted=accepted,
        first=np.arange(COUNT + 1),
    )
    made = load_engine("cpu-demo-100m", DEPTH, SEATS, state.ALL)
    costs = made.costs._replace(max_num_batched_tokens=TOKENS, request_ms=0.1)
    engine = Engine("", costs, drafts)
    drawn = Drawn(
        np.cumsum(rng.exponential(1.0, COUNT)) * gap_s,
        rng.integers(1, 130, COUNT),
        rng.integers(1, 60, COUNT),
        np.arange(COUNT),
    )
    fleet = make_fleet(engine, drawn, 1, 0)
    requests = fleet.requests
    executor, came, now_s, num_steps = Executor(tmp_path, engine), 0, 0.0, 0
    while came < COUNT or executor.scheduler.has_unfinished_requests():
        if not executor.scheduler.has_unfinished_requests():
            now_s = max(now_s, drawn.arrival_s[came])
        while came < COUNT and drawn.arrival_s[came] <= now_s:
            executor.add(
                int(drawn.num_prompt_tokens[came]), int(drawn.num_output_tokens[came])
            )
            came += 1
        output, step_s = executor.schedule()
        now_s += step_s
        executor.finish(output)
        num_steps += 1
        kernel.advance(fleet, routers.ROUND_ROBIN, 0.0, COUNT, now_s + 1e-9)
        emitted = np.zeros(COUNT, np.int64)
        emitted[requests.num_finishes > 0] = drawn.num_output_tokens[
            requests.num_finishes > 0
        ]
        for slot in range(fleet.num_running[0]):
            one = fleet.slots.request[0, slot]
            emitted[one] = drawn.num_output_tokens[one] - fleet.slots.output[0, slot]
        live = [request.num_output_tokens for request in executor.requests]
        assert emitted[:came].tolist() == live, f"step {num_steps}"
    assert fleet.counts[state.STEPS] == num_steps
    assert (requests.num_finishes == 1).all()
