"""The console command, and the ways to start and stop a deployment."""

import os
import pty
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from serving.app import check_access
from serving.cli import main
from serving.commands import drain, up
from serving.commands.console import Console
from serving.commands.own_machine import with_access, with_board_text
from serving.local.ports import find_free
from serving.settings.model import Settings, SettingsError, load_settings
from tests.serving.conftest import (
    DEMO_CONFIG,
    ROOT,
    START_TIMEOUT_S,
    Command,
    Server,
    clean_environment,
    is_listening,
    up_command,
)

NUM_TOKENS = 400


@pytest.mark.parametrize("command", [[], ["up"], ["vllm"], ["doctor"], ["check"]])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: tetris-serve" in capsys.readouterr().out


def test_check_prints_what_the_engine_would_be_given_or_names_file_setting_and_fix(
    capsys,
):
    check = ["check", str(DEMO_CONFIG), "--set"]
    assert main([*check, "policy.max_draft_tokens=5"]) == 0
    output = capsys.readouterr().out
    assert "settings are valid" in output
    assert "'num_speculative_tokens': 5" in output
    assert main([*check, "replicas.maximum=3"]) == 2
    assert capsys.readouterr().err == (
        f"error: {DEMO_CONFIG}: replicas.maximum: unknown setting; did you mean max?\n"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--port=0"], "must be"),
        (["--port=x"], "must be"),
        (["--set=name"], "must be"),
        (["a/model", "--config=x"], "--config: not allowed with argument MODEL"),
    ],
)
def test_malformed_options_are_refused(options, problem, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["up", *options])
    assert exit_.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("is_given", [True, False])
def test_a_port_in_use_is_named_with_its_owner_before_anything_starts(
    is_given, capsys, monkeypatch
):
    """Be it given, or that of the environment."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setenv("PORT", "1" if is_given else str(port))
        option = f"--port={port}" if is_given else "--port="
        assert main(["up", f"--config={DEMO_CONFIG}", option]) == 2
    error = capsys.readouterr().err
    assert f"http.port: {port} is in use by " in error
    assert f"pid {os.getpid()}" in error
    assert "--port" in error


def test_a_deployment_that_cannot_work_fails_before_anything_starts(capsys, tmp_path):
    for setting, reason in (
        (f"model.draft={tmp_path}", r"model\.draft: .* has no config\.json"),
        ("engine.max_model_len=99999999", "engine.max_model_len: must be ≤"),
        ("engine.kv_cache_memory_bytes=90Ti", "lower engine.kv_cache_memory_bytes"),
        (
            "replicas.num_cpus=1000",
            "1 replica.* want 1000 CPUs.*lower replicas.num_cpu",
        ),
    ):
        assert main(["up", f"--config={DEMO_CONFIG}", f"--set={setting}"]) == 2
        assert re.search(reason, capsys.readouterr().err)


@contextmanager
def long_stream(server: Server) -> Iterator[None]:
    """Check that a stream comes to its end whatever is done after its first token."""
    stream = server.stream(NUM_TOKENS, stream_options={"include_usage": True})
    next(stream)
    with ThreadPoolExecutor(1) as reader:
        rest = reader.submit(list, stream)
        yield
        *_, last, usage = rest.result(300)
    assert last.choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == NUM_TOKENS


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


def test_a_port_that_takes_privileges_is_said_to(capsys, monkeypatch):
    monkeypatch.setattr(up.ports, "is_free", lambda _host, port: port >= 1024)
    monkeypatch.setattr(up.ports, "owner_of", lambda _: None)
    assert main(["up", "--config", str(DEMO_CONFIG), "--port", "80"]) == 2
    assert (
        "80 is in use, or takes privileges; choose another" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "dashboard"), ("", "metrics")]
)
def test_a_port_near_the_last_that_is_in_use_is_named(capsys, host, name):
    with socket.socket() as other:
        other.bind((host, 65535))
        options = (f"--port={find_free('127.0.0.1', 18000)}", "--set")
        options += (f"http.{name}_port=65535",)
        assert main(["up", "--config", str(DEMO_CONFIG), *options]) == 2
    assert f"http.{name}_port: no free port from 65535 to" in capsys.readouterr().err


def test_a_file_that_nobody_may_read_is_named(capsys, tmp_path, monkeypatch):
    file = tmp_path / "secret.yaml"
    file.write_text(DEMO_CONFIG.read_text())

    def refuse(*_args: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(SettingsError, match=r"secret\.yaml: cannot be read: Perm"):
        load_settings(file)


def test_a_drain_goes_on_while_ray_does_not_answer(monkeypatch):
    """Ray drains by itself; its head may be evicted meanwhile."""
    monkeypatch.setattr(drain, "_POLL_S", 0.0)
    answers = iter([1, drain.DrainError("away"), 1, 0])

    def count_busy() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    wait, console = drain._wait_until_empty, Console()
    assert wait(count_busy, time.monotonic() + 60, console) == 0
    answers = iter([3, drain.DrainError("away")])
    assert wait(count_busy, time.monotonic(), console) == 3
    with pytest.raises(drain.DrainError):
        wait(count_busy, time.monotonic(), console)


def test_the_server_does_without_what_no_request_needs(monkeypatch, capsys):
    dead = ["dashboard"]
    found = SimpleNamespace(
        find_dead_processes=lambda: list(dead), revive=lambda name: name == "gcs_server"
    )
    more = iter(["gcs_server", "raylet"])
    monkeypatch.setattr(up.time, "sleep", lambda _: dead.append(next(more)))
    with pytest.raises(up.StartupError, match="raylet has died"):
        up._watch(found, Console())
    said = capsys.readouterr()
    assert (said.out + said.err).count("dashboard has died") == 1


def test_a_hang_up_stops_the_server_but_for_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with up._interruptible():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), up._interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_replica_that_finds_no_place_is_told_of_with_what_it_wants(monkeypatch):
    from ray import serve

    message = (
        "Deployment 'E' in application 'a' has 1 replicas that have taken more than "
        "30s to be scheduled. This may be due to waiting for the cluster to auto-scale "
        "or for a runtime environment to be installed. Resources required for each "
        'replica: {"CPU": 8.0}, total resources available: {"CPU": 2.0}. Use `ray '
        "status` for more details."
    )
    engines = SimpleNamespace(message=message, replica_states={"STARTING": 1})
    application = SimpleNamespace(status="DEPLOYING", deployments={"E": engines})
    status = SimpleNamespace(applications={"a": application})
    monkeypatch.setattr(serve, "status", lambda: status)
    told: list[str] = []
    with pytest.raises(up.StartupError, match=r"replica wants \{\"CPU\": 8.0\}, Ray"):
        up.wait_until_running("a", 0.0, told.append, lambda: None)
    assert "replicas.num_cpus" in told[-1]


def test_drafts_are_shown_as_text_on_loopback_addresses_alone():
    def is_shown(host: str, given: bool | None = None) -> bool | None:
        overrides = {"http.host": host, "http.board_text": given}
        return with_board_text(load_settings(DEMO_CONFIG, overrides)).http.board_text

    assert [*map(is_shown, ("127.0.0.1", "localhost", "::1"))] == [True] * 3
    assert [*map(is_shown, ("0.0.0.0", "10.0.0.7"))] == [False] * 2
    assert (is_shown("127.0.0.1", False), is_shown("0.0.0.0", True)) == (False, True)


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_finishes_streams_and_leaves_nothing(ending_server):
    server, output = ending_server, ending_server.command.output
    for told in (f":{server.port}/v1", f":{server.metrics_port}/metrics"):
        assert f"http://127.0.0.1{told}" in output
    assert "curl http" in output
    assert "from openai import OpenAI" in output
    family = server.command.descendants()
    with long_stream(server):
        assert server.command.stop(signal.SIGINT) == 0
    assert_gone(family, [server.port, server.metrics_port])


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_every_process_and_still_exits_with_0():
    args, port, metrics_port = up_command({})
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
    args, *_ = up_command({"engine.quantization": "awq"})
    with Command.start(args, tmp_path / "up.log") as command:
        assert command.process.wait(START_TIMEOUT_S) == 1
    reason = command.output.partition("error: ")[2].splitlines()[0]
    assert reason.endswith("Cannot find the config file for awq")


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
