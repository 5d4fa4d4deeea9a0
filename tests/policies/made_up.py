"""A made-up engine whose truth is known, for planners to drive."""

import itertools
from dataclasses import fields, replace

import numpy as np

from policies.goodput import GoodputPlanner
from policies.types import (
    CostProfile,
    DraftBatch,
    EngineLimits,
    StepTiming,
    VerificationOutcome,
)

MAX_DEPTH = 5
LIMITS = EngineLimits(max_tokens=512, max_reqs=64, skips_drafter=True)


class MadeUpEngine:
    """Requests of different difficulty on an engine with a linear step cost.

    Requests, confidences and acceptances come from one stream per step, so that all
    planners meet the same ones. `clock` is what planners read the times by: each step's
    are multiplied with what it yields, and throughput is counted by the true ones.
    Requests that end make room for others, whose prompts join the next step:
    `prompt_per_token` tokens of them for each that was emitted.
    """

    base_ms, token_ms, draft_token_ms = 13, 0.85, 0.05
    num_prefill_tokens, prompt_per_token = 0, None
    speed = drafter_speed = 1.0
    step = num_missing = 0

    def __init__(self, num_reqs, *, clock=None, **changes):
        self.num_reqs = num_reqs
        self.clock = itertools.repeat(1.0) if clock is None else clock
        vars(self).update(changes)

    def draw(self, step):
        """Return confidence, acceptance and luck, `[num_reqs, MAX_DEPTH]` each."""
        rng = np.random.default_rng(step)
        ease = np.random.default_rng(7).normal(0.3, 1.2, (self.num_reqs, 1))
        odds = ease + rng.normal(0.3, 1.6, (self.num_reqs, MAX_DEPTH))
        confidence = 1 / (1 + np.exp(-odds))
        acceptance = 1 / (1 + np.exp(-(1.1 * odds - 0.4)))
        return confidence.clip(0.02, 0.999), acceptance, rng.random(odds.shape)

    def profile(self):
        """Return what passes take, as an engine times them at its start."""
        counts = (1, 64, 512)
        target_ms = tuple(self.base_ms + self.token_ms * count for count in counts)
        draft_ms = tuple(1 + self.draft_token_ms * count for count in counts)
        return CostProfile(counts, target_ms, draft_ms)

    def run(self, planner, num_steps, *, sampled=False):
        """Run some steps; return tokens per second."""
        req_ids = tuple(str(i) for i in range(self.num_reqs))
        depth = 0
        tokens, elapsed_ms = 0, 0.0
        for _ in range(num_steps):
            confidence, acceptance, luck = self.draw(self.step)
            admitted = np.zeros(self.num_reqs, dtype=np.int64)
            if depth:
                batch = DraftBatch(
                    num_draft_tokens=np.full(self.num_reqs, depth),
                    confidence=confidence[:, :depth],
                    req_ids=req_ids,
                    num_decodes=self.num_reqs,
                    num_prefill_tokens=self.num_prefill_tokens,
                    num_context_tokens=100 * self.num_reqs,
                    drafts_are_sampled=sampled,
                )
                admitted = planner.select(batch).num_admitted
            next_depth = planner.choose_depth(self.num_reqs)
            passed = (luck < acceptance) & (np.arange(MAX_DEPTH) < admitted[:, None])
            accepted = np.cumprod(passed, axis=1).sum(axis=1)
            timing = self.fill_backlog(self.time(admitted.sum(), next_depth))
            emitted = self.num_reqs + int(accepted.sum())
            tokens += emitted
            if self.prompt_per_token is not None:
                self.num_prefill_tokens = round(self.prompt_per_token * emitted)
            elapsed_ms += timing.total_ms + timing.backlog_ms
            planner.observe(VerificationOutcome(admitted, accepted, req_ids))
            planner.observe_timing(read_off(timing, next(self.clock)))
            depth = next_depth
            self.step += 1
        return 1e3 * tokens / elapsed_ms

    def fill_backlog(self, timing):
        """Charge the first step that drafts for the positions of those that did not."""
        if timing.depth == 0:
            most = timing.num_context_tokens
            self.num_missing = min(self.num_missing + timing.num_tokens, most)
            return timing
        num_backlog, self.num_missing = self.num_missing, 0
        speed = self.speed * self.drafter_speed
        pass_ms = speed * (1 + self.draft_token_ms * num_backlog)
        backlog_ms = pass_ms if num_backlog else 0.0
        return replace(timing, num_backlog=num_backlog, backlog_ms=backlog_ms)

    def time(self, num_verified, depth):
        num_decode_tokens = self.num_reqs + int(num_verified)
        num_tokens = num_decode_tokens + self.num_prefill_tokens
        first_ms = 1 + self.draft_token_ms * num_tokens
        drafter_speed = self.speed * self.drafter_speed
        return StepTiming(
            num_reqs=self.num_reqs,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_context_tokens=100 * self.num_reqs,
            depth=depth,
            target_ms=self.speed * (self.base_ms + self.token_ms * num_tokens),
            draft_first_ms=drafter_speed * first_ms if depth else 0.0,
            draft_next_ms=drafter_speed * 2.4 * max(depth - 1, 0),
            host_ms=1.0,
        )


def read_off(timing, factor):
    """Return a step's times as a clock shows them that errs by a factor."""
    times = {
        field.name: factor * getattr(timing, field.name)
        for field in fields(timing)
        if field.name.endswith("_ms")
    }
    return replace(timing, **times)


def make_goodput(**kw):
    return GoodputPlanner.build(MAX_DEPTH, LIMITS, **kw)


def outcome_of(req_id, confidence, num_accepted):
    """Return what became of one request's draft, with its own confidence."""
    counts = np.array([2]), np.array([num_accepted])
    return VerificationOutcome(*counts, (req_id,), np.full((1, MAX_DEPTH), confidence))
