"""What the GPU adapter relies on in vLLM beside names, where no test here can run it.

The code is read where it is written. That names and arguments are there:
`tests/test_private_names.py`; what vLLM's own code does with them: `interpreted/`.
"""

import inspect
import pickle
import textwrap
from pathlib import Path

import pytest

from serving.contract import MovedNamesError
from serving.engine import compat
from serving.engine.gpu import scheduler as gpu_scheduler
from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.scheduler import TetrisAsyncScheduler
from serving.engine.gpu.speculators import (
    PacedStandalone,
    PacedTargetDependent,
    RawConfidence,
)
from serving.engine.gpu.step_messages import ORDER_ATTRIBUTE
from serving.engine.gpu.verification import PlannedVerification
from serving.engine.gpu.worker import TetrisGPUWorker
from serving.engine.shared import planner_host

HOOKS = {
    PlannedVerification: "add_request get_num_tokens reallocate_drafts "
    "record_confidences batches_to_profile set_initial_cost_curves",
    TetrisGPUModelRunner: "load_model initialize_kv_cache execute_model "
    "postprocess_sampled sample_tokens",
    TetrisGPUWorker: "_make_model_runner",
    TetrisAsyncScheduler: "schedule _update_after_schedule update_from_output "
    "_free_request",
    PacedStandalone: "propose _multi_step_decode",
    PacedTargetDependent: "on_multi_step_decode_begin",
    RawConfidence: "step",
}
"""Methods of vLLM that ours take the place of."""


def source(function):
    """Return a function's source, without what a decorator puts around it."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def upstream(ours):
    """Return vLLM's class below one of ours."""
    return next(cls for cls in ours.__mro__ if cls.__module__.startswith("vllm."))


def test_no_engine_of_a_vllm_that_moved_a_name_starts(make_scheduler, monkeypatch):
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


@pytest.mark.parametrize("ours", HOOKS, ids=lambda ours: ours.__name__)
def test_what_is_overridden_exists_upstream_and_nothing_is_by_accident(ours):
    own = {
        name
        for cls in ours.__mro__[: ours.__mro__.index(upstream(ours))]
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and name != "__init__"
    }
    shared = {name for name in own if hasattr(upstream(ours), name)}
    assert shared == set(HOOKS[ours].split())


def test_the_worker_makes_its_runner_through_the_hook():
    text = source(upstream(TetrisGPUWorker)._init_workspace_and_model_runner)
    assert "self.model_runner: GPUModelRunner = self._make_model_runner()" in text


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
        "another feature looks at it: see whether `find_plain_reason` must know it"
    )


def test_the_estimator_is_a_sigmoid():
    from vllm.v1.worker.gpu.spec_decode import acceptance_estimator

    text = inspect.getsource(acceptance_estimator)
    kernel = text[text.index("def _predict_kernel(") :]
    kernel = kernel[: kernel.index("class OnlineAcceptanceEstimator")]
    assert "tl.sigmoid" in kernel or "1.0 / (1.0 + tl.exp(-" in kernel
    # Of one slope, and an intercept for each position: with 1 and 0 it is the identity.
    made = source(upstream(RawConfidence).__init__)
    assert "self.slope = torch.full((1,)" in made
    assert "self.intercepts = torch.full(" in made


def test_messages_survive_the_way_between_processes():
    for message in (
        compat.SchedulerOutput.make_empty(),
        compat.ModelRunnerOutput(req_ids=[], req_id_to_index={}),
    ):
        setattr(message, ORDER_ATTRIBUTE, 7)
        assert getattr(pickle.loads(pickle.dumps(message)), ORDER_ATTRIBUTE) == 7


def test_rays_executor_hands_over_outputs_as_the_local_one_does():
    from vllm import envs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert MultiprocExecutor.supports_async_scheduling()
    module = Path(inspect.getfile(MultiprocExecutor)).with_name("ray_executor_v2.py")
    assert "class RayExecutorV2(MultiprocExecutor):" in module.read_text("utf-8")
    assert hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
