"""What the GPU adapter relies on in vLLM: an upgrade that moves a hook fails here.

The adapter cannot run without a GPU, so the calls it hooks into are checked where they
are written: names, arguments, and the order in which vLLM makes them.
"""

import inspect
import pickle
import re
import textwrap
from pathlib import Path

import pytest

from serving.contract import MovedNamesError
from serving.engine import compat
from serving.engine.gpu import plain_verification
from serving.engine.gpu import scheduler as gpu_scheduler
from serving.engine.gpu.runner import _REFUSAL, TetrisGPUModelRunner
from serving.engine.gpu.scheduler import TetrisAsyncScheduler
from serving.engine.gpu.speculators import (
    PacedStandalone,
    PacedTargetDependent,
    RawConfidence,
)
from serving.engine.gpu.step_messages import ORDER_ATTRIBUTE, VerificationOrder
from serving.engine.gpu.verification import PlannedVerification
from serving.engine.gpu.worker import TetrisGPUWorker
from serving.engine.shared import planner_host

OURS = [
    PlannedVerification,
    TetrisGPUModelRunner,
    TetrisGPUWorker,
    TetrisAsyncScheduler,
    PacedStandalone,
    PacedTargetDependent,
    RawConfidence,
]

HOOKS = {
    (PlannedVerification, "add_request"),
    (PlannedVerification, "get_num_tokens"),
    (PlannedVerification, "reallocate_drafts"),
    (PlannedVerification, "record_confidences"),
    (PlannedVerification, "set_initial_cost_curves"),
    (TetrisGPUModelRunner, "load_model"),
    (TetrisGPUModelRunner, "initialize_kv_cache"),
    (TetrisGPUModelRunner, "execute_model"),
    (TetrisGPUModelRunner, "postprocess_sampled"),
    (TetrisGPUModelRunner, "sample_tokens"),
    (TetrisGPUWorker, "_make_model_runner"),
    (TetrisAsyncScheduler, "schedule"),
    (TetrisAsyncScheduler, "_update_after_schedule"),
    (TetrisAsyncScheduler, "update_from_output"),
    (TetrisAsyncScheduler, "_free_request"),
    (PacedStandalone, "propose"),
    (PacedStandalone, "_multi_step_decode"),
    (PacedTargetDependent, "on_multi_step_decode_begin"),
    (RawConfidence, "step"),
}
"""Methods of vLLM that ours take the place of."""


def source(function):
    """Return a function's source, without what a decorator puts around it."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def upstream(ours):
    """Return vLLM's class below one of ours."""
    return next(cls for cls in ours.__mro__ if cls.__module__.startswith("vllm."))


def assert_in_order(text, *parts):
    """Assert that all parts occur, each after the one before."""
    position = 0
    for part in parts:
        found = text.find(part, position)
        assert found >= 0, f"{part!r} not found behind the part before it"
        position = found + len(part)


def test_every_name_that_others_import_is_where_it_was():
    assert all(getattr(compat, name) is not None for name in compat._EXPORTS)


def test_an_engine_of_a_vllm_that_has_moved_a_name_does_not_start(
    make_scheduler, monkeypatch
):
    moved = {"vllm.v1.request:Request": {"moved_away": "this test"}}
    for module in (planner_host, gpu_scheduler):
        name = "SCHEDULER" if module is planner_host else "GPU_SCHEDULER"
        with monkeypatch.context() as upgraded:
            upgraded.setattr(module, name, moved)
            with pytest.raises(MovedNamesError, match=r"Request\.moved_away is gone"):
                make_scheduler()
    make_scheduler()


def test_a_name_that_is_nowhere_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        compat.Nonsense  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize(
    ("ours", "name"), sorted(HOOKS, key=str), ids=lambda part: str(part)
)
def test_every_method_that_is_overridden_exists_upstream(ours, name):
    assert callable(getattr(upstream(ours), name, None))


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_nothing_of_vllm_is_overridden_by_accident(ours):
    own = {
        name
        for cls in ours.__mro__[: ours.__mro__.index(upstream(ours))]
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and name != "__init__"
    }
    shared = {name for name in own if hasattr(upstream(ours), name)}
    assert shared == {name for cls, name in HOOKS if cls is ours}


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        ("get_num_tokens", ["num_tokens_per_req", "draft_tokens"]),
        ("reallocate_drafts", ["req_ids", "idx_mapping"]),
        ("record_confidences", ["confidence_probs", "input_batch"]),
        ("set_initial_cost_curves", ["samples"]),
        ("add_request", ["req_idx"]),
    ],
)
def test_the_manager_is_asked_with_the_same_arguments(function, parameters):
    for cls in (PlannedVerification, upstream(PlannedVerification)):
        signature = inspect.signature(getattr(cls, function))
        assert list(signature.parameters)[1:] == parameters


def test_the_manager_inherits_no_method_that_would_skip_the_order():
    public = {
        name
        for name, value in vars(upstream(PlannedVerification)).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    hooked = {name for cls, name in HOOKS if cls is PlannedVerification}
    # These two neither choose a budget nor rank; `set_cost_curves` is called only by
    # the method that is replaced.
    assert public - hooked == {"batches_to_profile", "compact_batch", "set_cost_curves"}


def test_the_manager_finds_the_buffers_it_writes():
    made = source(upstream(PlannedVerification).__init__)
    for name in (
        "num_bonus_tokens",
        "num_speculative_steps",
        "query_start_loc",
        "_max_total_logits",
        "_batch_budget",
        "_confidence_probs",
        "_batch_draft_capacity",
        "_num_non_draft_tokens",
        "_cu_num_logits",
    ):
        assert re.search(rf"self\.{name}\b.*=", made), name
    compact = source(upstream(PlannedVerification).compact_batch)
    assert "_, _, draft_budget = batch_budget" in compact


def test_a_budget_is_chosen_before_boundaries_are_written():
    runner = upstream(TetrisGPUModelRunner)
    gather = source(runner.gather_batch_req_state)
    assert_in_order(gather, "if draft_tokens:", "adaptive_verification.get_num_tokens(")
    assert_in_order(
        source(runner.prepare_inputs),
        "self.adaptive_verification if draft_tokens else None",
        "adaptive_verification.compact_batch(",
        "adaptive_verification.reallocate_drafts(req_ids, idx_mapping)",
        "combine_sampled_and_draft_tokens(",
    )
    assert_in_order(
        source(runner.execute_model),
        "self.gather_batch_req_state(",
        "dispatch_cg_and_sync_dp(",
        "self.step_timing.forward_start()",
    )


def test_a_step_samples_then_drafts_then_records():
    assert_in_order(
        source(upstream(TetrisGPUModelRunner).sample_tokens),
        "self.sample(",
        "async_output = AsyncOutput(",
        "self.postprocess_sampled(",
        "self.speculator.observe_verification(",
        "self.speculator.propose(",
        "num_speculative_tokens=num_spec_tokens",
        "draft_tokens[:, num_spec_tokens:] = -1",
        "self.adaptive_verification.record_confidences(",
        "self.speculator.draft_token_confidence_probs",
        "return async_output",
    )


def test_the_manager_is_made_with_the_kv_cache_and_before_the_graphs():
    assert_in_order(
        source(upstream(TetrisGPUModelRunner).initialize_kv_cache),
        "maybe_create_adaptive_verification_manager(",
        'self.speculator, "enable_adaptive_verification", False',
        "varlen_decode=self.adaptive_verification is not None",
        "init_kv_cache(",
    )
    assert_in_order(
        source(upstream(TetrisGPUModelRunner).capture_model),
        "self.speculator.capture()",
        "self.step_timing.collect() as timings",
        "self.adaptive_verification.set_initial_cost_curves(timings)",
    )


def test_a_refused_attention_back_end_is_recognised():
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    text = source(adaptive_verification.maybe_create_adaptive_verification_manager)
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    assert text.count("raise ValueError(") == 2
    assert text.count(_REFUSAL) == 2


def test_the_conditions_for_plain_verification_are_upstreams():
    from vllm.config import VllmConfig

    text = source(VllmConfig._validate_adaptive_verification)
    assert text.count("raise ValueError(") == 3
    for condition in (
        "self.lora_config is not None",
        "not self.compilation_config.cudagraph_mode.has_full_cudagraphs()",
        "self.parallel_config.pipeline_parallel_size > 1",
    ):
        assert condition in text
    module = inspect.getsource(inspect.getmodule(VllmConfig))
    assert module.count("enable_adaptive_verification") == 5, (
        "another feature looks at enable_adaptive_verification: see whether "
        f"{plain_verification.find_plain_reason.__name__} must know it"
    )


def test_the_asynchronous_scheduler_sizes_placeholders_by_the_depth():
    scheduler = upstream(TetrisAsyncScheduler)
    assert scheduler is compat.AsyncScheduler
    assert_in_order(
        source(scheduler._update_after_schedule),
        "super()._update_after_schedule(scheduler_output)",
        "] * scheduler_output.num_spec_tokens_to_schedule",
        "request.spec_token_ids = self._spec_token_placeholders",
    )
    assert_in_order(
        source(compat.Scheduler.schedule),
        "request.spec_token_ids",
        "scheduler_output = SchedulerOutput(",
        "self._update_after_schedule(scheduler_output)",
        "return scheduler_output",
    )


def test_the_scheduler_rolls_back_by_placeholders_not_by_what_was_verified():
    """So that drafts left out on the device need no correction here."""
    assert_in_order(
        source(compat.Scheduler.update_from_output),
        "num_draft_tokens = len(scheduled_spec_token_ids)",
        "num_rejected = num_draft_tokens - num_accepted",
    )


def test_stop_tokens_are_barred_position_by_position():
    """So that a block of drafts may reach past `min_tokens`."""
    from vllm.v1.worker.gpu.sample import logit_bias

    text = inspect.getsource(logit_bias)
    assert "if num_stop_token_ids > 0 and pos + 1 < min_len:" in text


def test_messages_survive_the_way_between_processes():
    output = compat.SchedulerOutput.make_empty()
    order = VerificationOrder(step_id=3, draft_budget=7, req_ids=("a",))
    setattr(output, ORDER_ATTRIBUTE, order)
    assert getattr(pickle.loads(pickle.dumps(output)), ORDER_ATTRIBUTE) == order
    result = compat.ModelRunnerOutput(req_ids=[], req_id_to_index={})
    setattr(result, "anything", 1)  # noqa: B010 - as the adapter sets its report
    assert pickle.loads(pickle.dumps(result)).anything == 1


def test_a_standalone_drafter_still_ignores_the_depth_it_is_asked_for():
    """The day it obeys, `PacedStandalone.propose` can go."""
    drafter = upstream(PacedStandalone)
    text = source(drafter.propose)
    assert text.count("num_speculative_tokens") == 1
    assert "if self.num_speculative_steps == 1:" in text
    decode = source(drafter._multi_step_decode)
    assert "range(1, self.num_speculative_steps)" in decode


def test_other_drafters_obey_the_depth_and_call_the_hook_outside_graphs():
    drafter = upstream(PacedTargetDependent)
    assert_in_order(
        source(drafter.propose),
        "self.on_prefill_end(num_reqs)",
        "if num_speculative_tokens <= 1:",
        "self.on_multi_step_decode_begin(num_reqs)",
        "decode_fn(",
    )


def test_the_estimator_is_a_sigmoid_of_slope_times_log_odds_plus_intercept():
    from vllm.v1.worker.gpu.spec_decode import acceptance_estimator

    text = inspect.getsource(acceptance_estimator)
    made = source(upstream(RawConfidence).__init__)
    assert "self.slope = torch.full((1,)" in made
    assert "self.intercepts = torch.full(" in made
    kernel = text[text.index("def _predict_kernel(") :]
    kernel = kernel[: kernel.index("class OnlineAcceptanceEstimator")]
    assert "tl.sigmoid" in kernel or "1.0 / (1.0 + tl.exp(-" in kernel


def test_the_worker_builds_its_runner_through_the_hook():
    worker = upstream(TetrisGPUWorker)
    assert "self.model_runner: GPUModelRunner = self._make_model_runner()" in source(
        worker._init_workspace_and_model_runner
    )


def test_rays_executor_hands_over_outputs_as_the_local_one_does():
    from vllm import envs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert MultiprocExecutor.supports_async_scheduling()
    module = Path(inspect.getfile(MultiprocExecutor)).with_name("ray_executor_v2.py")
    assert "class RayExecutorV2(MultiprocExecutor):" in module.read_text("utf-8")
    assert hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")


def test_both_schedulers_host_their_planner_in_the_same_way():
    from serving.engine.cpu.scheduler import TetrisScheduler

    for scheduler in (TetrisScheduler, TetrisAsyncScheduler):
        assert scheduler.__mro__[1] is planner_host.PlannerHost
