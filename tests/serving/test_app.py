"""How settings become engine arguments and replicas; without Ray, just the same."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from serving.app import build_app, check_servable, front_options_of, settings_from_args
from serving.contract import MovedNamesError
from serving.engine_args import engine_kwargs_of, replica_env_of
from serving.offline import start_arguments
from serving.settings.model import SettingsError
from tests.serving.test_settings import ROOT, deployment_of, minimal, pairs

GPU = "engine.device=gpu replicas.num_gpus=1"


def engine_kwargs(settings: str) -> dict[str, Any]:
    return engine_kwargs_of(deployment_of(settings))


def test_tetris_drafts_deeper_than_it_verifies():
    kwargs = engine_kwargs(
        "policy.name=tetris policy.draft_tokens=2 policy.max_draft_tokens=5 "
        "engine.max_num_seqs=7"
    )
    assert kwargs["speculative_config"] == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
        "num_speculative_tokens_per_batch_size": [[1, 7, 5]],
    }
    ours = {"policy": "tetris", "draft_tokens": 2, "max_draft_tokens": 5}
    assert kwargs["additional_config"]["tetris"].items() >= ours.items()
    assert kwargs["scheduler_cls"] == "serving.engine.cpu.scheduler.TetrisScheduler"
    assert kwargs["worker_cls"] == "serving.engine.cpu.worker.TetrisCPUWorker"


def test_audits_and_classes_reach_the_engine_and_priorities_its_queue():
    plain = engine_kwargs("policy.classes.chat={}")
    assert plain["additional_config"]["tetris"]["audit"] == 0.015
    assert "scheduling_policy" not in plain
    kwargs = engine_kwargs(
        "policy.audit=0 policy.classes.chat.weight=4 policy.classes.chat.priority=-1 "
        "policy.classes.chat.latency_target_ms=50"
    )
    given = kwargs["additional_config"]["tetris"]
    assert given["audit"] == 0.0
    assert given["classes"] == {
        "chat": {"weight": 4.0, "latency_target_ms": 50.0, "priority": -1}
    }
    assert kwargs["scheduling_policy"] == "priority"


def test_further_fields_of_a_method_and_arguments_of_an_engine_reach_vllm():
    kwargs = engine_kwargs(
        "model.draft=null policy.name=fixed policy.method=ngram "
        "policy.extra.prompt_lookup_max=4 engine.extra.block_size=32 "
        "engine.tool_call_parser=hermes"
    )
    assert "model" not in kwargs["speculative_config"]
    assert kwargs["speculative_config"]["prompt_lookup_max"] == 4
    assert kwargs["block_size"] == 32
    assert kwargs["tool_call_parser"] == "hermes"
    assert kwargs["enable_auto_tool_choice"] is True


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("", {"backend": "xgrammar"}),
        (".disable_any_whitespace=true", {"backend": "xgrammar"}),
        (".backend=guidance", {"backend": "guidance"}),
    ],
)
def test_no_first_request_decides_how_an_engine_reads_grammars(own, told):
    section = "engine.extra.structured_outputs_config"
    kwargs = engine_kwargs(own and section + own)
    assert told.items() <= kwargs["structured_outputs_config"].items()
    if "whitespace" in own:
        assert kwargs["structured_outputs_config"]["disable_any_whitespace"] is True


@pytest.mark.parametrize(
    ("settings", "has_adapter"),
    [
        ("policy.name=fixed", False),
        ("policy.name=fixed engine.adapter=on", True),
        ("policy.name=tetris", True),
    ],
)
def test_on_a_gpu_fixed_is_left_to_vllm_and_the_rest_runs_on_the_v2_runner(
    settings, has_adapter
):
    given = deployment_of(f"{GPU} {settings}")
    kwargs, env = engine_kwargs_of(given), replica_env_of(given)
    # The worker switches it on where it works; asked for here, vLLM would refuse to
    # start where it does not.
    assert "enable_adaptive_verification" not in kwargs["speculative_config"]
    assert ("scheduler_cls" in kwargs) == has_adapter
    assert (env.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "1") == has_adapter
    # By FlashInfer vLLM would sample with what nvcc compiles, which is seldom there.
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_RAY_PER_WORKER_GPUS" not in env
    shared = f"{GPU} {settings} engine.gpu_memory_utilization=0.4"
    env = replica_env_of(deployment_of(f"{shared} replicas.num_gpus=0.5"))
    assert env["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"
    if has_adapter:
        # Steps overlap there.
        assert kwargs["scheduler_cls"].endswith("gpu.scheduler.TetrisAsyncScheduler")
        assert kwargs["worker_cls"].endswith("gpu.worker.TetrisGPUWorker")


@pytest.mark.parametrize(
    ("max_num_seqs", "policy", "table"),
    [
        (64, "name=goodput max_draft_tokens=3", [[1, 1, 1], [2, 2, 2], [3, 64, 3]]),
        (2, "name=dynamic max_draft_tokens=4", [[1, 1, 3], [2, 2, 4]]),
        (1, "name=goodput max_draft_tokens=4", [[1, 1, 4]]),
        (64, "name=tetris", [[1, 64, 5]]),
    ],
)
def test_on_a_gpu_graphs_are_captured_for_every_depth_that_may_be_chosen(
    max_num_seqs, policy, table
):
    settings = [f"{GPU} engine.max_num_seqs={max_num_seqs}", *policy.split()]
    config = engine_kwargs(" policy.".join(settings))["speculative_config"]
    assert config["num_speculative_tokens_per_batch_size"] == table


@pytest.mark.parametrize(
    ("settings", "message"),
    pairs(
        f"{GPU} engine.adapter=off policy.name=tetris -> "
        r"engine\.adapter: off leaves .* set policy\.name: fixed",
        f"{GPU} policy.name=tetris policy.method=ngram model.draft=null -> "
        r"policy\.method: ngram reports no confidence on a GPU",
        f"{GPU} policy.name=goodput engine.extra.async_scheduling=false -> "
        r"engine\.extra\.async_scheduling: must not be off",
        "policy.name=tetris policy.method=dflash -> "
        r"policy\.method: dflash does not run on engine\.device: cpu",
        r"model.target=/no/where -> model\.target: no such folder",
    ),
)
def test_what_cannot_be_served_is_refused_with_its_remedy(settings, message):
    with pytest.raises(SettingsError, match=message):
        check_servable(deployment_of(settings))


@pytest.mark.parametrize(
    ("settings", "num_ours"),
    [
        ("policy.name=none", 0),
        # YAML takes these words for booleans.
        ("policy.name=fixed engine.adapter=off", 0),
        ("policy.name=fixed engine.adapter='off'", 0),
        ("policy.name=fixed engine.adapter=on", 3),
        ("policy.name=fixed engine.adapter=auto", 3),
    ],
)
def test_without_our_adapter_an_engine_is_vllms_own(settings, num_ours):
    kwargs = engine_kwargs(settings)
    ours = {"scheduler_cls", "worker_cls", "additional_config"} & kwargs.keys()
    assert len(ours) == num_ours
    assert ("speculative_config" in kwargs) == ("none" not in settings)
    assert (kwargs["per_request_spec_decode_metrics"] == "none") == ("none" in settings)


def test_a_cpu_replica_starts_with_intels_openmp_and_unbound_threads():
    env = replica_env_of(deployment_of("engine.cpu_threads=2 engine.env.A=b"))
    assert env["LD_PRELOAD"].split(":")[0].endswith("libiomp5.so")
    assert Path(env["LD_PRELOAD"].split(":")[0]).is_file()
    # Products compiled for one number of threads are wrong with another.
    assert env["OMP_NUM_THREADS"] == env["NUMBA_NUM_THREADS"] == "2"
    by_ray = replica_env_of(deployment_of("replicas.num_cpus=2.5"))
    assert "OMP_NUM_THREADS" not in by_ray
    assert by_ray["NUMBA_NUM_THREADS"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["A"] == "b"
    assert "TORCH_COMPILE_DISABLE" not in env
    # Where fronts have tried it within five seconds of a core.
    assert env["VLLM_REGEX_COMPILATION_TIMEOUT_S"] == "60"
    eager = replica_env_of(deployment_of("engine.enforce_eager=true"))
    assert eager["TORCH_COMPILE_DISABLE"] == "1"
    # Only deployments of local models run offline, as a front of one does below.
    assert "HF_HUB_OFFLINE" not in env


def test_replicas_have_a_slot_for_each_front_of_two_generations(monkeypatch):
    """During an update the old fronts and the new ones are connected."""
    # Asked for what it is, Ray would start.
    monkeypatch.setattr("ray.get_runtime_context", lambda: Namespace(runtime_env={}))
    # Of it the tokenizer is the fronts' business.
    monkeypatch.setattr("serving.app.gguf_files_of", lambda _: {"target": "x.gguf"})
    folder = str(ROOT / "configs" / "models" / "demo-target")
    fronts = "policy.name=none http.fronts.min=2 http.fronts.max=3"
    closed = f"model.target={folder} {fronts}"
    with pytest.raises(SettingsError, match="anybody who reaches the server"):
        build_app(deployment_of(closed))
    app = build_app(deployment_of(f"{closed} http.access.allow_anonymous=true"))
    front = app._bound_deployment
    assert front.name == "TetrisFront"
    # Ray's default of 5 would let requests wait where nothing of ours runs.
    assert front.max_ongoing_requests == 10_000
    (engines,) = front.init_args
    assert engines._bound_deployment.name == "TetrisEngine:m"
    assert engines._bound_deployment.init_kwargs["num_slots"] == 10
    assert front.init_kwargs["gguf_files"] == {"x.gguf": folder}


def test_build_reads_a_file_and_a_front_is_spared_what_is_meant_for_kernels():
    # A file with overrides, or the sections themselves.
    assert settings_from_args(minimal()).model.id == "m"
    given = {"config": "configs/tiny.yaml", "policy.name": "fixed"}
    settings = settings_from_args(given)
    assert (settings.model.id, settings.policy.name) == ("demo", "fixed")
    options = front_options_of(settings)["ray_actor_options"]
    variables = options["runtime_env"]["env_vars"]
    assert "LD_PRELOAD" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_a_ray_that_has_moved_a_name_is_refused_by_that_name(monkeypatch):
    monkeypatch.setattr("serving.app.check_servable", lambda _: None)
    moved = {"ray.exceptions": {"MovedAway": "this test"}}
    monkeypatch.setattr("serving.compat_ray.RAY", moved)
    words = r"(?s)Ray \S+ .*MovedAway is gone: this test"
    with pytest.raises(MovedNamesError, match=words):
        build_app(deployment_of("http.access.allow_anonymous=true"))


@pytest.mark.parametrize("setting", [{"max_model_len": 1}, {"adapter": "off"}])
def test_what_cannot_be_served_cannot_be_measured(setting):
    with pytest.raises(SettingsError, match=rf"engine\.{next(iter(setting))}"):
        start_arguments(minimal(engine=setting))
