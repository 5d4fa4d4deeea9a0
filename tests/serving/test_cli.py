"""The console command, and the ways to start and stop a deployment."""

import os
import pty
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import psutil
import pytest
import yaml

from loadtest.compare.processes import find_processes
from serving.app import check_access
from serving.cli import main
from serving.commands.up import with_access, with_board_text
from serving.settings.model import Settings, SettingsError, load_settings
from tests.serving.conftest import (
    BIN,
    DEMO_CONFIG,
    MODEL,
    ROOT,
    START_TIMEOUT_S,
    Command,
    Server,
    clean_environment,
    find_free_ports,
    is_listening,
    start_up_command,
    wait_until,
)

DRAIN_TOKENS = 400


@pytest.mark.parametrize("command", [[], ["up"], ["vllm"], ["doctor"], ["check"]])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: tetris-serve" in capsys.readouterr().out


def test_check_prints_what_the_engine_would_be_given(capsys):
    assert main(["check", str(DEMO_CONFIG), "--set", "policy.max_draft_tokens=5"]) == 0
    output = capsys.readouterr().out
    assert "settings are valid" in output
    assert "'num_speculative_tokens': 5" in output
    assert "model.draft: same tokenizer" in output


def test_errors_name_file_setting_and_fix(capsys):
    code = main(["check", str(DEMO_CONFIG), "--set", "replicas.maximum=3"])
    assert code == 2
    assert capsys.readouterr().err == (
        f"error: {DEMO_CONFIG}: replicas.maximum: unknown setting; did you mean max?\n"
    )


@pytest.mark.parametrize("option", ["--port=0", "--port=x", "--set=name"])
def test_malformed_options_are_refused(option, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["up", option])
    assert exit_.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_a_port_in_use_is_named_with_its_owner_before_anything_starts(capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert main(["up", f"--config={DEMO_CONFIG}", f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert f"http.port: {port} is in use by " in error
    assert f"pid {os.getpid()}" in error
    assert "--port" in error


def test_the_port_comes_from_the_environment_unless_given(capsys, monkeypatch):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setenv("PORT", str(port))
        assert main(["up", f"--config={DEMO_CONFIG}", "--port="]) == 2
    assert f"http.port: {port} is in use" in capsys.readouterr().err


def test_a_deployment_that_cannot_work_fails_before_anything_starts(capsys, tmp_path):
    options = ["up", f"--config={DEMO_CONFIG}"]
    assert main([*options, f"--set=model.draft={tmp_path}"]) == 2
    assert main([*options, "--set=engine.max_model_len=99999999"]) == 2
    assert main([*options, "--set=engine.kv_cache_memory_bytes=99999999999999"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "model.draft" in first
    assert "has no config.json" in first
    assert "engine.max_model_len: must be ≤" in second
    assert "lower engine.kv_cache_memory_bytes" in third


def stream_in_background(port: int) -> tuple[threading.Thread, list[str], list[str]]:
    """Start a long stream; returns when its first token is there."""
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    )
    stream = client.completions.create(
        model=MODEL,
        prompt="one two three",
        max_tokens=DRAIN_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    finish_reasons: list[str] = []
    usages: list[str] = []
    next(stream)

    def read() -> None:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                finish_reasons.append(chunk.choices[0].finish_reason)
            if chunk.usage:
                usages.append(str(chunk.usage.completion_tokens))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, finish_reasons, usages


def assert_gone(processes: list[psutil.Process], ports: list[int]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
    assert not any(is_listening(port) for port in ports)


def test_ctrl_c_while_a_model_is_converted_ends_quietly(capsys, monkeypatch):
    def press_ctrl_c(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("serving.commands.up.with_converted_models", press_ctrl_c)
    assert main(["up", f"--config={DEMO_CONFIG}"]) == 0
    assert capsys.readouterr().out == "\nStopped.\n"


@pytest.mark.parametrize(
    ("host", "given", "is_shown"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("10.0.0.7", None, False),
        ("127.0.0.1", False, False),
        ("0.0.0.0", True, True),
    ],
)
def test_drafts_are_shown_as_text_on_loopback_addresses_alone(host, given, is_shown):
    overrides = {"http.host": host, "http.board_text": given}
    settings = with_board_text(load_settings(DEMO_CONFIG, overrides))
    assert settings.http.board_text is is_shown


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_finishes_streams_leaves_nothing_and_a_second_start_works(
    ending_server, tmp_path
):
    server = ending_server
    output = server.command.output
    assert f"http://127.0.0.1:{server.port}/v1" in output
    assert "curl http" in output
    assert "from openai import OpenAI" in output
    assert f"http://127.0.0.1:{server.metrics_port}/metrics" in output
    family = server.command.descendants()
    assert "engine" in {role for role, _ in find_processes(server.command.process.pid)}

    thread, finish_reasons, usages = stream_in_background(server.port)
    assert server.command.stop(signal.SIGINT) == 0
    thread.join(60)
    assert finish_reasons == ["length"]
    assert usages == [str(DRAIN_TOKENS)]
    assert_gone(family, [server.port, server.metrics_port])

    settings = {"replicas.max": 1}
    second = start_up_command(tmp_path / "second.log", settings, server.port)
    try:
        answer = second.client().completions.create(model=MODEL, prompt="one")
        assert answer.choices
        family = second.command.descendants()
        assert second.command.stop(signal.SIGTERM) == 0
        assert_gone(family, [second.port, second.metrics_port])
    finally:
        second.command.end()


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_every_process_and_still_exits_with_0():
    port, dashboard_port, metrics_port = find_free_ports(3)
    args = [
        str(BIN / "tetris-serve"),
        "up",
        f"--config={DEMO_CONFIG}",
        f"--port={port}",
        f"--set=http.dashboard_port={dashboard_port}",
        f"--set=http.metrics_port={metrics_port}",
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(args[0], args, clean_environment())
    output = b""
    while b"engine: 1 starting" not in output:
        output += os.read(terminal, 4096)
    family = psutil.Process(pid).children(recursive=True)
    os.write(terminal, b"\x03")
    while b"Stopped." not in output:
        output += os.read(terminal, 4096)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_gone(family, [port, metrics_port])


@pytest.mark.ray
@pytest.mark.slow
def test_a_failing_engine_ends_the_start_with_its_reason(tmp_path):
    command = Command.start(
        [
            str(BIN / "tetris-serve"),
            "up",
            f"--config={DEMO_CONFIG}",
            f"--port={find_free_ports(1)[0]}",
            "--set=engine.quantization=awq",
        ],
        tmp_path / "up.log",
    )
    try:
        assert command.process.wait(START_TIMEOUT_S) == 1
    finally:
        command.end()
    reason = command.output.partition("error: ")[2].splitlines()[0]
    assert reason.endswith("Cannot find the config file for awq")


@pytest.mark.ray
@pytest.mark.slow
def test_serve_run_and_serve_deploy_work_and_a_redeploy_lets_streams_finish(tmp_path):
    port, dashboard_port = find_free_ports(2)
    content = yaml.safe_load((ROOT / "configs" / "serve" / "tiny.yaml").read_text())
    content["http_options"]["port"] = port
    content["applications"][0]["args"]["config"] = str(DEMO_CONFIG)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    # `serve run` starts Ray itself, but offers no choice of the dashboard's port.
    script = (
        "import ray, sys; from ray.serve.scripts import cli; "
        f"ray.init(address='local', dashboard_port={dashboard_port}); "
        f"sys.argv = ['serve', 'run', {str(file)!r}]; cli()"
    )
    command = Command.start(
        [sys.executable, "-c", script],
        tmp_path / "run.log",
        RAY_AUTH_MODE="disabled",
    )
    try:
        server = Server(command, port, 0)
        wait_until(server.is_healthy, START_TIMEOUT_S)

        thread, finish_reasons, usages = stream_in_background(port)
        content["applications"][0]["args"]["policy.name"] = "fixed"
        file.write_text(yaml.safe_dump(content))
        deploy = [str(BIN / "serve"), "deploy", str(file)]
        address = f"http://127.0.0.1:{dashboard_port}"
        env = clean_environment(RAY_AUTH_MODE="disabled")
        subprocess.run(
            [*deploy, "--address", address], cwd=ROOT, env=env, check=True, timeout=300
        )
        thread.join(300)
        assert finish_reasons == ["length"]
        assert usages == [str(DRAIN_TOKENS)]

        def redeployed() -> bool:
            details = httpx.get(
                f"{address}/api/serve/applications/", timeout=120, trust_env=False
            ).json()
            application = details["applications"]["tetris"]
            args = application["deployed_app_config"]["args"]
            return (
                args.get("policy.name") == "fixed"
                and application["status"] == "RUNNING"
            )

        wait_until(redeployed, START_TIMEOUT_S)
        answer = server.client().completions.create(model=MODEL, prompt="one")
        assert answer.choices
    finally:
        command.end()


def test_without_keys_only_this_machine_is_let_in(tmp_path):
    def decided(**http: str) -> Settings:
        given = {f"http.{name.replace('__', '.')}": one for name, one in http.items()}
        return with_access(load_settings(DEMO_CONFIG, given))

    check_access(decided())
    with pytest.raises(SettingsError, match="anybody who reaches the server"):
        check_access(decided(host="0.0.0.0"))
    check_access(decided(host="0.0.0.0", access__allow_anonymous="true"))
    with pytest.raises(SettingsError, match="keys_file"):
        check_access(decided(access__allow_anonymous="false"))
    missing = tmp_path / "keys.json"
    with pytest.raises(SettingsError, match=r"http\.access\.keys_file: .*keys\.json"):
        decided(access__keys_file=str(missing))
    missing.write_text("{}")
    check_access(decided(host="0.0.0.0", access__keys_file=str(missing)))
    with pytest.raises(SettingsError, match="remove one of the two"):
        decided(access__allow_anonymous="true", access__keys_file=str(missing))
