"""Locust's side: users, shape, events. Give this file to `locust -f`.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
    ... --headless --load poisson:2 --duration 60 --records outcomes.jsonl
    ... --processes 4       (or --master and --worker on several machines)

The rows of Locust's statistics are explained at `loadtest.load.run._log`.
"""

import sys
from typing import Any

import gevent
from locust import LoadTestShape, User, constant, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtest.errors import LoadTestError
from loadtest.load.options import HEADER_VARIABLE, OPTIONS, add_option
from loadtest.load.run import EXIT_BAD_OPTIONS, LocustRun
from loadtest.load.session import Session

_SPAWN_PER_S = 1000.0
_PAUSE_AFTER_FAILURE_S = 0.5
"""Of a user in closed loop: a server that refuses at once would otherwise be asked
again hundreds of times a second, as no real client does."""

_runs: dict[Environment, LocustRun] = {}


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    group = parser.add_argument_group("streamed completions")
    for name in OPTIONS.keys() - {"header"}:
        add_option(group, name)
    # Not in the group, which knows no secrets.
    add_option(parser, "header", env_var=HEADER_VARIABLE, is_secret=True)


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    run = _runs[environment] = LocustRun(environment)
    if isinstance(environment.runner, WorkerRunner) or environment.web_ui is not None:
        return  # Options come from the master, or from the page.
    try:
        run.read_options()
    except LoadTestError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_OPTIONS)


class LoadShape(LoadTestShape):
    """The number of users over time: those of the load, or one a process."""

    def tick(self) -> tuple[int, float] | None:
        """Return users and spawn rate; None at the end."""
        run = _runs[self.runner.environment]
        # A run's first tick comes before Locust announces the test. Its state does not
        # tell: that is the same at the next tick if a test takes long to begin.
        is_first = self.runner.shape_last_tick is None
        if not run.prepare() if is_first else run.is_over:
            return None
        load = run.options.arrivals
        if load.is_open:
            return run.num_processes, _SPAWN_PER_S
        return load.users_at(run.now_s / run.options.duration), _SPAWN_PER_S


class StreamingUser(User):
    """One of many in a closed loop; in an open one that of its process."""

    host = ""
    wait_time = constant(0)

    def on_start(self) -> None:
        """Begin the first conversation; a worker that came late has no session."""
        self._session: Session | None = _runs[self.environment].session
        self._chat = None if self._session is None else self._session.chat()

    @task
    def send(self) -> None:
        """Send the next turn, or all arrivals, and wait for the end."""
        session = self._session
        if session is not None and session.is_open:
            session.run_arrivals()
            raise StopUser
        if session is None or self._chat is None or session.is_over:
            raise StopUser
        if not session.send(next(self._chat), session.now_s).is_ok:
            gevent.sleep(_PAUSE_AFTER_FAILURE_S)
