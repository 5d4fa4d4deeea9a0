"""How settings become engine arguments, Ray resources and replica environments."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from serving.app import build_app, check_servable, front_options_of, settings_from_args
from serving.contract import MovedNamesError
from serving.engine_args import engine_kwargs_of, replica_env_of
from serving.settings.model import SettingsError, parse_settings, parse_value
from tests.serving.test_settings import minimal

pytestmark = pytest.mark.filterwarnings(
    # Torch and Ray warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

ROOT = Path(__file__).resolve().parents[2]


def engine_kwargs(**sections: dict[str, Any]) -> dict[str, Any]:
    return engine_kwargs_of(parse_settings(minimal(**sections)))


def test_policy_none_starts_a_stock_engine_without_a_drafter() -> None:
    kwargs = engine_kwargs(policy={"name": "none"})
    assert not {"scheduler_cls", "worker_cls", "speculative_config"} & kwargs.keys()
    assert kwargs["per_request_spec_decode_metrics"] == "none"


def test_tetris_drafts_deeper_than_it_verifies() -> None:
    kwargs = engine_kwargs(
        policy={"name": "tetris", "draft_tokens": 2, "max_draft_tokens": 5},
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
        "max_draft_tokens": 5,
        "latency_target_ms": None,
        "params": {},
        "classes": {},
    }
    assert kwargs["scheduler_cls"] == "serving.engine.cpu.scheduler.TetrisScheduler"
    assert kwargs["worker_cls"] == "serving.engine.cpu.worker.TetrisCPUWorker"


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


def on_gpu(engine: dict[str, Any] | None = None, **policy: Any) -> dict[str, Any]:
    """Return sections of a deployment on one GPU."""
    return {
        "engine": {"device": "gpu", **(engine or {})},
        "replicas": {"num_gpus": 1},
        "policy": policy,
    }


def test_on_a_gpu_fixed_is_left_to_vllm_unless_the_adapter_is_asked_for() -> None:
    assert "scheduler_cls" not in engine_kwargs(**on_gpu(name="fixed"))
    kwargs = engine_kwargs(**on_gpu({"adapter": "on"}, name="fixed"))
    assert kwargs["scheduler_cls"].endswith("gpu.scheduler.TetrisAsyncScheduler")


@pytest.mark.parametrize("name", ["tetris", "dynamic", "goodput"])
def test_on_a_gpu_other_policies_run_on_the_adapter_for_the_v2_runner(
    name: str,
) -> None:
    kwargs = engine_kwargs(**on_gpu(name=name))
    assert kwargs["scheduler_cls"].endswith("gpu.scheduler.TetrisAsyncScheduler")
    assert kwargs["worker_cls"].endswith("gpu.worker.TetrisGPUWorker")
    # The worker switches it on where it works; asked for here, vLLM would refuse to
    # start where it does not.
    assert "enable_adaptive_verification" not in kwargs["speculative_config"]


def test_on_a_gpu_the_adapter_gets_an_executor_with_asynchronous_scheduling() -> None:
    settings = parse_settings(minimal(**on_gpu(name="goodput")))
    assert replica_env_of(settings)["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] == "1"
    plain = parse_settings(minimal(**on_gpu(name="fixed")))
    assert "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" not in replica_env_of(plain)


def test_on_a_gpu_graphs_are_captured_for_every_depth_that_may_be_chosen() -> None:
    def lengths(max_num_seqs: int, **policy: Any) -> list[list[int]]:
        kwargs = engine_kwargs(**on_gpu({"max_num_seqs": max_num_seqs}, **policy))
        table = kwargs["speculative_config"]["num_speculative_tokens_per_batch_size"]
        assert isinstance(table, list)
        return table

    assert lengths(64, name="goodput", max_draft_tokens=3) == [
        [1, 1, 1],
        [2, 2, 2],
        [3, 64, 3],
    ]
    assert lengths(2, name="dynamic", max_draft_tokens=4) == [[1, 1, 3], [2, 2, 4]]
    assert lengths(1, name="goodput", max_draft_tokens=4) == [[1, 1, 4]]
    assert lengths(64, name="tetris") == [[1, 64, 5]]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            on_gpu({"adapter": "off"}, name="tetris"),
            r"engine\.adapter: off leaves .* set policy\.name: fixed",
        ),
        (
            {"engine": {"adapter": "off"}, "policy": {"name": "goodput"}},
            r"engine\.adapter: off leaves .* no policy goodput",
        ),
        (
            {**on_gpu(name="tetris", method="ngram"), "model": {"draft": None}},
            r"policy\.method: ngram reports no confidence on a GPU",
        ),
        (
            on_gpu({"extra": {"async_scheduling": False}}, name="goodput"),
            r"engine\.extra\.async_scheduling: must not be off",
        ),
        (
            {"policy": {"name": "tetris", "method": "dflash"}},
            r"policy\.method: dflash does not run on engine\.device: cpu",
        ),
    ],
)
def test_what_no_adapter_can_do_is_refused_with_its_remedy(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_servable(parse_settings(minimal(**sections)))


def test_without_the_adapter_an_engine_is_vllms_own() -> None:
    kwargs = engine_kwargs(engine={"adapter": "off"}, policy={"name": "fixed"})
    assert not {"scheduler_cls", "worker_cls", "additional_config"} & kwargs.keys()


@pytest.mark.parametrize("adapter", ["off", "'off'", "on", "auto"])
def test_the_adapter_is_switched_by_words_that_yaml_takes_for_booleans(
    adapter: str,
) -> None:
    overrides = {"engine.adapter": parse_value(adapter), "policy.name": "fixed"}
    settings = parse_settings(minimal(), overrides=overrides)
    assert settings.engine.adapter == adapter.strip("'")
    assert ("scheduler_cls" in engine_kwargs_of(settings)) == ("off" not in adapter)


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


def test_replicas_have_a_slot_for_each_front_of_two_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During an update the old fronts and the new ones are connected."""
    # Asked for what it is, Ray would start.
    monkeypatch.setattr("ray.get_runtime_context", lambda: Namespace(runtime_env={}))
    # Of it the tokenizer is the fronts' business.
    monkeypatch.setattr("serving.app.gguf_files_of", lambda _: {"target": "x.gguf"})
    folder = str(ROOT / "configs" / "models" / "demo-target")
    settings = parse_settings(
        minimal(
            model={"target": folder},
            policy={"name": "none"},
            http={"fronts": {"min": 2, "max": 3}},
        )
    )
    front = build_app(settings)._bound_deployment
    assert front.name == "TetrisFront"
    # Ray's default of 5 would let requests wait where nothing of ours runs.
    assert front.max_ongoing_requests == 10_000
    (engines,) = front.init_args
    assert engines._bound_deployment.name == "TetrisEngine:m"
    assert engines._bound_deployment.init_kwargs["num_slots"] == 7
    assert front.init_kwargs["gguf_files"] == {"x.gguf": folder}


def test_a_fronts_process_is_spared_what_is_meant_for_kernels() -> None:
    settings = settings_from_args({"config": "configs/tiny.yaml"})
    options = front_options_of(settings)["ray_actor_options"]
    variables = options["runtime_env"]["env_vars"]
    assert "LD_PRELOAD" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_build_takes_a_file_with_overrides_or_the_sections_themselves() -> None:
    from_file = settings_from_args(
        {"config": "configs/tiny.yaml", "policy.name": "fixed"}
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


def test_a_ray_that_has_moved_a_name_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.app.check_servable", lambda _: None)
    moved = {"ray.exceptions": {"MovedAway": "this test"}}
    monkeypatch.setattr("serving.compat_ray.RAY", moved)
    with pytest.raises(
        MovedNamesError, match=r"(?s)Ray \S+ .*MovedAway is gone: this test"
    ):
        build_app(parse_settings(minimal()))
