"""Runner, worker and drafters, with stand-ins for vLLM's own methods below ours."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.engine.compat import (
    AsyncModelRunnerOutput,
    GPUModelRunnerV2,
    ModelRunnerOutput,
    StandaloneARSpeculator,
    StepTimingSample,
    TargetDependentARSpeculator,
)
from serving.engine.gpu import runner as runner_v2
from serving.engine.gpu import worker as worker_gpu
from serving.engine.gpu.clock import DeviceClock
from serving.engine.gpu.copy import PendingCopy
from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.speculators import (
    PacedStandalone,
    adopt_speculator,
    use_raw_confidence,
)
from serving.engine.gpu.step_messages import (
    ORDER_ATTRIBUTE,
    REPORT_ATTRIBUTE,
    VerificationOrder,
)
from serving.engine.gpu.worker import TetrisGPUWorker
from tests.gpu_adapter.stand_ins import (
    CPU,
    StandInDevice,
    StandInGroup,
    stand_in_backend,
    stand_in_config,
    stand_in_manager,
)

REFUSAL = (
    "Adaptive verification trims verification requests on device, which the X "
    "attention backend does not support. Pass enable_adaptive_verification=false in "
    "the speculative config, or use a backend that does."
)


class StandInOutput(AsyncModelRunnerOutput):
    """vLLM's asynchronous output without a device."""

    def get_output(self):
        return ModelRunnerOutput(["a"], {"a": 0}, [[7]])


@pytest.fixture
def runner(monkeypatch):
    """A runner of ours over methods of vLLM's that do nothing."""
    monkeypatch.setattr(runner_v2, "get_tp_group", StandInGroup)
    monkeypatch.setattr(GPUModelRunnerV2, "__init__", lambda self: None)
    monkeypatch.setattr(
        GPUModelRunnerV2, "execute_model", lambda self, output, **_: None
    )
    monkeypatch.setattr(
        GPUModelRunnerV2, "sample_tokens", lambda self, grammar: StandInOutput()
    )
    monkeypatch.setattr(GPUModelRunnerV2, "postprocess_sampled", lambda self, *_: None)
    monkeypatch.setattr(TetrisGPUModelRunner, "speculator", None, raising=False)
    made = TetrisGPUModelRunner()
    made.device = CPU
    made.num_speculative_steps = 3
    made.rejection_sampler = None
    made.adaptive_verification = None
    made.speculative_config = SimpleNamespace(
        enable_adaptive_verification=True, method="draft_model", parallel_drafting=False
    )
    made.vllm_config = SimpleNamespace(speculative_config=made.speculative_config)
    return made


def make_kv_cache(runner, monkeypatch, errors):
    """Run `initialize_kv_cache` over a method of vLLM's that fails at first."""
    asked = []

    def initialize(self, *_):
        asked.append(self.speculative_config.enable_adaptive_verification)
        if errors:
            raise errors.pop(0)
        self.adaptive_verification = stand_in_manager(4, 3, 100) if asked[-1] else None

    monkeypatch.setattr(GPUModelRunnerV2, "initialize_kv_cache", initialize)
    runner.initialize_kv_cache("config")
    return asked


def schedule(order):
    """Stand in for a scheduled step."""
    output = SimpleNamespace(total_num_scheduled_tokens=4)
    if order is not None:
        setattr(output, ORDER_ATTRIBUTE, order)
    return output


def run_step(runner, step_id=1):
    """Run a step of which one draft of two is verified; returns output and report."""
    runner.execute_model(schedule(VerificationOrder(step_id, 1)))
    if runner.adaptive_verification is not None:
        runner.adaptive_verification.get_num_tokens({"a": 3}, {"a": [-1, -1]})
        runner.adaptive_verification.reallocate_drafts(["a"], torch.tensor([0]))
    output = runner.sample_tokens(None).get_output()
    return output, getattr(output, REPORT_ATTRIBUTE, None)


@pytest.mark.parametrize(
    ("found", "errors", "reported"),
    [
        (None, [ValueError(REFUSAL)], "attention_backend"),
        ("lora", [], "lora"),
        (None, [], "no_confidence"),
    ],
)
def test_a_runner_without_upstreams_manager_verifies_all_and_says_why(
    found, errors, reported, runner, monkeypatch
):
    monkeypatch.setattr(runner_v2, "find_plain_reason", lambda _: found)
    monkeypatch.setattr(runner_v2, "find_unfit_backend", lambda _: None)
    runner.speculative_config.enable_adaptive_verification = bool(errors)
    asked = [True, False] if errors else [False]
    assert make_kv_cache(runner, monkeypatch, errors) == asked
    assert runner.adaptive_verification is None
    _, report = run_step(runner)
    assert report.plain_reason == reported
    assert report.verification is None


def test_a_back_end_that_does_not_follow_leads_to_plain_verification_not_to_an_error(
    runner, monkeypatch
):
    monkeypatch.setattr(runner_v2, "TetrisGPUModelRunner", lambda *_: runner)
    # The stand-in's class is not vLLM's.
    monkeypatch.setattr(worker_gpu, "check", lambda *_: None)
    warnings = []
    monkeypatch.setattr(
        worker_gpu.logger, "warning", lambda text, *args: warnings.append(text % args)
    )
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config, worker.device = (
        stand_in_config(backend=stand_in_backend(follows_device=False)),
        CPU,
    )
    assert worker._make_model_runner() is runner
    assert any("attention back end X" in text for text in warnings)
    assert any("tetris_fallbacks_total" in text for text in warnings)
    runner.vllm_config = worker.vllm_config
    runner.speculative_config = worker.vllm_config.speculative_config
    assert make_kv_cache(runner, monkeypatch, []) == [False]
    _, report = run_step(runner)
    assert report.plain_reason == "attention_backend"


def test_other_errors_of_the_kv_cache_are_not_swallowed(runner, monkeypatch):
    with pytest.raises(ValueError, match="no memory"):
        make_kv_cache(runner, monkeypatch, [ValueError("no memory")])


def test_a_step_reports_what_it_verified_when_its_tokens_are_waited_for(
    runner, monkeypatch
):
    assert make_kv_cache(runner, monkeypatch, []) == [True]
    timings = [StepTimingSample(5.0, 3.0, 1, 1, True)]
    runner.adaptive_verification.set_initial_cost_curves(timings)
    reports = [run_step(runner, step_id)[1] for step_id in (1, 2)]
    assert [report.step_id for report in reports] == [1, 2]
    assert reports[0].verification.num_admitted.tolist() == [1]
    assert reports[0].verification.confidence.dtype == np.float32
    # The start-up profile travels once.
    assert reports[0].profile.target_ms == (5.0,)
    assert reports[1].profile is None


@pytest.mark.parametrize(("rank", "order"), [(0, None), (1, VerificationOrder(1, 1))])
def test_without_an_order_and_on_other_ranks_steps_come_out_as_vllm_made_them(
    rank, order, runner, monkeypatch
):
    monkeypatch.setattr(runner_v2, "get_tp_group", lambda: StandInGroup(rank=rank))
    make_kv_cache(runner, monkeypatch, [])
    runner.execute_model(schedule(order))
    assert isinstance(runner.sample_tokens(None), StandInOutput)


@pytest.mark.parametrize(
    ("part", "method"), [(DeviceClock, "read_finished"), (PendingCopy, "read")]
)
def test_a_report_that_cannot_be_made_costs_no_token_and_is_counted(
    part, method, runner, monkeypatch
):
    make_kv_cache(runner, monkeypatch, [])
    with monkeypatch.context() as broken:
        broken.setattr(part, method, lambda *_: 1 / 0)
        output, report = run_step(runner)
    assert output.sampled_token_ids == [[7]]
    if part is DeviceClock:
        # There is none, and the next one tells.
        assert report is None
        _, report = run_step(runner)
    else:
        assert report.verification is None
    assert report.faults == {"report_error": 1}


def test_a_steps_parts_are_timed_where_the_runner_passes_them(runner):
    device = StandInDevice()
    runner._clock._make_event = device.make_event
    for step_id in (1, 2):
        runner.execute_model(schedule(VerificationOrder(step_id, 1)))
        device.queue(1.0)
        runner.step_timing.forward_start()
        device.queue(5.0)
        runner.postprocess_sampled("rows")
        device.queue(2.0)
        output = runner.sample_tokens(None)
        device.now_ms = device.queued_ms
    report = getattr(output.get_output(), REPORT_ATTRIBUTE)
    # The second step was not done yet when its output was made.
    assert [times.step_id for times in report.times] == [1]
    assert report.times[0].target_ms == 5.0
    assert report.times[0].draft_first_ms == 2.0


def make_drafter(monkeypatch, base, depth):
    """Make a drafter of vLLM's that only notes how many passes it would make."""
    concrete = type(base.__name__, (base,), {"load_draft_model": None})
    drafter = object.__new__(concrete)
    drafter.num_speculative_steps = depth
    drafter.draft_tokens = torch.zeros(4, depth, dtype=torch.int64)
    drafter.depths = []

    def propose(self, *_, **__):
        self.depths.append(self.num_speculative_steps)
        if self.num_speculative_steps > 1:
            self._multi_step_decode()
            return self.draft_tokens[:2]
        return self.draft_tokens[:2, :1]

    monkeypatch.setattr(base, "propose", propose)
    monkeypatch.setattr(base, "_multi_step_decode", lambda self, *_: None)
    return drafter


@pytest.mark.parametrize(("asked", "made"), [(None, 4), (9, 4), (2, 2), (1, 1), (0, 1)])
def test_a_draft_model_makes_as_many_passes_as_it_is_asked_for(
    asked, made, monkeypatch
):
    drafter = make_drafter(monkeypatch, StandaloneARSpeculator, 4)
    adopt_speculator(drafter, DeviceClock(StandInDevice().make_event))
    drafts = drafter.propose("batch", num_speculative_tokens=asked)
    assert drafter.depths == [made]
    assert drafter.num_speculative_steps == 4
    assert drafts.shape == (2, 4)


def test_a_failing_draft_leaves_the_full_depth_behind(monkeypatch):
    drafter = make_drafter(monkeypatch, StandaloneARSpeculator, 4)
    adopt_speculator(drafter, DeviceClock(StandInDevice().make_event))

    def fail(self, *_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StandaloneARSpeculator, "_multi_step_decode", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafter.propose("batch", num_speculative_tokens=2)
    assert drafter.num_speculative_steps == 4


@pytest.mark.parametrize("base", [StandaloneARSpeculator, TargetDependentARSpeculator])
def test_the_end_of_the_first_pass_is_marked(base, monkeypatch):
    device = StandInDevice()
    clock = DeviceClock(device.make_event)
    drafter = make_drafter(monkeypatch, base, 3)
    adopt_speculator(drafter, clock)
    clock.begin(1)
    clock.mark_forward_start()
    clock.mark_target_end()
    device.queue(2.0)
    if base is StandaloneARSpeculator:
        drafter.propose("batch")
    else:
        drafter.on_multi_step_decode_begin(1)
    device.queue(3.0)
    clock.mark_draft_end()
    device.now_ms = device.queued_ms
    [times] = clock.read_finished()
    assert (times.draft_first_ms, times.draft_next_ms) == (2.0, 3.0)


def test_adopting_a_drafter_twice_or_another_kind_changes_nothing():
    clock = DeviceClock(StandInDevice().make_event)
    drafter = object.__new__(StandaloneARSpeculator)
    adopt_speculator(drafter, clock)
    adopted = type(drafter)
    adopt_speculator(drafter, clock)
    assert type(drafter) is adopted
    assert isinstance(drafter, PacedStandalone)
    other = SimpleNamespace()
    adopt_speculator(other, clock)
    assert type(other) is SimpleNamespace


def test_the_estimator_becomes_the_identity_and_stays_so():
    drafter = object.__new__(StandaloneARSpeculator)
    drafter.max_num_reqs, drafter.num_speculative_steps, drafter.device = 4, 3, CPU
    drafter.acceptance_estimator = None
    use_raw_confidence(drafter)
    assert drafter.acceptance_estimator is None
    drafter.acceptance_estimator = object()
    use_raw_confidence(drafter)
    estimator = drafter.acceptance_estimator
    estimator.step(None, None, None)
    assert estimator.slope.tolist() == [1.0]
    assert estimator.intercepts.tolist() == [0.0] * 3
