"""Ties sessions to Locust's life: start, stop, statistics, distributed workers.

A run begins in two steps. First it is prepared: options are read, and the workload is
loaded, by every worker. Only when that is done does Locust announce the test, and the
moment is fixed from which arrivals count.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from typing import IO, Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from .client_health import ClientSample
from .errors import LoadTestError
from .live import LiveFigures
from .locust_rows import log_outcome
from .options import LoadOptions, read_options
from .outcome import Outcome
from .session import PreparedSession, Session, prepare_session

_PREPARE_MESSAGE = "tetris_prepare"
_PREPARED_MESSAGE = "tetris_prepared"
_START_MESSAGE = "tetris_start"

_MAX_PREPARE_S = 300.0
_POLL_S = 0.05
_HEAD_START_S = 1.0
"""Between a master's start and the begin of the run, so that all workers are there."""

_SPARE_S = 10.0
"""After which a worker that says nothing is given up: several of its reports."""

_MAX_SAMPLES = 600
EXIT_BAD_OPTIONS = 2


class LocustRun:
    """What the Locust file shares between its events, its shape and its users.

    Outcomes are made where users run: here, or in workers, whose reports bring them.
    They are kept where the figures are shown: here, or in the master. After a run its
    figures stay until the next one has been prepared.

    Attributes:
        live: Figures of the run.
        client_samples: The latest that the client's processes said about themselves.
        failure: Why the run could not begin, or had to end; empty if it did not.
        is_prepared: Set when the latest attempt to prepare a run is over.
    """

    def __init__(self, environment: Environment) -> None:
        """Listen to Locust's events."""
        self._environment = environment
        self._options: LoadOptions | None = None
        self._prepared: PreparedSession | None = None
        self._session: Session | None = None
        self._epoch_s: float | None = None
        self._stopped_s = 0.0
        self._index, self._count = 0, 1
        self._workers: set[str] = set()
        self._idle_workers: set[str] = set()
        self._answers: dict[str, str] = {}
        self._to_report: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        self._stops_after_drain = not environment.stop_timeout
        self.live = LiveFigures()
        self.client_samples: deque[ClientSample] = deque(maxlen=_MAX_SAMPLES)
        self.failure = ""
        self.is_prepared = Event()
        listeners = environment.events
        listeners.test_start.add_listener(self._on_start)
        listeners.test_stopping.add_listener(self._on_stopping)
        listeners.test_stop.add_listener(self._on_stop)
        listeners.report_to_master.add_listener(self._on_report_to_master)
        listeners.worker_report.add_listener(self._on_worker_report)
        runner = environment.runner
        if isinstance(runner, WorkerRunner):
            runner.register_message(_PREPARE_MESSAGE, self._on_prepare_message)
            runner.register_message(_START_MESSAGE, self._on_start_message)
        elif isinstance(runner, MasterRunner):
            runner.register_message(_PREPARED_MESSAGE, self._on_prepared_message)

    @property
    def options(self) -> LoadOptions:
        """Options of the run that was prepared last."""
        if self._options is None:
            raise RuntimeError("no run has been prepared")
        return self._options

    @property
    def session(self) -> Session:
        """What the users of this process send through."""
        if self._session is None:
            raise RuntimeError("users run only between a test's start and its stop")
        return self._session

    @property
    def num_processes(self) -> int:
        """Processes in which users run."""
        runner = self._environment.runner
        is_master = isinstance(runner, MasterRunner)
        return max(1, runner.worker_count) if is_master else 1

    @property
    def has_ended(self) -> bool:
        """Whether nothing goes on any more: no test has begun, or Locust stopped it."""
        return self._session is None and self._epoch_s is None

    @property
    def now_s(self) -> float:
        """Seconds since the run began; 0 before, and after it the time it took."""
        if self._session is not None:
            return self._session.now_s
        return self._stopped_s if self._epoch_s is None else time.time() - self._epoch_s

    @property
    def is_over(self) -> bool:
        """Whether the run is to be ended: all is sent, and all has been answered.

        Ending it earlier would lose what is in flight in Locust's workers, for whose
        last reports a master does not wait.
        """
        if self.failure:
            return True
        latest_s = self.options.duration_s + self.options.drain_s + _SPARE_S
        if self.now_s >= latest_s:
            return True
        if self._session is not None:
            return self._session.is_idle
        return bool(self._workers) and self._idle_workers >= self._workers

    def read_options(self) -> LoadOptions:
        """Read Locust's options as they are now; the web page may have changed them."""
        environment = self._environment
        host = environment.host or environment.parsed_options.host
        return read_options(environment.parsed_options, host)

    def prepare(self) -> bool:
        """Get ready for a run with the options as they are now.

        Nothing of the run before is left then: neither what it was asked to do nor how
        it ended.

        Returns:
            Whether it can begin. If not, the user has been told why.
        """
        runner = self._environment.runner
        self.failure, self._environment.process_exit_code = "", None
        self._workers.clear()
        try:
            options = self.read_options()
            if isinstance(runner, MasterRunner):
                self._prepare_workers(runner, options)
            else:
                self._prepared = prepare_session(options)
            self._forget_last_run(options)
        except (LoadTestError, OSError) as error:
            self._fail(str(error))
        self.is_prepared.set()
        return not self.failure

    def _prepare_workers(self, runner: Any, options: LoadOptions) -> None:
        """Have all workers prepare, and wait for the last one."""
        asked = _find_present(runner)
        if not asked:
            raise LoadTestError("no worker is connected: start one, then try again")
        message = {
            "host": options.host,
            "options": vars(self._environment.parsed_options),
        }
        self._answers = {}
        for client_id in asked:
            runner.send_message(_PREPARE_MESSAGE, message, client_id)
        deadline_s = time.monotonic() + _MAX_PREPARE_S
        # One that reads a large file is silent meanwhile, and Locust takes it for
        # missing until its next heartbeat.
        while not asked <= self._answers.keys() & _find_present(runner):
            gone = asked - set(runner.clients)
            if gone or time.monotonic() > deadline_s:
                silent = min(gone or asked - self._answers.keys() or asked)
                raise LoadTestError(f"worker {silent} does not answer; see its log")
            gevent.sleep(_POLL_S)
        for client_id, error in self._answers.items():
            if error:
                raise LoadTestError(f"worker {client_id}: {error}")
        self._workers = asked

    def _forget_last_run(self, options: LoadOptions) -> None:
        # Workers have told their last of it by now.
        if self._file is not None:
            self._file.close()
            self._file = None
        if options.records is not None:
            self._file = options.records.open("w", encoding="utf-8")
        self._options = options
        self._stopped_s = 0.0
        self._idle_workers.clear()
        self.client_samples.clear()
        self.live = LiveFigures(options.ttft_target_ms, options.tpot_target_ms)
        if self._stops_after_drain:
            self._environment.stop_timeout = options.drain_s

    def _fail(self, why: str) -> None:
        sys.stderr.write(f"error: {why}\n")
        self.failure = why
        self._environment.process_exit_code = EXIT_BAD_OPTIONS
        # For the page's list of exceptions.
        self._environment.runner.log_exception("load test", why, why)

    def _on_start(self, **_: Any) -> None:
        try:
            self._start()
        except LoadTestError as error:
            # Locust would log it and go on.
            self._fail(str(error))

    def _start(self) -> None:
        runner = self._environment.runner
        if isinstance(runner, MasterRunner):
            self._epoch_s = time.time() + _HEAD_START_S
            for index, client_id in enumerate(sorted(self._workers)):
                message = {
                    "epoch_s": self._epoch_s,
                    "index": index,
                    "count": len(self._workers),
                }
                runner.send_message(_START_MESSAGE, message, client_id)
        else:
            self._start_session(isinstance(runner, WorkerRunner))
        if self._file is not None:
            epoch_s = self._epoch_s if self._session is None else self._session.epoch_s
            run = {
                "epoch_s": epoch_s,
                "load": self.options.load.name,
                "num_processes": max(1, len(self._workers)),
            }
            self._write({"run": run})

    def _start_session(self, is_worker: bool) -> None:
        prepared, self._prepared = self._prepared, None
        if is_worker and (prepared is None or self._epoch_s is None):
            raise LoadTestError(
                "this worker came after the test had begun, and sends nothing: start "
                "the master with --expect-workers N"
            )
        if prepared is None:
            raise LoadTestError("a run begins with Start and its load, nothing else")
        self._session = Session(
            prepared,
            on_outcome=self._on_outcome,
            on_sample=self._on_sample,
            epoch_s=self._epoch_s,
            index=self._index,
            count=self._count,
        )

    def _on_stopping(self, **_: Any) -> None:
        # Locust lets users finish what they are at, for as long as a drain may take; an
        # open load's one user is at it until the end of the run.
        if self._session is not None:
            self._session.stop_sending()

    def _on_stop(self, **_: Any) -> None:
        if self.has_ended:
            return  # It never began.
        # The last seconds are Locust's own: nothing was to be sent in them.
        sent_s = min(self.now_s, self.options.duration_s)
        self._stopped_s = max(sent_s, self.live.last_end_s)
        if self._session is not None:
            self._session.close()
        self._session, self._epoch_s = None, None
        if isinstance(self._environment.runner, WorkerRunner):
            # All its users have ended, yet it would wait once more for as long as they
            # may take before it is there again. The next start brings the time anew.
            self._environment.stop_timeout = 0.0

    def _on_prepare_message(self, msg: Any, **_: Any) -> None:
        self.failure, self._epoch_s = "", None
        answer: dict[str, Any] = {"error": ""}
        try:
            options = read_options(Namespace(**msg.data["options"]), msg.data["host"])
            self._options, self._prepared = options, prepare_session(options)
        except (LoadTestError, OSError) as error:
            answer["error"] = str(error)
        # What is left to tell of the last run must not come after the next has begun.
        self._on_report_to_master(answer)
        self._environment.runner.send_message(_PREPARED_MESSAGE, answer)

    def _on_prepared_message(self, msg: Any, **_: Any) -> None:
        self._keep_lines(msg.data["tetris"])
        self._answers[msg.node_id] = msg.data["error"]

    def _on_start_message(self, msg: Any, **_: Any) -> None:
        self._epoch_s = msg.data["epoch_s"]
        self._index, self._count = msg.data["index"], msg.data["count"]

    def _on_outcome(self, outcome: Outcome) -> None:
        log_outcome(self._environment, outcome, self.options)
        self._pass_on({"request": outcome.as_dict()}, outcome)

    def _on_sample(self, sample: ClientSample) -> None:
        self._pass_on({"client": sample.as_dict()}, sample)

    def _pass_on(self, line: dict[str, Any], item: Outcome | ClientSample) -> None:
        if isinstance(self._environment.runner, WorkerRunner):
            self._to_report.append(line)
        else:
            self._keep(line, item)

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        data["tetris_idle"] = self._session is not None and self._session.is_idle
        data["tetris_failure"] = self.failure
        data["tetris"], self._to_report = self._to_report, []

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        why = data.get("tetris_failure")
        if why and client_id in self._workers and not self.failure:
            self._fail(f"worker {client_id}: {why}")
        if data.get("tetris_idle") and self.now_s > 0:
            self._idle_workers.add(client_id)
        self._keep_lines(data.get("tetris", ()))

    def _keep_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            if "request" in line:
                self._keep(line, Outcome.from_dict(line["request"]))
            else:
                self._keep(line, ClientSample(**line["client"]))

    def _keep(self, line: dict[str, Any], item: Outcome | ClientSample) -> None:
        if isinstance(item, Outcome):
            self.live.add(item)
        else:
            self.client_samples.append(item)
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()


def _find_present(runner: Any) -> set[str]:
    """Return the workers that are there; a missing one is remembered for a while."""
    return {one.id for one in runner.clients.values() if one.state != STATE_MISSING}
