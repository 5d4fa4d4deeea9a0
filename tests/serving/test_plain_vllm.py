"""vLLM's own server is given what our replicas give their engines."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from serving.cli import main
from serving.engine_args import engine_kwargs_of
from serving.local.plain_vllm import (
    flags_of,
    leave_to_vllm,
    plain_command_of,
    plain_env_of,
)
from serving.settings.model import Settings, SettingsError, parse_settings
from tests.serving.conftest import (
    BIN,
    DEMO_CONFIG,
    MODEL,
    ROOT,
    START_TIMEOUT_S,
    Command,
    Server,
    find_free_ports,
    wait_until,
)
from tests.serving.test_settings import minimal, written

TARGET, DRAFT = (
    str(ROOT / "configs" / "models" / f"demo-{name}") for name in ("target", "draft")
)

DEPLOYMENTS = {
    "none": "policy.name=none",
    "fixed": "policy.name=fixed policy.draft_tokens=2",
    "sampled-drafts": "policy.name=fixed policy.draft_sampling=probabilistic "
    "engine.per_request_metrics=detailed",
    "ngram": "model.draft=null policy.name=fixed policy.method=ngram "
    "policy.extra.prompt_lookup_max=4",
    "gpu": "policy.name=fixed engine.device=gpu engine.adapter=on replicas.num_gpus=1 "
    "engine.gpu_memory_utilization=0.8 engine.tensor_parallel_size=2",
    "two-workers": "policy.name=none engine.extra.pipeline_parallel_size=2",
    "classes": "policy.name=fixed policy.classes.chat.priority=-1",
    "many-settings": f"""
        model.trust_remote_code=true model.tokenizer={TARGET} policy.name=none
        engine.enforce_eager=true engine.enable_prefix_caching=false
        engine.max_num_batched_tokens=512
        engine.tool_call_parser=hermes engine.reasoning_parser=qwen3
        engine.extra.block_size=32 engine.extra.enable_chunked_prefill=false
        engine.extra.disable_log_stats=false
        engine.extra.enable_server_load_tracking=true
        engine.extra.override_generation_config.temperature=0.5
        engine.extra.structured_outputs_config.backend=xgrammar
        engine.extra.structured_outputs_config.disable_any_whitespace=true
        engine.extra.ignore_patterns=['*.bin','*.gguf'] engine.extra.revision=null
    """,
}

# What `engine.adapter: off` takes away.
ADAPTER = {"scheduler_cls", "worker_cls", "additional_config"}
DEPTH_TABLE = "num_speculative_tokens_per_batch_size"

Parse = Callable[[Sequence[str]], argparse.Namespace]


@pytest.fixture(scope="module")
def parse() -> Parse:
    """The parser of `vllm serve`, which ends the process where it does not accept."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return lambda flags: parser.parse_args(list(flags))


def deployment(settings: str) -> Settings:
    pair = minimal(model={"target": TARGET, "draft": DRAFT})
    return parse_settings(pair, overrides=written(settings))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_vllm_alone_gets_the_arguments_of_our_engines_and_no_others(name, parse):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    settings = deployment(DEPLOYMENTS[name])
    _, _, _, *flags = plain_command_of(leave_to_vllm(settings))
    given, nothing = parse(flags), parse(["--model", settings.model.target])
    # A single CPU worker runs in the engine core, as it does in our replicas.
    is_single = str(given.distributed_executor_backend).endswith(".UniProcExecutor")
    assert is_single == (name not in {"gpu", "two-workers"})

    ours = engine_kwargs_of(settings)
    ours = {key: value for key, value in ours.items() if key not in ADAPTER}
    ours.get("speculative_config", {}).pop(DEPTH_TABLE, None)
    ours |= {
        "model": settings.model.target,
        "served_model_name": [settings.model.id],
        "distributed_executor_backend": given.distributed_executor_backend,
    }
    front = {field.name for field in dataclasses.fields(FrontendArgs)}
    engine = {key: value for key, value in ours.items() if key not in front}
    # Of what nobody gives, some defaults differ between the class and its parser.
    found = vars(AsyncEngineArgs.from_cli_args(given))
    expected = vars(AsyncEngineArgs.from_cli_args(nothing))
    expected |= {key: vars(AsyncEngineArgs(**engine))[key] for key in engine}
    for key, value in expected.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(found[key]):
            # The parser builds the object; given a mapping, the engine builds it later.
            expected[key] = type(found[key])(**value)
    assert found == expected

    expected_front = vars(nothing) | {key: ours[key] for key in front & ours.keys()}
    expected_front |= {"host": settings.http.host, "port": settings.http.port}
    for key in front:
        assert getattr(given, key) == expected_front[key], key


def test_what_only_we_have_is_refused_and_the_environment_is_that_of_a_replica():
    def env(settings: str) -> dict[str, str]:
        return plain_env_of(leave_to_vllm(deployment(f"policy.name=fixed {settings}")))

    with pytest.raises(SettingsError, match="vLLM alone has no policy tetris; set"):
        leave_to_vllm(deployment("policy.name=tetris"))
    # Whose variables test_app has; of CPUs Ray hands out shares.
    assert env("engine.env.A=b")["A"] == "b"
    for cpus, threads in (("2.5", "2"), ("0.5", "1")):
        plain = env(f"replicas.num_cpus={cpus}")
        assert plain["OMP_NUM_THREADS"] == plain["NUMBA_NUM_THREADS"] == threads
    assert env("engine.cpu_threads=3")["OMP_NUM_THREADS"] == "3"


def test_the_command_can_be_printed(capsys):
    options = [f"--config={DEMO_CONFIG}", "--policy=fixed", "--port=1234", "--print"]
    assert main(["vllm", *options, "--set=engine.env.A=b c"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    assert {"A=b c", "--port=1234", "--served-model-name=demo"} <= set(words)
    assert f"--model={TARGET}" in words


@pytest.mark.parametrize(
    "access",
    [
        ["--host=0.0.0.0"],
        ["--set=http.access.keys_file=keys.json"],
        ["--set=http.access.allow_anonymous=false"],
    ],
)
def test_whom_keys_keep_out_is_not_served(access, monkeypatch, capsys):
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("vLLM was started"))
    options = [f"--config={DEMO_CONFIG}", "--policy=fixed", *access]
    assert main(["vllm", *options]) == 2
    assert "http.access: vLLM's own server knows no keys" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_alone_serves_the_deployment(tmp_path):
    [port] = find_free_ports(1)
    options = [f"--config={DEMO_CONFIG}", "--policy=fixed", f"--port={port}"]
    vllm = [str(BIN / "tetris-serve"), "vllm", *options]
    with Command.start(vllm, tmp_path / "vllm.log") as command:
        server = Server(command, port, metrics_port=port)
        wait_until(
            lambda: server.health()[0] == 200 or command.process.poll() is not None,
            START_TIMEOUT_S,
        )
        assert command.process.poll() is None, command.output
        messages: Any = [{"role": "user", "content": "Count to 20, please. " * 30}]
        for is_second in (False, True):
            answer = server.client().chat.completions.create(
                model=MODEL, messages=messages, max_tokens=1
            )
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (cached > 0) == is_second
        names = [" ".join(process.cmdline()) for process in command.descendants()]
        assert any("VLLM::EngineCore" in name for name in names)
        # Its only worker runs in the engine core, as it does in our replicas.
        assert not any("VLLM::Worker" in name for name in names)


def test_every_boolean_of_vllm_can_be_written_as_a_flag(parse):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    kinds = (AsyncEngineArgs, FrontendArgs)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    defaults = vars(parse([]))
    names = {name for name in known if isinstance(defaults.get(name), bool)}
    names |= {"enable_prefix_caching", "async_scheduling", "hf_token"}
    assert len(names) > 50
    for value in (True, False):
        given = vars(parse(list(flags_of(dict.fromkeys(sorted(names), value)))))
        assert {name for name in names if bool(given[name]) is not value} == set()
