"""Ties sessions to Locust's life: start, stop, statistics, workers.

A run begins in two steps. First it is prepared: options are read, and the workload is
loaded, by every worker. Only when that is done does Locust announce the test, and the
moment is fixed from which arrivals count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from loadtest.client.errors import LoadTestError
from loadtest.client.health import ClientSample
from loadtest.client.outcome import CLIENT_DROPPED, Outcome

from .options import OPTIONS, LoadOptions
from .session import Session

EXIT_BAD_OPTIONS = 2
_PREPARE, _PREPARED, _BEGIN = "tetris_prepare", "tetris_prepared", "tetris_begin"
_MAX_PREPARE_S = 300.0
_POLL_S = 0.05
_HEAD_START_S = 1.0
"""Between a master's start and the begin of the run, so that all workers are there."""

_SPARE_S = 10.0
"""After which a worker that says nothing is given up: several of its reports."""


class RequestFailureError(Exception):
    """A failed request as Locust counts it: by its kind alone."""


class LocustRun:
    """What the Locust file shares between its events, its shape and its users.

    Outcomes are made where users run: here, or in workers, whose reports bring them to
    the master, which keeps the records.

    Attributes:
        options: Of the run that was prepared last.
        session: What the users of this process send through, while a test runs.
        client: The latest that each of the client's processes said about itself.
        failure: Why the run could not begin, or had to end; empty if it did not.
        is_prepared: Set when the latest attempt to prepare a run is over.
    """

    def __init__(self, environment: Environment) -> None:
        """Listen to Locust's events."""
        self._environment, self._runner = environment, environment.runner
        self.options = LoadOptions(host="")
        self.session: Session | None = None
        self._prepared: Session | None = None
        self._epoch_s: float | None = None
        self._place: dict[str, Any] = {}
        self._workers: set[str] = set()
        self._idle_workers: set[str] = set()
        self._answers: dict[str, str] = {}
        self._to_report: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        self._stops_after_drain = not environment.stop_timeout
        self.client: dict[str, dict[str, Any]] = {}
        self.failure = ""
        self.is_prepared = Event()
        events = environment.events
        events.test_start.add_listener(self._on_start)
        events.test_stopping.add_listener(self._on_stopping)
        events.test_stop.add_listener(self._on_stop)
        events.report_to_master.add_listener(self._on_report_to_master)
        events.worker_report.add_listener(self._on_worker_report)
        self._is_master = isinstance(self._runner, MasterRunner)
        self._is_worker = isinstance(self._runner, WorkerRunner)
        if self._is_worker:
            self._runner.register_message(_PREPARE, self._on_prepare_message)
            self._runner.register_message(_BEGIN, self._on_begin_message)
        elif self._is_master:
            self._runner.register_message(_PREPARED, self._on_prepared_message)

    @property
    def num_processes(self) -> int:
        """Processes in which users run."""
        return max(1, self._runner.worker_count) if self._is_master else 1

    @property
    def has_ended(self) -> bool:
        """Whether nothing goes on any more: no test has begun, or Locust stopped it."""
        return self._epoch_s is None

    @property
    def now_s(self) -> float:
        """Seconds since the run began; 0 before and after it."""
        return 0.0 if self._epoch_s is None else time.time() - self._epoch_s

    @property
    def is_over(self) -> bool:
        """Whether the run is to be ended: all is sent, and all has been answered.

        Ending it earlier would lose what is in flight in Locust's workers, for whose
        last reports a master does not wait.
        """
        latest_s = self.options.duration + self.options.drain + _SPARE_S
        if self.failure or self.now_s >= latest_s:
            return True
        if self.session is not None:
            return self.session.is_idle
        return bool(self._workers) and self._idle_workers >= self._workers

    def read_options(self) -> LoadOptions:
        """Read Locust's options as they are now; the web page may have changed them."""
        parsed = self._environment.parsed_options
        values = {name: getattr(parsed, name) for name in OPTIONS}
        options = LoadOptions(self._environment.host or parsed.host or "", **values)
        options.check()
        return options

    def prepare(self) -> bool:
        """Get ready for a run with the options as they are now.

        Returns:
            Whether it can begin. If not, the user has been told why.
        """
        self.failure, self._environment.process_exit_code = "", None
        self._workers.clear()
        try:
            options = self.read_options()
            if self._is_master:
                self._prepare_workers(options)
            else:
                self._prepared = Session(options, self._take)
            # Of the last run workers have told all by now.
            if self._file is not None:
                self._file.close()
            self._file = None
            if options.records:
                path = Path(options.records)
                self._file = path.open("w", encoding="utf-8")
            self.options = options
        except (LoadTestError, OSError) as error:
            self._fail(str(error))
        self._idle_workers.clear()
        self.client.clear()
        if self._stops_after_drain:
            self._environment.stop_timeout = self.options.drain
        self.is_prepared.set()
        return not self.failure

    def _prepare_workers(self, options: LoadOptions) -> None:
        """Have all workers prepare, and wait for the last one."""
        asked = self._find_present()
        if not asked:
            raise LoadTestError("no worker is connected: start one, then try again")
        self._answers = {}
        for client_id in asked:
            self._runner.send_message(_PREPARE, asdict(options), client_id)
        deadline_s = time.monotonic() + _MAX_PREPARE_S
        # One that reads a large file is silent meanwhile, and Locust takes it for
        # missing until its next heartbeat.
        while not asked <= self._answers.keys() & self._find_present():
            gone = asked - set(self._runner.clients)
            if gone or time.monotonic() > deadline_s:
                silent = min(gone or asked - self._answers.keys() or asked)
                raise LoadTestError(f"worker {silent} does not answer; see its log")
            gevent.sleep(_POLL_S)
        for client_id, error in self._answers.items():
            if error:
                raise LoadTestError(f"worker {client_id}: {error}")
        self._workers = asked

    def _find_present(self) -> set[str]:
        """Return the workers that are there; Locust remembers missing ones."""
        clients = self._runner.clients.values()
        return {one.id for one in clients if one.state != STATE_MISSING}

    def _fail(self, why: str) -> None:
        sys.stderr.write(f"error: {why}\n")
        self.failure = why
        self._environment.process_exit_code = EXIT_BAD_OPTIONS
        # For the page's list of exceptions.
        self._runner.log_exception("load test", why, why)

    def _on_start(self, **_: Any) -> None:
        if self._is_master:
            self._epoch_s = time.time() + _HEAD_START_S
            for index, client_id in enumerate(sorted(self._workers)):
                place = {"index": index, "count": len(self._workers)}
                message = {"epoch_s": self._epoch_s, **place}
                self._runner.send_message(_BEGIN, message, client_id)
        elif self._prepared is None or (self._is_worker and not self._place):
            self._fail(
                "this worker came after the test had begun, and sends nothing: start "
                "the master with --expect-workers N"
                if self._is_worker
                else "a run begins with Start and its load, nothing else"
            )
            return
        else:
            self.session, self._prepared = self._prepared, None
            self.session.begin(**self._place)
            self._epoch_s = self.session.epoch_s
        run = {"epoch_s": self._epoch_s, "load": self.options.load}
        self._write([{"run": run | {"num_processes": max(1, len(self._workers))}}])

    def _on_stopping(self, **_: Any) -> None:
        # Locust lets users finish what they are at, for as long as a drain may take; an
        # open load's one user is at it until the end of the run.
        if self.session is not None:
            self.session.stop_sending()

    def _on_stop(self, **_: Any) -> None:
        if self.session is not None:
            self.session.close()
        self.session, self._epoch_s = None, None
        if self._is_worker:
            # All its users have ended, yet it would wait once more for as long as they
            # may take before it is there again. The next start brings the time anew.
            self._environment.stop_timeout = 0.0

    def _on_prepare_message(self, msg: Any, **_: Any) -> None:
        self.failure, self._place = "", {}
        answer: dict[str, Any] = {"error": ""}
        try:
            self.options = LoadOptions(**msg.data)
            self._prepared = Session(self.options, self._take)
        except (LoadTestError, OSError) as error:
            answer["error"] = str(error)
        # What is left to tell of the last run must not come after the next has begun.
        self._on_report_to_master(answer)
        self._runner.send_message(_PREPARED, answer)

    def _on_prepared_message(self, msg: Any, **_: Any) -> None:
        self._write(msg.data["tetris"])
        self._answers[msg.node_id] = msg.data["error"]

    def _on_begin_message(self, msg: Any, **_: Any) -> None:
        self._place = msg.data

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        data["tetris_idle"] = self.session is not None and self.session.is_idle
        data["tetris_failure"] = self.failure
        data["tetris"], self._to_report = self._to_report, []

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        why = data.get("tetris_failure")
        if why and client_id in self._workers and not self.failure:
            self._fail(f"worker {client_id}: {why}")
        if data.get("tetris_idle") and self.now_s > 0:
            self._idle_workers.add(client_id)
        self._write(data.get("tetris", ()))

    def _take(self, item: Outcome | ClientSample) -> None:
        if isinstance(item, Outcome):
            _log(self._environment, item, self.options)
        kind = "request" if isinstance(item, Outcome) else "client"
        line = {kind: item.as_dict()}
        if self._is_worker:
            self._to_report.append(line)
        else:
            self._write([line])

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            if "client" in line:
                self.client[line["client"]["process"]] = line["client"]
            if self._file is not None:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if self._file is not None:
            self._file.flush()


def _log(environment: Environment, outcome: Outcome, options: LoadOptions) -> None:
    """Add a request to Locust's statistics, in the rows of its workload.

    `CHAT` is the whole request and alone counts in the totals; its size is in output
    tokens. `TTFT`, `TPOT` and `ITL` are its parts in ms; the size of `TTFT` is prompt
    tokens. `GOOD` has once more the requests that met the targets, so that its requests
    per second are the goodput, and `CUT` those whose stream broke off.
    """
    if outcome.failure == CLIENT_DROPPED:
        return
    whole_ms, num_tokens = outcome.e2e_ms or outcome.waited_ms, outcome.output_tokens
    targets = options.ttft_target_ms or None, options.tpot_target_ms or None
    for method, values, size in (
        ("TTFT", [outcome.ttft_ms], outcome.prompt_tokens or 0),
        ("TPOT", [outcome.tpot_ms], 0),
        ("ITL", outcome.gaps_ms, 0),
        ("GOOD", [whole_ms] if outcome.meets(*targets) else [], num_tokens),
        ("CUT", [whole_ms] if outcome.is_cut else [], num_tokens),
    ):
        row = environment.stats.get(outcome.workload, method)
        for value in values:
            if value is not None:
                row.log(value, size)
    environment.events.request.fire(
        request_type="CHAT",
        name=outcome.workload,
        response_time=whole_ms,
        response_length=num_tokens,
        exception=outcome.failure and RequestFailureError(outcome.failure),
        context={},
    )
