"""What both schedulers do alike, wherever the drafts are: host a planner."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from policies.batch import EngineLimits
from policies.planner import build_planner
from serving.engine.batch_limits import BatchLimits
from serving.engine.board import BoardRecorder
from serving.engine.counters import SpeculationCounters
from serving.engine.faults import FaultGuard
from serving.engine.options import read_policy
from serving.engine.request_classes import RequestClasses

if TYPE_CHECKING:
    from policies.batch import PolicySpec
    from policies.planner import Planner
    from serving.engine.compat import ModelRunnerOutput, Request, SchedulerOutput


class PlannerHost:
    """Mixin in front of one of vLLM's schedulers.

    Attributes:
        counters: Cumulative figures of the engine.
        board: What the engine does step by step, while somebody watches.
    """

    counters: SpeculationCounters
    board: BoardRecorder
    _planner: Planner
    _classes: RequestClasses
    _limits: BatchLimits
    _guard: FaultGuard
    # vLLM's scheduler brings these.
    vllm_config: Any
    scheduler_config: Any
    running: list[Request]
    waiting: Any
    max_model_len: int
    num_spec_tokens: int

    def _host_planner(
        self, *, skips_drafter: bool, stops_drafts: bool = False
    ) -> PolicySpec:
        """Build the planner the engine's configuration names, and what it needs.

        Args:
            skips_drafter: Whether depth 0 leaves the drafter out altogether.
            stops_drafts: Whether a draft can end between two of the drafter's passes.

        Raises:
            ValueError: If the configuration cannot work.
        """
        spec = read_policy(self.vllm_config)
        speculative = self.vllm_config.speculative_config
        self._planner = build_planner(
            spec,
            EngineLimits(
                max_tokens=self.scheduler_config.max_num_batched_tokens,
                max_reqs=self.scheduler_config.max_num_seqs,
                skips_drafter=skips_drafter,
                stops_drafts=stops_drafts,
                method=speculative.method,
            ),
        )
        self._classes = RequestClasses.read(self.vllm_config)
        self._limits = BatchLimits(self)
        self.counters = SpeculationCounters(
            policy=spec.name,
            method=speculative.method,
            max_depth=speculative.num_speculative_tokens,
        )
        self._guard = FaultGuard(self.counters)
        self.board = BoardRecorder()
        return spec

    def snapshot(self) -> dict[str, Any]:
        """Return counters and the planner's gauges as plain values."""
        report = self._guard.ask(self._planner.report) or {}
        return {**self.counters.snapshot(), "planner": report}

    def export_state(self) -> dict[str, Any]:
        """Return what the planner learnt, for a new replica to start from."""
        return self._planner.export_state()

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from what another replica's planner learnt.

        Raises:
            Exception: Whatever is wrong with the state; nothing has changed then.
        """
        planner = copy.deepcopy(self._planner)
        planner.import_state(state)
        self._planner = planner

    def _plan_batch(self) -> None:
        if not self._limits.is_needed():
            self._limits.apply(None, 0)
            return
        load = self._limits.measure_load()
        plan = self._guard.ask(self._planner.plan_batch, load)
        self._limits.apply(plan, load.num_decode_tokens)

    def _choose_depth(self, num_reqs: int) -> int | None:
        """Ask for the next depth, within the engine's; None if the planner fails."""
        depth = self._guard.ask(
            lambda: int(
                self._planner.choose_depth(
                    num_reqs, self._classes.tightest_target_ms(self.running)
                )
            )
        )
        return None if depth is None else max(0, min(depth, self.num_spec_tokens))

    def _count_context(self) -> int:
        return sum(request.num_computed_tokens for request in self.running)

    def _count_cut(self, reason: str, num_tokens: int) -> None:
        if num_tokens:
            self.counters.num_cut_tokens[reason] += num_tokens

    def _show(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        """Put a step on the board."""
        sampled = model_runner_output.sampled_token_ids
        drafts = scheduler_output.scheduled_spec_decode_tokens
        emitted = [
            (
                req_id,
                max(0, len(sampled[row]) - 1) if drafts.get(req_id) else 0,
                len(sampled[row]),
            )
            for req_id, row in model_runner_output.req_id_to_index.items()
            if row < len(sampled) and sampled[row]
        ]
        self.board.note_outcome(
            emitted,
            budget=self.counters.last_draft_budget,
            depth=self.counters.draft_depth,
            running=[request.request_id for request in self.running],
            waiting=len(self.waiting),
        )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._guard.ask(self._planner.forget, request.request_id)
        self._limits.note_finished(request)
        return super()._free_request(  # type: ignore[misc]  # vLLM's scheduler follows
            request, *args, **kwargs
        )
