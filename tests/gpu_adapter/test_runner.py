"""Runner, worker and drafters, with stand-ins for vLLM's own methods below ours."""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.engine.compat import (
    AsyncModelRunnerOutput,
    GPUModelRunnerV2,
    GPUWorker,
    ModelRunnerOutput,
    StandaloneARSpeculator,
    StepTimingSample,
    TargetDependentARSpeculator,
)
from serving.engine.gpu import runner as runner_v2
from serving.engine.gpu import worker as worker_gpu
from serving.engine.gpu.clock import DeviceClock
from serving.engine.gpu.copy import PendingCopy
from serving.engine.gpu.plain_verification import find_plain_reason, find_unfit_backend
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
from serving.engine.gpu.verification import PlannedVerification
from serving.engine.gpu.worker import TetrisGPUWorker
from tests.gpu_adapter.stand_ins import (
    CPU,
    StandInDevice,
    StandInGroup,
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


def schedule(order, num_tokens=4):
    """Stand in for a scheduled step."""
    output = SimpleNamespace(total_num_scheduled_tokens=num_tokens)
    if order is not None:
        setattr(output, ORDER_ATTRIBUTE, order)
    return output


def test_upstreams_manager_is_replaced_by_ours(runner, monkeypatch):
    assert make_kv_cache(runner, monkeypatch, []) == [True]
    assert isinstance(runner.adaptive_verification, PlannedVerification)


def test_a_refused_attention_back_end_falls_back_to_plain_verification(
    runner, monkeypatch
):
    asked = make_kv_cache(runner, monkeypatch, [ValueError(REFUSAL)])
    assert asked == [True, False]
    assert runner.adaptive_verification is None
    runner.execute_model(schedule(VerificationOrder(1, 0)))
    report = getattr(runner.sample_tokens(None).get_output(), REPORT_ATTRIBUTE)
    assert report.plain_reason == "attention_backend"
    assert report.verification is None


@pytest.mark.parametrize(
    ("reason", "reported"), [("lora", "lora"), (None, "no_confidence")]
)
def test_a_runner_without_upstreams_manager_says_why(
    reason, reported, runner, monkeypatch
):
    monkeypatch.setattr(runner_v2, "find_plain_reason", lambda _: reason)
    monkeypatch.setattr(runner_v2, "find_unfit_backend", lambda _: None)
    runner.speculative_config.enable_adaptive_verification = False
    make_kv_cache(runner, monkeypatch, [])
    runner.execute_model(schedule(VerificationOrder(1, 0)))
    report = getattr(runner.sample_tokens(None).get_output(), REPORT_ATTRIBUTE)
    assert report.plain_reason == reported


def test_other_errors_of_the_kv_cache_are_not_swallowed(runner, monkeypatch):
    with pytest.raises(ValueError, match="no memory"):
        make_kv_cache(runner, monkeypatch, [ValueError("no memory")])


def test_a_step_reports_what_it_verified_when_its_tokens_are_waited_for(
    runner, monkeypatch
):
    make_kv_cache(runner, monkeypatch, [])
    verification = runner.adaptive_verification
    verification.set_initial_cost_curves([StepTimingSample(5.0, 3.0, 1, 1, True)])
    reports = []
    for step_id in (1, 2):
        runner.execute_model(schedule(VerificationOrder(step_id, 1)))
        verification.get_num_tokens({"a": 3}, {"a": [-1, -1]})
        verification.reallocate_drafts(["a"], torch.tensor([0]))
        output = runner.sample_tokens(None)
        reports.append(getattr(output.get_output(), REPORT_ATTRIBUTE))
    assert [report.step_id for report in reports] == [1, 2]
    assert reports[0].verification.num_admitted.tolist() == [1]
    assert reports[0].verification.confidence.dtype == np.float32
    # The start-up profile travels once.
    assert reports[0].profile.target_ms == (5.0,)
    assert reports[1].profile is None


def test_steps_without_an_order_come_out_as_vllm_made_them(runner, monkeypatch):
    make_kv_cache(runner, monkeypatch, [])
    runner.execute_model(schedule(None))
    assert isinstance(runner.sample_tokens(None), StandInOutput)


def test_a_report_that_cannot_be_made_costs_no_token_and_is_counted(
    runner, monkeypatch
):
    make_kv_cache(runner, monkeypatch, [])

    def fail(*_):
        raise RuntimeError("a bug of our own")

    outputs = []
    for place in (DeviceClock, None, PendingCopy):
        with monkeypatch.context() as broken:
            if place is not None:
                name = "read_finished" if place is DeviceClock else "read"
                broken.setattr(place, name, fail)
            runner.execute_model(schedule(VerificationOrder(1, 1)))
            runner.adaptive_verification.get_num_tokens({"a": 3}, {"a": [-1, -1]})
            runner.adaptive_verification.reallocate_drafts(["a"], torch.tensor([0]))
            outputs.append(runner.sample_tokens(None).get_output())
    assert [output.sampled_token_ids for output in outputs] == [[[7]]] * 3
    reports = [getattr(output, REPORT_ATTRIBUTE, None) for output in outputs]
    assert reports[0] is None
    assert reports[1].faults == {"report_error": 1}
    assert reports[2].faults == {"report_error": 1}
    assert reports[2].verification is None


def test_only_the_first_rank_reports(runner, monkeypatch):
    monkeypatch.setattr(runner_v2, "get_tp_group", lambda: StandInGroup(rank=1))
    make_kv_cache(runner, monkeypatch, [])
    runner.execute_model(schedule(VerificationOrder(1, 1)))
    assert isinstance(runner.sample_tokens(None), StandInOutput)


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


@pytest.mark.parametrize(
    ("asked", "made"), [(None, 4), (4, 4), (9, 4), (2, 2), (1, 1), (0, 1)]
)
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


def config(**changes):
    """Stand in for the parts of vLLM's configuration that are looked at."""
    return SimpleNamespace(
        use_v2_model_runner=changes.get("v2", True),
        lora_config=changes.get("lora"),
        is_mm_encoder_only=False,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pp", 1),
            enable_batch_sharded_sampling=changes.get("sharded", False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(
                has_full_cudagraphs=lambda: changes.get("graphs", True)
            )
        ),
        model_config=SimpleNamespace(return_sampling_mask=changes.get("mask", False)),
        aux_output_config=SimpleNamespace(enabled=changes.get("experts", False)),
        speculative_config=SimpleNamespace(
            method=changes.get("method", "eagle3"),
            use_local_argmax_reduction=changes.get("argmax", False),
            enable_adaptive_verification=False,
            attention_backend=changes.get("draft_backend"),
        ),
        attention_config=SimpleNamespace(
            backend=changes.get("backend"), backend_per_kind=changes.get("per_kind", {})
        ),
    )


def backend(*, follows_device):
    """Stand in for a name of an attention back end; None cannot be imported."""

    def get_class():
        if follows_device is None:
            raise ImportError("not installed")
        return SimpleNamespace(
            supports_device_cpu_query_lens_mismatch=lambda: follows_device
        )

    return SimpleNamespace(name="X", get_class=get_class)


UNFIT, FIT = backend(follows_device=False), backend(follows_device=True)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"backend": FIT}, None),
        ({"backend": backend(follows_device=None)}, None),
        ({"backend": UNFIT}, "X"),
        ({"backend": FIT, "per_kind": {"sliding_window": UNFIT}}, "X"),
        ({"draft_backend": UNFIT}, "X"),
        ({"draft_backend": UNFIT, "method": "dspark"}, None),
    ],
)
def test_back_ends_that_were_asked_for_are_asked_whether_they_follow_the_device(
    changes, found
):
    assert find_unfit_backend(config(**changes)) == found


def test_vllm_asks_its_back_ends_the_same():
    """By the method, and in the configuration, that are asked here."""
    from vllm.config import AttentionConfig, SpeculativeConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = AttentionBackendEnum.CPU_ATTN
    assert find_unfit_backend(config(backend=chosen, draft_backend=chosen)) is None
    assert chosen.get_class().supports_device_cpu_query_lens_mismatch()
    assert {"backend", "backend_per_kind"} <= vars(AttentionConfig()).keys()
    assert "attention_backend" in SpeculativeConfig.__dataclass_fields__


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
    worker.vllm_config, worker.device = config(backend=UNFIT), CPU
    assert worker._make_model_runner() is runner
    assert any("attention back end X" in text for text in warnings)
    assert any("tetris_fallbacks_total" in text for text in warnings)
    runner.vllm_config = worker.vllm_config
    runner.speculative_config = worker.vllm_config.speculative_config
    assert make_kv_cache(runner, monkeypatch, []) == [False]
    runner.execute_model(schedule(VerificationOrder(1, 0)))
    report = getattr(runner.sample_tokens(None).get_output(), REPORT_ATTRIBUTE)
    assert report.plain_reason == "attention_backend"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"v2": False}, "runner_v1"),
        ({"method": "ngram"}, "method"),
        ({"argmax": True}, "local_argmax"),
        ({"argmax": True, "method": "dspark"}, None),
        ({"lora": object()}, "lora"),
        ({"pp": 2}, "pipeline_parallel"),
        ({"graphs": False}, "eager"),
        ({"sharded": True}, "batch_sharded_sampling"),
        ({"mask": True}, "sampling_mask"),
        ({"experts": True}, "routed_experts"),
    ],
)
def test_what_stands_in_the_way_of_trimming_is_named(changes, reason):
    assert find_plain_reason(config(**changes)) == reason


@pytest.mark.parametrize(("pp", "enabled"), [(1, True), (2, False)])
def test_the_worker_switches_upstreams_machinery_on_where_it_works(
    pp, enabled, monkeypatch
):
    monkeypatch.setattr(
        runner_v2, "TetrisGPUModelRunner", lambda *args: SimpleNamespace(args=args)
    )
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config, worker.device = config(pp=pp), CPU
    made = worker._make_model_runner()
    assert made.args == (worker.vllm_config, CPU)
    speculative = worker.vllm_config.speculative_config
    assert speculative.enable_adaptive_verification is enabled


def test_vllms_own_runner_is_used_where_it_insists_on_v1(monkeypatch):
    monkeypatch.setattr(GPUWorker, "_make_model_runner", lambda self: "vLLM's own")
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config = config(v2=False)
    assert worker._make_model_runner() == "vLLM's own"


STEP_PATH = ["clock", "copy", "ranking", "runner", "speculators", "verification"]
WAITS = frozenset({"item", "cpu", "tolist", "numpy", "synchronize", "nonzero"})


def waiting_calls(path):
    """Return function and method for every call that could wait for the device."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in WAITS
                ):
                    found.add((function.name, node.func.attr))
    return found


@pytest.mark.parametrize("module", STEP_PATH)
def test_nothing_in_the_step_waits_for_the_device(module):
    """A reading of the source; `VLLM_GPU_SYNC_CHECK=error` is the proof on a GPU."""
    path = Path(worker_gpu.__file__).parent / f"{module}.py"
    allowed = {
        # In the thread that waits for the sampled tokens, a forward pass later.
        ("read", "synchronize"),
        # The branch for tensors of the CPU.
        ("start", "numpy"),
    }
    assert waiting_calls(path) <= allowed


def test_such_a_call_would_be_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def step(x):\n    return x.sum().item()\n", "utf-8")
    assert waiting_calls(bad) == {("step", "item")}
