"""Steps of a made-up engine that asks a planner for all it has, one after the other."""

import numpy as np

from policies.decisions.batching import EngineLoad
from policies.types import DraftBatch, StepTiming, VerificationOutcome

LATENCY_TARGET_MS = 50.0
"""Of every fourth request, where there are classes: tight, but within reach."""


class MadeUpStep:
    """One step's inputs: random confidences, mostly high, as a drafter's are.

    Every fourth request weighs more and has a latency target if there are classes.
    """

    def __init__(self, rng, num_reqs, depth, *, has_classes=False):
        is_bound = np.arange(num_reqs) % 4 == 0
        targets_ms = np.where(is_bound, LATENCY_TARGET_MS, np.inf)
        self.weights = np.where(is_bound, 4.0, 1.0) if has_classes else None
        self.latency_target_ms = LATENCY_TARGET_MS if has_classes else None
        counts = num_reqs, num_reqs * (1 + depth), 100 * num_reqs
        to_grow = rng.integers(1, 200, num_reqs)
        self.load = EngineLoad(*counts, to_grow, 16, self.latency_target_ms)
        self.req_ids = tuple(map(str, range(num_reqs)))
        confidence = rng.beta(3.0, 1.0, (num_reqs, depth))
        self.confidence_by_pass = confidence.T.tolist()
        self.batch = DraftBatch(
            num_draft_tokens=np.full(num_reqs, depth, dtype=np.int64),
            confidence=confidence,
            req_ids=self.req_ids,
            num_decodes=num_reqs,
            num_context_tokens=100 * num_reqs,
            weights=self.weights,
            latency_targets_ms=targets_ms if has_classes else None,
        )
        # Three of four are accepted; the clock errs by a tenth.
        self.luck = rng.geometric(0.25, num_reqs) - 1
        self.speed = rng.lognormal(0.0, 0.1)

    def run(self, planner, timing):
        """Do all that an engine asks of a planner in a step; return what it admits."""
        if timing is not None:
            planner.observe_timing(timing)
        num_admitted = planner.select(self.batch).num_admitted
        planner.plan_batch(self.load)
        planner.choose_depth(len(self.req_ids), self.latency_target_ms)
        stop = planner.early_exit(self.req_ids, self.weights)
        if stop is not None:
            watch = stop.start(self.req_ids)
            for confidence in self.confidence_by_pass:
                if not watch.should_continue(confidence):
                    break
        num_accepted = np.minimum(self.luck, num_admitted)
        planner.observe(VerificationOutcome(num_admitted, num_accepted, self.req_ids))
        return num_admitted

    def time(self, num_admitted):
        """Charge a fixed price and one per token."""
        num_reqs, depth = len(self.req_ids), len(self.confidence_by_pass)
        num_tokens = num_reqs + int(num_admitted.sum())
        return StepTiming(
            num_reqs=num_reqs,
            num_decode_tokens=num_tokens,
            num_prefill_tokens=0,
            num_context_tokens=100 * num_reqs,
            depth=depth,
            target_ms=(10.0 + 0.1 * num_tokens) * self.speed,
            draft_first_ms=1.0,
            draft_next_ms=0.5 * depth,
            host_ms=1.0,
        )
