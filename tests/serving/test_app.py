"""How settings become engine arguments, Ray resources and replica environments."""

from pathlib import Path
from typing import Any

import pytest

from serving.app import (
    check_servable,
    engine_kwargs_of,
    replica_env_of,
    settings_from_args,
)
from serving.settings import SettingsError, parse_settings
from tests.serving.test_settings import minimal

pytestmark = pytest.mark.filterwarnings(
    # Torch and Ray warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def engine_kwargs(**sections: dict[str, Any]) -> dict[str, Any]:
    return engine_kwargs_of(parse_settings(minimal(**sections)))


def test_policy_none_starts_a_stock_engine_without_a_drafter() -> None:
    kwargs = engine_kwargs(policy={"name": "none"})
    assert not {"scheduler_cls", "worker_cls", "speculative_config"} & kwargs.keys()
    assert kwargs["per_request_spec_decode_metrics"] == "none"


def test_tetris_drafts_deeper_than_it_verifies() -> None:
    kwargs = engine_kwargs(
        policy={"name": "tetris", "draft_tokens": 2, "extra_draft_tokens": 3},
        engine={"max_num_seqs": 7},
    )
    assert kwargs["speculative_config"] == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
        "num_speculative_tokens_per_batch_size": [[1, 7, 5]],
    }
    assert kwargs["additional_config"]["tetris"] == {
        "policy": "tetris",
        "draft_tokens": 2,
        "extra_draft_tokens": 3,
        "latency_target_ms": None,
        "classes": {},
    }
    assert kwargs["scheduler_cls"] == "serving.engine.scheduler.TetrisScheduler"
    assert kwargs["worker_cls"] == "serving.engine.worker.TetrisCPUWorker"


def test_classes_reach_the_engine_and_their_priorities_its_queue() -> None:
    classes = {"chat": {"weight": 4, "latency_target_ms": 50, "priority": -1}}
    kwargs = engine_kwargs(policy={"name": "goodput", "classes": classes})
    assert kwargs["additional_config"]["tetris"]["classes"] == {
        "chat": {"weight": 4.0, "latency_target_ms": 50.0, "priority": -1}
    }
    assert kwargs["scheduling_policy"] == "priority"
    without = engine_kwargs(policy={"name": "goodput", "classes": {"chat": {}}})
    assert "scheduling_policy" not in without


def test_methods_without_a_draft_model_pass_their_own_fields() -> None:
    kwargs = engine_kwargs(
        model={"draft": None},
        policy={"name": "fixed", "method": "ngram", "extra": {"prompt_lookup_max": 4}},
    )
    assert "model" not in kwargs["speculative_config"]
    assert kwargs["speculative_config"]["prompt_lookup_max"] == 4


def test_further_engine_arguments_reach_vllm() -> None:
    assert engine_kwargs(engine={"extra": {"block_size": 32}})["block_size"] == 32


def test_a_tool_parser_enables_automatic_tool_choice() -> None:
    kwargs = engine_kwargs(engine={"tool_call_parser": "hermes"})
    assert kwargs["tool_call_parser"] == "hermes"
    assert kwargs["enable_auto_tool_choice"] is True


def test_on_a_gpu_fixed_is_left_to_vllm_and_tetris_is_refused() -> None:
    on_gpu = {"engine": {"device": "gpu"}, "replicas": {"num_gpus": 1}}
    kwargs = engine_kwargs(policy={"name": "fixed"}, **on_gpu)
    assert "scheduler_cls" not in kwargs
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 3
    settings = parse_settings(minimal(policy={"name": "tetris"}, **on_gpu))
    with pytest.raises(SettingsError, match=r"policy\.name: tetris does not run on"):
        check_servable(settings)


def test_a_cpu_replica_starts_with_intels_openmp_and_unbound_threads() -> None:
    settings = parse_settings(minimal(engine={"cpu_threads": 2, "env": {"A": "b"}}))
    env = replica_env_of(settings)
    assert env["LD_PRELOAD"].split(":")[0].endswith("libiomp5.so")
    assert Path(env["LD_PRELOAD"].split(":")[0]).is_file()
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["A"] == "b"


def test_only_deployments_of_local_models_run_offline(tmp_path: Path) -> None:
    remote = replica_env_of(parse_settings(minimal()))
    assert "HF_HUB_OFFLINE" not in remote
    local = {"target": str(tmp_path), "draft": str(tmp_path)}
    assert replica_env_of(parse_settings(minimal(model=local)))["HF_HUB_OFFLINE"] == "1"


def test_build_takes_a_file_with_overrides_or_the_sections_themselves() -> None:
    from_file = settings_from_args(
        {"config": "configs/demo.yaml", "policy.name": "fixed"}
    )
    assert from_file.model.id == "demo"
    assert from_file.policy.name == "fixed"
    assert settings_from_args(minimal()).model.id == "m"


def test_a_missing_model_folder_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    settings = parse_settings(minimal(model={"target": str(tmp_path / "nowhere")}))
    with pytest.raises(SettingsError, match=r"model\.target: no such folder"):
        check_servable(settings)
