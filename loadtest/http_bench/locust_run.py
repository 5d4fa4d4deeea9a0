"""Ties sessions to Locust's life: start, stop, statistics, distributed workers."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from .client_health import ClientSample
from .errors import LoadTestError
from .live import LiveFigures
from .options import LoadOptions, read_options
from .outcome import CLIENT_DROPPED, Outcome
from .session import Session

_START_MESSAGE = "tetris_start"
_HEAD_START_S = 1.0
"""Between a master's start and the begin of the run, so that all workers are there."""

_SPARE_S = 10.0
"""After which a worker that says nothing is given up: several of its reports."""

_MAX_SAMPLES = 600
EXIT_BAD_OPTIONS = 2
_DEFAULT_STOP_TIMEOUT_S = 60.0


class RequestFailureError(Exception):
    """A failed request as Locust counts it: by its kind alone."""


class LocustRun:
    """What the Locust file shares between its events, its shape and its users.

    Outcomes are made where users run: here, or in workers, whose reports bring them.
    They are kept where the figures are shown: here, or in the master.
    """

    def __init__(self, environment: Environment) -> None:
        """Listen to Locust's events."""
        self._environment = environment
        self._session: Session | None = None
        self._epoch_s: float | None = None
        self._index, self._count = 0, 1
        self._failed = False
        self._workers: set[str] = set()
        self._idle_workers: set[str] = set()
        self._to_report: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        self._options: LoadOptions | None = None
        self.live = LiveFigures()
        self.client_samples: deque[ClientSample] = deque(maxlen=_MAX_SAMPLES)
        listeners = environment.events
        listeners.test_start.add_listener(self._on_start)
        listeners.test_stop.add_listener(self._on_stop)
        listeners.report_to_master.add_listener(self._on_report_to_master)
        listeners.worker_report.add_listener(self._on_worker_report)
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.register_message(_START_MESSAGE, self._on_start_message)
        if not environment.stop_timeout:
            environment.stop_timeout = getattr(
                environment.parsed_options, "drain", _DEFAULT_STOP_TIMEOUT_S
            )

    @property
    def options(self) -> LoadOptions:
        """Options of the run."""
        if self._options is None:
            self._options = self.read_options()
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
    def now_s(self) -> float:
        """Seconds since the run began; 0 before."""
        if self._session is not None:
            return self._session.now_s
        return 0.0 if self._epoch_s is None else time.time() - self._epoch_s

    @property
    def is_over(self) -> bool:
        """Whether the run is to be ended: all is sent, and all has been answered.

        Ending it earlier would lose what is in flight in Locust's workers, for whose
        last reports a master does not wait.
        """
        if self._failed:
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

    def _on_start(self, **_: Any) -> None:
        try:
            self._start()
        except LoadTestError as error:
            # Locust would log it and go on.
            sys.stderr.write(f"error: {error}\n")
            self._failed = True
            self._environment.process_exit_code = EXIT_BAD_OPTIONS

    def _start(self) -> None:
        self._failed = False
        self._idle_workers.clear()
        options = self._options = self.read_options()
        self.live = LiveFigures(options.ttft_target_ms, options.tpot_target_ms)
        runner = self._environment.runner
        if isinstance(runner, MasterRunner):
            self._epoch_s = time.time() + _HEAD_START_S
            # Those that are missing are remembered for a while.
            self._workers = {
                client.id
                for client in runner.clients.values()
                if client.state != STATE_MISSING
            }
            for index, client_id in enumerate(sorted(self._workers)):
                message = {
                    "epoch_s": self._epoch_s,
                    "index": index,
                    "count": len(self._workers),
                }
                runner.send_message(_START_MESSAGE, message, client_id)
        elif isinstance(runner, WorkerRunner) and self._epoch_s is None:
            raise LoadTestError(
                "this worker came after the test had begun, and sends nothing: start "
                "the master with --expect-workers N"
            )
        else:
            self._session = Session(
                options,
                on_outcome=self._on_outcome,
                on_sample=self._on_sample,
                epoch_s=self._epoch_s,
                index=self._index,
                count=self._count,
            )
        if options.records is not None and not isinstance(runner, WorkerRunner):
            self._file = options.records.open("w", encoding="utf-8")
            epoch_s = self._epoch_s if self._session is None else self._session.epoch_s
            self._write({"run": {"epoch_s": epoch_s, "load": options.load.name}})

    def _on_stop(self, **_: Any) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._epoch_s = None, None
        # A worker's last report comes later; the file of a run is closed with the
        # process or by the next run.
        if self._file is not None:
            self._file.flush()

    def _on_start_message(self, msg: Any, **_: Any) -> None:
        self._epoch_s = msg.data["epoch_s"]
        self._index, self._count = msg.data["index"], msg.data["count"]

    def _on_outcome(self, outcome: Outcome) -> None:
        self._log(outcome)
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
        data["tetris_failed"] = self._failed
        data["tetris"], self._to_report = self._to_report, []

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if data.get("tetris_failed") and client_id in self._workers:
            sys.stderr.write(f"error: worker {client_id} sends nothing; see its log\n")
            self._failed = True
            self._environment.process_exit_code = EXIT_BAD_OPTIONS
        if data.get("tetris_idle") and self.now_s > 0:
            self._idle_workers.add(client_id)
        for line in data.get("tetris", ()):
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

    def _log(self, outcome: Outcome) -> None:
        """Add a request to Locust's statistics.

        Parts of a request get rows of their own but do not count in the totals.
        """
        if outcome.failure == CLIENT_DROPPED:
            return
        stats, name = self._environment.stats, outcome.workload
        parts: tuple[tuple[str, Sequence[float | None]], ...] = (
            ("TTFT", [outcome.ttft_ms]),
            ("TPOT", [outcome.tpot_ms]),
            ("ITL", outcome.gaps_ms),
        )
        for method, values in parts:
            for value in values:
                if value is not None:
                    stats.get(name, method).log(value, 0)
        whole_ms = outcome.e2e_ms or outcome.waited_ms
        failure = outcome.failure and RequestFailureError(outcome.failure)
        self._environment.events.request.fire(
            request_type="CHAT",
            name=name,
            response_time=whole_ms,
            response_length=outcome.output_tokens,
            exception=failure,
            context={},
        )
