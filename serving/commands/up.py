"""`tetris-serve up`: one deployment on a Ray instance of its own, until Ctrl-C."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

from serving.app import build_app, check_access, check_servable
from serving.commands.console import Console, complain
from serving.commands.doctor import check_room
from serving.commands.own_machine import base_url_of, with_access, with_board_text
from serving.contract import MovedNamesError
from serving.local import ports
from serving.local.haproxy import own_haproxy
from serving.local.local_ray import (
    DISPENSABLE,
    LocalRay,
    prepare_environment,
    token_file,
)
from serving.local.logs import find_root_causes
from serving.local.startup import (
    StartupError,
    wait_until_answering,
    wait_until_running,
)
from serving.settings.gguf_models import with_converted_models
from serving.settings.model import Environment, Settings, SettingsError
from serving.settings.number_format import with_fast_format

APP_NAME: Final = "tetris"

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a supervisor's request, and the closing of the terminal."""

_WATCH_PERIOD_S: Final = 1.0
_ANSWER_TIMEOUT_S: Final = 60.0
_FIRST_UNPRIVILEGED: Final = 1024
_EXIT_FAILED: Final = 1
_EXIT_FORCED: Final = 130


def up(settings: Settings) -> int:
    """Serve until interrupted.

    Args:
        settings: The deployment; `http` gives the addresses.

    Returns:
        The process's exit code: 0 after a request to stop, 1 if the deployment failed,
        130 if a second Ctrl-C cut the draining of running requests short.

    Raises:
        SettingsError: The deployment cannot work or a port is in use; nothing has been
            started.
    """
    console = Console()
    try:
        with _interruptible():
            settings = with_converted_models(settings, console.step)
        settings = with_fast_format(settings, lambda note: console.step(str(note)))
    except KeyboardInterrupt:
        console.say("\nStopped.")
        return 0
    settings = with_access(with_board_text(settings))
    check_servable(settings)
    check_access(settings)
    _check_room(settings)
    # Ray, vLLM and httpx configure loggers of their own in this process; the logs
    # that matter are those of the replicas, in Ray's log folder.
    logging.disable(logging.INFO)
    ray_instance = _claim_ports(settings)
    taken = {settings.http.port, ray_instance.dashboard_port, ray_instance.metrics_port}
    with own_haproxy(settings.http.host, frozenset(taken)):
        return _serve(settings, ray_instance, console)


def _serve(settings: Settings, ray_instance: LocalRay, console: Console) -> int:
    exit_code = _EXIT_FAILED
    ready = False
    try:
        with _interruptible():
            try:
                _start(settings, ray_instance, console)
                _announce(settings, ray_instance, console)
                ready = True
                _watch(ray_instance, console)
            except KeyboardInterrupt:
                console.say(
                    "\nStopping. Running requests may finish; Ctrl-C ends them."
                )
                exit_code = _drain(settings) if ready else 0
            except StartupError as error:
                _explain(error, ray_instance)
    except KeyboardInterrupt:
        # A second one came before the first was dealt with.
        exit_code = _EXIT_FORCED
    finally:
        with _uninterruptible():
            ray_instance.stop()
    console.say("Stopped.")
    return exit_code


def _check_room(settings: Settings) -> None:
    problems = [str(f) for f in check_room(settings) if f.severity == "error"]
    if problems:
        raise SettingsError(problems)


def _claim_ports(settings: Settings) -> LocalRay:
    http = settings.http
    try:
        http_is_free = ports.is_free(http.host, http.port)
    except ValueError as error:
        raise SettingsError([f"http.host: {error}; set 127.0.0.1"]) from None
    if not http_is_free:
        owner = ports.owner_of(http.port)
        why = f"is in use{f' by {owner}' if owner else ''}"
        if owner is None and http.port < _FIRST_UNPRIVILEGED:
            why += ", or takes privileges"
        above = min(max(http.port + 1, _FIRST_UNPRIVILEGED), 65000)
        raise SettingsError(
            [
                f"http.port: {http.port} {why}; choose another one, e.g. --port "
                f"{ports.find_free(http.host, above)}"
            ]
        )
    taken = [http.port]
    for name, host in (("dashboard_port", "127.0.0.1"), ("metrics_port", "0.0.0.0")):
        try:
            taken.append(ports.find_free(host, getattr(http, name), frozenset(taken)))
        except ValueError as error:
            raise SettingsError([f"http.{name}: {error}; choose another one"]) from None
    _, dashboard, metrics = taken
    return LocalRay(dashboard, metrics, Environment.read().redis)


def _start(settings: Settings, ray_instance: LocalRay, console: Console) -> None:
    console.step("starting Ray")
    # Ray reads its environment once, on import.
    prepare_environment(Environment.read())
    imports = threading.Thread(target=_import_application, daemon=True)
    imports.start()
    try:
        ray_instance.start()
    except Exception as error:
        raise StartupError(f"Ray did not start: {error}") from error
    from ray import serve

    # Ray has just installed signal handlers of its own.
    _install_handlers()
    console.step("starting Ray Serve")
    serve.start(
        http_options={
            "host": settings.http.host,
            "port": settings.http.port,
            "keep_alive_timeout_s": settings.http.keep_alive_timeout_s,
        },
        proxy_location="HeadOnly",
    )
    imports.join()
    console.step(f"starting {settings.model.id} with policy {settings.policy.name}")
    try:
        application = build_app(settings)
    except MovedNamesError as error:
        raise StartupError(str(error)) from error
    serve.run_many(
        [serve.RunTarget(application, name=APP_NAME)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )

    def check_alive() -> None:
        for dead in ray_instance.find_dead_processes():
            if dead not in DISPENSABLE:
                raise StartupError(f"Ray's {dead} has died; see {ray_instance.log_dir}")

    wait_until_running(
        APP_NAME, settings.replicas.start_timeout_s, console.step, check_alive
    )
    console.step("waiting for the first token")
    wait_until_answering(
        base_url_of(settings), settings.model.id, _ANSWER_TIMEOUT_S, check_alive
    )


def _announce(settings: Settings, ray_instance: LocalRay, console: Console) -> None:
    base_url, model = base_url_of(settings), settings.model.id
    dashboard = f"http://127.0.0.1:{ray_instance.dashboard_port}"
    board = (
        f"  chat       {base_url}/   in a browser\n  board      {base_url}/board\n"
        if settings.http.board
        else ""
    )
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    key = "KEY" if settings.http.access.keys_file else ""
    headers = "-H 'Content-Type: application/json'"
    if key:
        headers += f" -H 'Authorization: Bearer {key}'"
    console.say(
        f"""
Ready after {console.elapsed_s:.0f} s.

  endpoint   {base_url}/v1   model {model}, policy {settings.policy.name}
{board}  dashboard  {dashboard}   token in {token_file()}
  metrics    http://127.0.0.1:{ray_instance.metrics_port}/metrics
  logs       {ray_instance.log_dir}

curl {base_url}/v1/chat/completions {headers} -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key="{key or "none"}")
stream = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Hi"}}], stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)

Ctrl-C stops everything."""
    )


def _watch(ray_instance: LocalRay, console: Console) -> NoReturn:
    gone: set[str] = set()
    while True:
        for dead in ray_instance.find_dead_processes():
            if dead in DISPENSABLE:
                if dead not in gone:
                    console.say(f"Ray's {dead} has died; requests do without it.")
                gone.add(dead)
            elif ray_instance.revive(dead):
                console.say(f"Ray's {dead} had died and was started again.")
            else:
                raise StartupError(f"Ray's {dead} has died")
        time.sleep(_WATCH_PERIOD_S)


def _drain(settings: Settings) -> int:
    """Let running requests finish; Serve itself goes with Ray.

    Returns:
        The exit code: 0, or 130 if the user would not wait.
    """
    from ray import serve

    deadline_s = time.monotonic() + settings.replicas.drain_timeout_s
    try:
        with contextlib.suppress(Exception):
            serve.delete(APP_NAME, _blocking=False)
            while APP_NAME in serve.status().applications:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.2)
    except KeyboardInterrupt:
        return _EXIT_FORCED
    return 0


def _explain(error: StartupError, ray_instance: LocalRay) -> None:
    complain(f"error: {error}")
    try:
        log_dir = ray_instance.log_dir
    except AttributeError:  # Ray itself did not start.
        return
    causes = find_root_causes(log_dir)
    if causes:
        complain("The engine's processes said:")
    for cause in causes:
        complain(f"  {cause}")
    complain(f"All logs are in {log_dir}")


def _import_application() -> None:
    """Import what takes seconds, while Ray's processes start."""
    # Whatever is wrong with them, `build_app` says better.
    with contextlib.suppress(ImportError):
        import serving.front.app
        import serving.replica.server  # noqa: F401 - imported for the time it takes


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the signals that ask us to stop into KeyboardInterrupt.

    That includes SIGINT where it is ignored, as shells do for background jobs.
    """
    before = [(number, signal.getsignal(number)) for number in _STOP_SIGNALS]
    _install_handlers()
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterruptible() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in _STOP_SIGNALS]
    for number, _ in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _install_handlers() -> None:
    for number in _STOP_SIGNALS:
        # Under nohup nobody wants to be told that the terminal is closed.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
