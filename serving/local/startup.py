"""Watch an application start, and tell of its progress."""

import re
import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from serving.app import ENGINES
from serving.local.logs import EXCEPTION

_POLL_S: Final = 0.5
_MAX_EXPLANATION_LINES: Final = 4
_UNPLACED = re.compile(
    r"to be scheduled.*Resources required for each replica: (.*), "
    r"total resources available: (.*?)\. "
)
_PYDANTIC_TAIL = re.compile(r" \[type=\w+, input_value=.*", re.DOTALL)


class StartupError(RuntimeError):
    """The application did not come up."""


def wait_until_running(
    app_name: str,
    timeout_s: float,
    report: Callable[[str], None],
    check_alive: Callable[[], None],
) -> None:
    """Wait until Serve calls an application running.

    The first failure of a replica ends the wait: what keeps an engine from starting
    is hardly ever cured by Serve's next attempt, which takes as long again.

    Args:
        app_name: Name of the Serve application.
        timeout_s: Longest wait, seconds.
        report: Called with a short line whenever the progress changes.
        check_alive: Called often; raises if Ray itself has died.

    Raises:
        StartupError: It failed, or took too long.
    """
    from ray import serve

    deadline_s = time.monotonic() + timeout_s
    while True:
        check_alive()
        application = serve.status().applications.get(app_name)
        if application is not None:
            report(_unplaced(application) or _progress(application))
            if application.status == "RUNNING":
                return
            failure = _failure(application)
            if failure is not None:
                raise StartupError(failure)
        if time.monotonic() > deadline_s:
            what = _unplaced(application) or (
                "set replicas.start_timeout_s higher if the model takes longer to load"
            )
            raise StartupError(f"not running after {timeout_s:.0f} s; {what}")
        time.sleep(_POLL_S)


def wait_until_answering(
    base_url: str, model: str, timeout_s: float, check_alive: Callable[[], None]
) -> None:
    """Wait until the endpoint returns a token.

    Raises:
        StartupError: It does not, within the time given.
    """
    deadline_s = time.monotonic() + timeout_s
    problem = "no answer"
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    with httpx.Client(trust_env=False, timeout=timeout_s) as client:
        while time.monotonic() < deadline_s:
            check_alive()
            try:
                response = client.post(f"{base_url}/v1/completions", json=body)
                # Running replicas are there; a key to ask them with is not.
                if response.is_success or response.status_code == 401:
                    return
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            time.sleep(_POLL_S)
    raise StartupError(f"{base_url} does not answer ({problem})")


def _progress(application: Any) -> str:
    states = [
        f"{_role(name)}: {', '.join(_states(deployment)) or 'waiting'}"
        for name, deployment in sorted(application.deployments.items())
    ]
    return "; ".join(states) or "deploying"


def _unplaced(application: Any) -> str:
    """Return Serve's word on a replica that found no place for long, or ''."""
    for name, deployment in (application.deployments if application else {}).items():
        found = _UNPLACED.search(deployment.message)
        if found is not None:
            return (
                f"no place for {name}: each replica wants {found[1]}, Ray has "
                f"{found[2]}; lower replicas.num_cpus, replicas.num_gpus, replicas.min "
                "or engine.tensor_parallel_size"
            )
    return ""


def _role(deployment_name: str) -> str:
    return "engine" if deployment_name.startswith(ENGINES) else "endpoint"


def _states(deployment: Any) -> list[str]:
    return [
        f"{count} {str(getattr(state, 'value', state)).lower()}"
        for state, count in sorted(deployment.replica_states.items())
        if count
    ]


def _failure(application: Any) -> str | None:
    for name, deployment in application.deployments.items():
        # Before it gives up, Serve tells of failed attempts in the message only.
        if "failed to start" in deployment.message:
            return f"{name}: {_last_exception(deployment.message)}"
    if application.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
        return _last_exception(application.message)
    return None


def _last_exception(message: str) -> str:
    """Return the last exception of a traceback, with the lines that explain it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if EXCEPTION.match(line)]
    if not starts:
        return lines[-1] if lines else "failed without a message"
    text = " ".join(lines[starts[-1] : starts[-1] + _MAX_EXPLANATION_LINES])
    return _PYDANTIC_TAIL.sub("", text)
