"""What stands in the way of leaving drafts out."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from serving.engine.compat import GPUWorker
from serving.engine.gpu import runner as runner_v2
from serving.engine.gpu import worker as worker_gpu
from serving.engine.gpu.plain_verification import (
    drafts_in_one_pass,
    find_plain_reason,
    find_unfit_backend,
)
from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.worker import TetrisGPUWorker

DEPTHS = [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 64, 4]]


def make_config(**changes):
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
            num_speculative_tokens=4,
            num_speculative_tokens_per_batch_size=changes.get("depths", DEPTHS),
            parallel_drafting=changes.get("parallel", False),
            use_multi_module_mtp=lambda: changes.get("modules", 1) > 1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        attention_config=SimpleNamespace(
            backend=changes.get("backend"), backend_per_kind=changes.get("per_kind", {})
        ),
    )


def make_backend(follows_device):
    """Stand in for a name of an attention back end; None cannot be imported."""

    def get_class():
        if follows_device is None:
            raise ImportError("not installed")
        question = "supports_device_cpu_query_lens_mismatch"
        return SimpleNamespace(**{question: lambda: follows_device})

    return SimpleNamespace(name="X", get_class=get_class)


UNFIT, FIT, MISSING = map(make_backend, (False, True, None))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"backend": FIT}, None),
        ({"backend": MISSING}, None),
        ({"backend": UNFIT}, "X"),
        ({"backend": FIT, "per_kind": {"sliding_window": UNFIT}}, "X"),
        ({"draft_backend": UNFIT}, "X"),
        ({"draft_backend": UNFIT, "method": "dspark"}, None),
    ],
)
def test_back_ends_asked_for_are_asked_whether_they_follow_the_device(changes, found):
    assert find_unfit_backend(make_config(**changes)) == found


def test_vllm_asks_its_back_ends_the_same():
    """By the method, and in the configuration, that are asked here."""
    from vllm.config import AttentionConfig, SpeculativeConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = AttentionBackendEnum.CPU_ATTN
    assert find_unfit_backend(make_config(backend=chosen, draft_backend=chosen)) is None
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
    assert find_plain_reason(make_config(**changes)) == reason


@pytest.mark.parametrize(
    ("changes", "enabled", "warnings"),
    [
        ({}, True, []),
        ({"pp": 2}, False, ["(pipeline_parallel)"]),
        ({"backend": UNFIT}, False, ["attention back end X", "(attention_backend)"]),
    ],
)
def test_the_worker_switches_upstreams_machinery_on_where_it_works(
    changes, enabled, warnings, monkeypatch
):
    make, warn = Mock(), Mock()
    monkeypatch.setattr(runner_v2, "TetrisGPUModelRunner", make)
    monkeypatch.setattr(worker_gpu.logger, "warning", warn)
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config, worker.device = make_config(**changes), "cpu"
    worker._make_model_runner()
    make.assert_called_once_with(worker.vllm_config, "cpu")
    speculative = worker.vllm_config.speculative_config
    assert speculative.enable_adaptive_verification is enabled
    # vLLM captures graphs for each length in it.
    depths = DEPTHS if enabled else [[1, 64, 4]]
    assert speculative.num_speculative_tokens_per_batch_size == depths
    said = [call.args[0] % call.args[1:] for call in warn.call_args_list]
    assert all(part in line for part, line in zip(warnings, said, strict=True))


def test_vllms_own_runner_is_used_where_it_insists_on_v1(monkeypatch):
    monkeypatch.setattr(GPUWorker, "_make_model_runner", lambda self: "vLLM's own")
    worker = object.__new__(TetrisGPUWorker)
    worker.vllm_config = make_config(v2=False)
    assert worker._make_model_runner() == "vLLM's own"


@pytest.mark.parametrize(
    ("changes", "in_one_pass"),
    [
        ({}, False),
        ({"method": "dflash"}, True),
        ({"parallel": True}, True),
        ({"method": "mtp"}, False),
        # One graph runs them all.
        ({"method": "mtp", "modules": 2}, True),
    ],
)
def test_drafters_that_make_all_tokens_at_once_are_known(changes, in_one_pass):
    assert drafts_in_one_pass(make_config(**changes)) == in_one_pass


@pytest.fixture
def runner(request):
    made = object.__new__(TetrisGPUModelRunner)
    made.vllm_config = make_config(**getattr(request, "param", {}))
    made.speculative_config = made.vllm_config.speculative_config
    made.speculative_config.enable_adaptive_verification = True
    made.speculator = made.rejection_sampler = None
    made.device = "cpu"
    return made


@pytest.mark.parametrize(
    ("runner", "depths"),
    [({}, [[1, 64, 4]]), ({"depths": None}, None)],
    indirect=["runner"],
)
def test_a_back_end_that_refuses_late_has_graphs_of_full_drafts_alone(
    runner, depths, monkeypatch
):
    """As FlashAttention 2 does, by itself the choice on every GPU before Hopper."""
    seen = []

    def initialize_kv_cache(self):
        speculative = self.speculative_config
        seen.append(speculative.num_speculative_tokens_per_batch_size)
        if speculative.enable_adaptive_verification:
            raise ValueError("... pass enable_adaptive_verification=false ...")
        self.adaptive_verification = None

    monkeypatch.setattr(
        runner_v2.GPUModelRunnerV2, "initialize_kv_cache", initialize_kv_cache
    )
    runner.initialize_kv_cache()
    assert runner._plain_reason == "attention_backend"
    assert seen == [DEPTHS if depths else None, depths]


def test_the_groups_communicator_is_there_before_memory_is_counted(runner, monkeypatch):
    """It is made by the first broadcast, and takes memory of its own."""
    done = []
    group = SimpleNamespace(broadcast=lambda tensor, src: done.append((tensor, src)))
    monkeypatch.setattr(runner_v2, "get_tp_group", lambda: group)
    monkeypatch.setattr(
        runner_v2.GPUModelRunnerV2, "load_model", lambda self: done.append("weights")
    )
    monkeypatch.setattr(runner_v2, "use_raw_confidence", lambda speculator: None)
    runner.load_model()
    weights, (tensor, src) = done
    assert (weights, tensor.tolist(), src) == ("weights", [0.0], 0)
