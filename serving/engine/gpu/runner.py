"""V2 model runner (GPU): our verification in the place of vLLM's, reports, clock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from serving.engine.compat import (
    AsyncModelRunnerOutput,
    GPUModelRunnerV2,
    get_tp_group,
)
from serving.engine.gpu.clock import DeviceClock, LiveStepTiming
from serving.engine.gpu.copy import DeviceReader
from serving.engine.gpu.plain_verification import (
    ATTENTION_BACKEND,
    NO_CONFIDENCE,
    drafts_in_one_pass,
    find_plain_reason,
    find_unfit_backend,
    keep_one_depth,
)
from serving.engine.gpu.speculators import adopt_speculator, use_raw_confidence
from serving.engine.gpu.step_messages import (
    ORDER_ATTRIBUTE,
    REPORT_ATTRIBUTE,
    StepReport,
    VerificationReport,
)
from serving.engine.gpu.verification import PlannedVerification
from serving.engine.shared.faults import FaultGuard

if TYPE_CHECKING:
    from policies.types import CostProfile
    from serving.engine.compat import ModelRunnerOutput, SchedulerOutput
    from serving.engine.gpu.step_messages import DeviceTimes, VerificationOrder
    from serving.engine.gpu.verification import VerifiedDrafts

logger = init_logger(__name__)

_REFUSAL = "enable_adaptive_verification=false"
"""Part of every message with which vLLM refuses an attention back end."""


class ReportedOutput(AsyncModelRunnerOutput):
    """vLLM's asynchronous output, with a report attached when it is waited for."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        step_id: int,
        verified: VerifiedDrafts | None,
        times: tuple[DeviceTimes, ...],
        profile: CostProfile | None,
        plain_reason: str | None,
        guard: FaultGuard,
    ) -> None:
        """Keep what is to be reported; nothing is read yet."""
        self._inner = inner
        self._step_id = step_id
        self._verified = verified
        self._times = times
        self._profile = profile
        self._plain_reason = plain_reason
        self._guard = guard

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the sampled tokens as vLLM does; the rest is there by then."""
        output = self._inner.get_output()
        verification = self._guard.attempt("report_error", self._read_verification)
        report = StepReport(
            step_id=self._step_id,
            verification=verification,
            times=self._times,
            profile=self._profile,
            plain_reason=self._plain_reason,
            faults=self._guard.hand_over(),
        )
        setattr(output, REPORT_ATTRIBUTE, report)
        return output

    def _read_verification(self) -> VerificationReport | None:
        if self._verified is None:
            return None
        confidence, num_admitted = self._verified.copy.read()
        return VerificationReport(self._verified.req_ids, confidence, num_admitted)


class TetrisGPUModelRunner(GPUModelRunnerV2):
    """A V2 runner that verifies what the scheduler ordered and reports on it.

    Changes against upstream, all before or after its own methods:
        `initialize_kv_cache`: replaces the adaptive-verification manager; where the
            attention back end cannot bear it, goes on without.
        `execute_model`: hands the step's order to the manager.
        `sample_tokens`: attaches a report to the output.
    None of it waits for the device.
    """

    adaptive_verification: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the runner, then let drafter and timing tell our clock."""
        super().__init__(*args, **kwargs)
        self._guard = FaultGuard(Counter(), "worker")
        self._clock = DeviceClock()
        self.step_timing = LiveStepTiming(self._clock)
        adopt_speculator(self.speculator, self._clock)
        self._order: VerificationOrder | None = None
        self._plain_reason: str | None = None
        self._profile_sent = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models, then let the drafter report raw confidence."""
        super().load_model(*args, **kwargs)
        use_raw_confidence(self.speculator)
        # The first broadcast of a group makes its communicator: here its memory is
        # there when vLLM looks how much is left, and no request waits for it.
        get_tp_group().broadcast(torch.zeros(1, device=self.device), src=0)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Make the KV cache and our verification, or plain verification."""
        try:
            super().initialize_kv_cache(*args, **kwargs)
        except ValueError as error:
            if _REFUSAL not in str(error):
                raise
            self._go_plain(ATTENTION_BACKEND, str(error))
            super().initialize_kv_cache(*args, **kwargs)
        if self.adaptive_verification is not None:
            self.adaptive_verification = PlannedVerification(
                self.adaptive_verification,
                tp_group=get_tp_group(),
                num_draft_passes=self._count_draft_passes(),
                reader=DeviceReader(self.device) if self._reports() else None,
            )
        elif self._plain_reason is None:
            self._plain_reason = self._explain_plain()

    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the target under the order that came with the step."""
        order = getattr(scheduler_output, ORDER_ATTRIBUTE, None)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._order = order
            if order is not None:
                self._clock.begin(order.step_id)
            if isinstance(self.adaptive_verification, PlannedVerification):
                self.adaptive_verification.take_order(order)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def postprocess_sampled(self, *args: Any, **kwargs: Any) -> None:
        """Update request states as vLLM does; drafting is what follows."""
        super().postprocess_sampled(*args, **kwargs)
        self._clock.mark_target_end()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, verify and draft; attach the report to what comes out."""
        output = super().sample_tokens(*args, **kwargs)
        reported = self._guard.attempt("report_error", self._report_on, output)
        return output if reported is None else reported

    def _report_on(self, output: Any) -> ReportedOutput | None:
        """Attach this step's report to its output; None if nobody waits for one."""
        self._clock.mark_draft_end()
        order, self._order = self._order, None
        if (
            order is None
            or not isinstance(output, AsyncModelRunnerOutput)
            or not self._reports()
        ):
            return None
        verification = self.adaptive_verification
        verified, profile = None, None
        if isinstance(verification, PlannedVerification):
            verified = verification.take_verified()
            if not self._profile_sent:
                profile, self._profile_sent = verification.profile, True
        return ReportedOutput(
            output,
            order.step_id,
            verified,
            self._clock.read_finished(),
            profile,
            self._plain_reason,
            self._guard,
        )

    def _reports(self) -> bool:
        """Whether the scheduler listens to this rank: one of each parallel group."""
        reports: bool = get_tp_group().rank_in_group == 0
        return reports

    def _count_draft_passes(self) -> int:
        if drafts_in_one_pass(self.vllm_config):
            return 1
        return max(1, int(self.num_speculative_steps))

    def _explain_plain(self) -> str:
        """Find out again why the worker has not switched trimming on."""
        reason = find_plain_reason(self.vllm_config)
        if reason is None and find_unfit_backend(self.vllm_config) is not None:
            reason = ATTENTION_BACKEND
        return reason or NO_CONFIDENCE

    def _go_plain(self, reason: str, message: str) -> None:
        """Switch adaptive verification off everywhere upstream has noted it."""
        logger.warning(
            "Verifying all drafts, none can be left out here (%s): %s", reason, message
        )
        self._plain_reason = reason
        self.speculative_config.enable_adaptive_verification = False
        if self.speculative_config.num_speculative_tokens_per_batch_size:
            keep_one_depth(self.vllm_config)
        if self.speculator is not None:
            self.speculator.enable_adaptive_verification = False
            self.speculator.acceptance_estimator = None
        if self.rejection_sampler is not None:
            self.rejection_sampler.enable_adaptive_verification = False
