"""vLLM's own server is given what our replicas give their engines."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
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
    find_free_ports,
    is_listening,
    wait_until,
)
from tests.serving.test_settings import minimal

pytestmark = pytest.mark.filterwarnings(
    # Torch and vLLM warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

MODELS = ROOT / "configs" / "models"
PAIR = {"target": str(MODELS / "demo-target"), "draft": str(MODELS / "demo-draft")}
TARGET = {"target": PAIR["target"], "draft": None}

DEPLOYMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"policy": {"name": "none"}},
    "fixed": {"policy": {"name": "fixed", "draft_tokens": 2}},
    "sampled-drafts": {
        "policy": {"name": "fixed", "draft_sampling": "probabilistic"},
        "engine": {"per_request_metrics": "detailed"},
    },
    "ngram": {
        "model": TARGET,
        "policy": {
            "name": "fixed",
            "method": "ngram",
            "extra": {"prompt_lookup_max": 4},
        },
    },
    "gpu": {
        "policy": {"name": "fixed"},
        "engine": {
            "device": "gpu",
            "adapter": "on",
            "gpu_memory_utilization": 0.8,
            "tensor_parallel_size": 2,
        },
        "replicas": {"num_gpus": 1},
    },
    "classes": {
        "policy": {"name": "fixed", "classes": {"chat": {"priority": -1}}},
    },
    "many-settings": {
        "model": PAIR | {"trust_remote_code": True, "tokenizer": PAIR["target"]},
        "policy": {"name": "none"},
        "engine": {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 512,
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
            "extra": {
                "block_size": 32,
                "enable_chunked_prefill": False,
                "disable_log_stats": False,
                "enable_server_load_tracking": True,
                "override_generation_config": {"temperature": 0.5},
                "structured_outputs_config": {
                    "backend": "xgrammar",
                    "disable_any_whitespace": True,
                },
                "ignore_patterns": ["*.bin", "*.gguf"],
                "revision": None,
            },
        },
    },
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


def deployment(**sections: dict[str, Any]) -> Settings:
    """Settings of the demo pair."""
    return parse_settings(minimal(**{"model": PAIR, **sections}))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_vllm_alone_gets_the_arguments_of_our_engines_and_no_others(
    name: str, parse: Parse
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    settings = deployment(**DEPLOYMENTS[name])
    _, _, _, *flags = plain_command_of(leave_to_vllm(settings))
    given, nothing = parse(flags), parse(["--model", settings.model.target])

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


def test_both_count_what_the_prefix_cache_supplied() -> None:
    plain = leave_to_vllm(deployment(policy={"name": "none"}))
    assert engine_kwargs_of(plain)["enable_prompt_tokens_details"] is True
    assert "--enable-prompt-tokens-details" in plain_command_of(plain)


def test_vllm_runs_a_single_cpu_worker_where_our_replicas_run_it(parse: Parse) -> None:
    def executor(**engine: Any) -> str | None:
        settings = deployment(policy={"name": "none"}, engine=engine)
        found = parse(plain_command_of(leave_to_vllm(settings))[3:])
        backend: str | None = found.distributed_executor_backend
        return backend

    assert str(executor()).endswith(".UniProcExecutor")
    assert executor(tensor_parallel_size=2) is None
    assert executor(extra={"pipeline_parallel_size": 2}) is None


@pytest.mark.parametrize("value", [True, False])
def test_every_boolean_of_vllm_can_be_written_as_a_flag(
    value: bool, parse: Parse
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {
        field.name
        for kind in (AsyncEngineArgs, FrontendArgs)
        for field in dataclasses.fields(kind)
    }
    defaults = vars(parse([]))
    names = {
        name for name in known & defaults.keys() if defaults[name] in (True, False)
    }
    names = {name for name in names if isinstance(defaults[name], bool)}
    names |= {"enable_prefix_caching", "async_scheduling", "hf_token"}
    assert len(names) > 50
    given = vars(parse(list(flags_of(dict.fromkeys(sorted(names), value)))))
    assert {name for name in names if bool(given[name]) is not value} == set()


def test_what_only_we_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="vLLM alone has no policy tetris; set"):
        leave_to_vllm(deployment(policy={"name": "tetris"}))


def test_the_environment_is_that_of_a_replica() -> None:
    def env(**sections: dict[str, Any]) -> dict[str, str]:
        settings = deployment(policy={"name": "fixed"}, **sections)
        return plain_env_of(leave_to_vllm(settings))

    plain = env(replicas={"num_cpus": 2.5}, engine={"env": {"A": "b"}})
    assert plain["OMP_NUM_THREADS"] == "2"
    assert plain["A"] == "b"
    assert plain["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert plain["HF_HUB_OFFLINE"] == "1"
    assert env(replicas={"num_cpus": 0.5})["OMP_NUM_THREADS"] == "1"
    assert env(engine={"cpu_threads": 3})["OMP_NUM_THREADS"] == "3"


def test_the_command_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--config={DEMO_CONFIG}", "--policy=fixed", "--port=1234", "--print"]
    assert main(["vllm", *options, "--set=engine.env.A=b c"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    assert {"A=b c", "--port=1234", "--served-model-name=demo"} <= set(words)
    assert f"--model={MODELS / 'demo-target'}" in words


def chat(client: openai.OpenAI, text: str) -> openai.types.CompletionUsage:
    """Ask for one token; returns the usage."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
    )
    assert answer.usage is not None
    return answer.usage


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_alone_serves_the_deployment(tmp_path: Path) -> None:
    [port] = find_free_ports(1)
    options = [f"--config={DEMO_CONFIG}", "--policy=fixed", f"--port={port}"]
    command = Command.start(
        [str(BIN / "tetris-serve"), "vllm", *options], tmp_path / "vllm.log"
    )
    url = f"http://127.0.0.1:{port}"
    try:

        def answers() -> bool:
            assert command.process.poll() is None, command.output
            return is_listening(port)

        wait_until(answers, START_TIMEOUT_S)
        assert httpx.get(f"{url}/health", timeout=60, trust_env=False).is_success
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        long_text = "Count from 1 to 20, please. " * 30
        first, second = chat(client, long_text), chat(client, long_text)
        assert first.prompt_tokens_details is not None
        assert first.prompt_tokens_details.cached_tokens == 0
        assert second.prompt_tokens_details is not None
        assert second.prompt_tokens_details.cached_tokens > 0
        names = [" ".join(process.cmdline()) for process in command.descendants()]
        assert any("VLLM::EngineCore" in name for name in names)
        # Its only worker runs in the engine core, as it does in our replicas.
        assert not any("VLLM::Worker" in name for name in names)
    finally:
        command.end()
