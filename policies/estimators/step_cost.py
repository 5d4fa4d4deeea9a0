"""Step time as a function of what the step carries, learnt from every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.estimators.cost_table import CostTable
from policies.estimators.sampling_cost import SamplingCost
from policies.estimators.state import read_part
from policies.estimators.usual_prompts import UsualPrompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from policies.types import CostProfile, StepTiming

MIN_STEPS_TO_EXPORT = 100
"""Measured steps from which on what was learnt is worth more to a new replica than its
own start-up profile."""


@dataclass(slots=True)
class StepCost:
    """Predicts what a step costs, part by part, and how wrong it was lately.

        step = target(all tokens) + context * KV positions
             + sampling(num_reqs, drafts)
             + draft_first(all tokens) + (depth - 1) * draft_next(num_reqs)
             + host(num_reqs)

    A pass does the same to a prompt's token as to any other. With a cost of their own
    prompts take part of what decoding costs wherever every step carries one, and hide
    how dear a verified token is.

    The parts are told apart by the worker's own timestamps: at a constant depth their
    sum alone would not identify them.

    Attributes:
        max_tokens: Most tokens a step can carry.
        max_reqs: Most requests a step can carry.
        padded_sizes: As `EngineLimits.padded_sizes`: both models' passes over the
            tokens of a step cost what the next of these costs.
        sampling: What sampling and judging cost.
        context_per_req: KV positions of a request in the latest step; 0 where it is not
            known.
        prompts: What a coming step is expected to carry of them.
        num_steps: Steps observed so far.
        num_dropped_timings: Steps and profiles whose clock readings were impossible;
            nothing was learnt from them.

    Source: ours.
    """

    max_tokens: int
    max_reqs: int
    padded_sizes: tuple[int, ...] = ()
    target: CostTable = field(init=False)
    draft_first: CostTable = field(init=False)
    draft_next: CostTable = field(init=False)
    host: CostTable = field(init=False)
    sampling: SamplingCost = field(init=False)
    context_per_req: float = field(init=False, default=0.0)
    prompts: UsualPrompts = field(init=False, default_factory=UsualPrompts)
    num_steps: int = field(init=False, default=0)
    num_dropped_timings: int = field(init=False, default=0)
    _noted: list[StepTiming] = field(init=False, default_factory=list)
    _is_warm: bool = field(init=False, default=False)
    _error: float = field(init=False, default=0.0)
    _predicted_ms: float = field(init=False, default=0.0)
    _measured_ms: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Create the tables with priors of a mid-sized model on a busy machine."""
        self.target = CostTable(
            self.max_tokens,
            first_ms=20.0,
            per_unit_ms=0.5,
            padded_sizes=self.padded_sizes,
            has_context=True,
        )
        self.draft_first = CostTable(
            self.max_tokens,
            first_ms=2.0,
            per_unit_ms=0.05,
            padded_sizes=self.padded_sizes,
        )
        self.draft_next = CostTable(self.max_reqs, first_ms=2.0, per_unit_ms=0.05)
        self.host = CostTable(self.max_reqs, first_ms=1.0, per_unit_ms=0.05)
        self.sampling = SamplingCost(self.max_tokens, self.max_reqs)

    @property
    def _tables(self) -> dict[str, CostTable]:
        return {
            "target": self.target,
            "draft_first": self.draft_first,
            "draft_next": self.draft_next,
            "host": self.host,
            "plain_sampling": self.sampling.plain,
            "rejection_sampling": self.sampling.judged,
        }

    def batch_ms(
        self, num_reqs: NDArray[np.float64], context_per_req: float
    ) -> NDArray[np.float64]:
        """Return the time of a step of the target alone, without the host's part.

        Args:
            num_reqs: `[num_sizes]`, rising.
            context_per_req: KV positions of each; 0 where it is not known.
        """
        step_ms = self.target.predict(num_reqs)
        step_ms += self.context_ms(context_per_req) * num_reqs
        if self.sampling.is_timed:
            step_ms += self.sampling.plain.predict(num_reqs)
        return step_ms

    def context_ms(self, num_context_tokens: float) -> float:
        """Return the time that KV positions attended to add."""
        return self.target.slope_ms * num_context_tokens

    def fit_profile(self, profile: CostProfile) -> None:
        """Replace the priors by what was timed at start-up.

        Nothing changes after `import_state`: real steps of another engine say more than
        dummy passes of this one. A profile that no working clock gives is dropped and
        counted.
        """
        if not profile.num_tokens or self._is_warm:
            return
        if not all(0.0 <= ms < math.inf for ms in profile.target_ms + profile.draft_ms):
            self.num_dropped_timings += 1
            return
        counts, target_ms = profile.num_tokens, profile.target_ms
        self.target.fit_profile(counts, target_ms)
        # A drafter without passes is next to free until a step shows otherwise; left at
        # the priors, which nothing would ever correct, it would hardly be used.
        nothing = (0.0,) * len(counts)
        first_ms = profile.draft_ms or nothing
        next_ms = nothing if profile.drafts_in_one_pass else first_ms
        self.draft_first.fit_profile(counts, first_ms)
        self.draft_next.fit_profile(counts, next_ms)

    def draft_next_ms(
        self, num_reqs: int, depth: NDArray[np.int64] | NDArray[np.float64] | int
    ) -> NDArray[np.float64]:
        """Return the time of the passes after the first, for one or many depths."""
        passes = np.maximum(np.asarray(depth, dtype=np.float64) - 1.0, 0.0)
        return passes * self.draft_next.at(num_reqs)

    def host_ms(self, num_reqs: int) -> float:
        """Return the time of the rest of the step."""
        return self.host.at(num_reqs)

    def predict_ms(self, timing: StepTiming) -> float:
        """Predict the whole of a step that has been measured."""
        return (
            self.target.at(timing.num_tokens)
            + self.context_ms(timing.num_context_tokens)
            + self.sampling.predict_step_ms(timing)
            + self._predict_draft_ms(timing)
            + self.host.at(timing.num_reqs)
        )

    def _predict_draft_ms(self, timing: StepTiming) -> float:
        if timing.draft_first_ms <= 0:
            return 0.0
        return self.draft_first.at(timing.num_tokens) + (
            max(timing.depth - 1, 0) * self.draft_next.at(timing.num_reqs)
        )

    def observe(self, timing: StepTiming) -> float:
        """Learn from one step; one that cannot be true is dropped and counted.

        Returns:
            The relative error of the prediction made before learning, >= 0; NaN if
            the timing was dropped.
        """
        if not timing.is_possible:
            self.num_dropped_timings += 1
            return math.nan
        error = self._note_error(timing)
        self.prompts.note((timing.num_prefill_tokens,))
        self._learn(timing)
        return error

    def note(self, timing: StepTiming) -> None:
        """Keep a step's timing until `learn_noted`."""
        self._noted.append(timing)

    def learn_noted(self, at_least: int) -> Sequence[StepTiming]:
        """Learn from what was noted, once there are so many; return what was learnt."""
        if len(self._noted) < at_least:
            return ()
        # Before anything can fail, or one malformed timing would stop all learning.
        timings, self._noted = self._noted, []
        self.learn(timings)
        return timings

    def learn(self, timings: Sequence[StepTiming]) -> None:
        """Learn from steps in a row: all are predicted first, which is faster."""
        possible = [timing for timing in timings if timing.is_possible]
        self.num_dropped_timings += len(timings) - len(possible)
        for timing in possible:
            self._note_error(timing)
        self.prompts.note([timing.num_prefill_tokens for timing in possible])
        for timing in possible:
            self._learn(timing)

    def _note_error(self, timing: StepTiming) -> float:
        predicted = self.predict_ms(timing)
        self._predicted_ms, self._measured_ms = predicted, timing.total_ms
        error = abs(predicted - timing.total_ms) / max(timing.total_ms, 1e-6)
        self.num_steps += 1
        rate = max(0.02, 1.0 / self.num_steps)
        self._error += rate * (min(error, 1.0) - self._error)
        self.context_per_req = timing.num_context_tokens / max(timing.num_reqs, 1)
        return error

    def _learn(self, timing: StepTiming) -> None:
        drift = self.target.observe(
            timing.num_tokens, timing.target_ms, timing.num_context_tokens
        )
        self.draft_first.observe(timing.num_backlog, timing.backlog_ms)
        # What did not run in this step drifts with what did: a stolen core slows both
        # models down, and a drafter believed slow would never be tried again.
        if timing.draft_first_ms > 0:
            self.draft_first.observe(timing.num_tokens, timing.draft_first_ms)
        else:
            self.draft_first.rescale(drift)
        if timing.depth > 1 and timing.draft_next_ms > 0:
            pass_ms = timing.draft_next_ms / (timing.depth - 1)
            self.draft_next.observe(timing.num_reqs, pass_ms)
        else:
            self.draft_next.rescale(drift)
        self.host.observe(timing.num_reqs, timing.host_ms)
        self.sampling.observe(timing)

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry."""
        return {
            "predicted_step_ms": self._predicted_ms,
            "measured_step_ms": self._measured_ms,
            "step_time_error": self._error,
            "context_ms_per_token": self.target.slope_ms,
            "num_dropped_timings": self.num_dropped_timings,
            "num_cost_resets": sum(t.num_resets for t in self._tables.values()),
        }

    def export_state(self) -> dict[str, Any]:
        """Return everything learnt as plain values."""
        return {name: table.export_state() for name, table in self._tables.items()}

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's `export_state`.

        Raises:
            ValueError: It cannot be true; some tables may have changed then.
        """
        for name, table in self._tables.items():
            table.import_state(read_part(state, name))
        self._is_warm = True
