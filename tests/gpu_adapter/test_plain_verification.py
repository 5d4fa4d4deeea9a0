"""What stands in the way of leaving drafts out, and that no step waits to do so."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.engine.compat import GPUWorker
from serving.engine.gpu import runner as runner_v2
from serving.engine.gpu import worker as worker_gpu
from serving.engine.gpu.plain_verification import find_plain_reason, find_unfit_backend
from serving.engine.gpu.worker import TetrisGPUWorker
from tests.gpu_adapter.stand_ins import CPU, stand_in_backend, stand_in_config

UNFIT, FIT = (
    stand_in_backend(follows_device=False),
    stand_in_backend(follows_device=True),
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"backend": FIT}, None),
        ({"backend": stand_in_backend(follows_device=None)}, None),
        ({"backend": UNFIT}, "X"),
        ({"backend": FIT, "per_kind": {"sliding_window": UNFIT}}, "X"),
        ({"draft_backend": UNFIT}, "X"),
        ({"draft_backend": UNFIT, "method": "dspark"}, None),
    ],
)
def test_back_ends_that_were_asked_for_are_asked_whether_they_follow_the_device(
    changes, found
):
    assert find_unfit_backend(stand_in_config(**changes)) == found


def test_vllm_asks_its_back_ends_the_same():
    """By the method, and in the configuration, that are asked here."""
    from vllm.config import AttentionConfig, SpeculativeConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = AttentionBackendEnum.CPU_ATTN
    assert (
        find_unfit_backend(stand_in_config(backend=chosen, draft_backend=chosen))
        is None
    )
    assert chosen.get_class().supports_device_cpu_query_lens_mismatch()
    assert {"backend", "backend_per_kind"} <= vars(AttentionConfig()).keys()
    assert "attention_backend" in SpeculativeConfig.__dataclass_fields__


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
    assert find_plain_reason(stand_in_config(**changes)) == reason


@pytest.mark.parametrize(("pp", "enabled"), [(1, True), (2, False)])
def test_the_worker_switches_upstreams_machinery_on_where_it_works(
    pp, enabled, monkeypatch
):
    monkeypatch.setattr(
        runner_v2, "TetrisGPUModelRunner", lambda *args: SimpleNamespace(args=args)
    )
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config, worker.device = stand_in_config(pp=pp), CPU
    made = worker._make_model_runner()
    assert made.args == (worker.vllm_config, CPU)
    speculative = worker.vllm_config.speculative_config
    assert speculative.enable_adaptive_verification is enabled


def test_vllms_own_runner_is_used_where_it_insists_on_v1(monkeypatch):
    monkeypatch.setattr(GPUWorker, "_make_model_runner", lambda self: "vLLM's own")
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config = stand_in_config(v2=False)
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
