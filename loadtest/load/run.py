"""Ties sessions to Locust's events: start, stop, reports of workers, statistics.

Before Locust announces a test, the shape has it prepared: options are checked, the
model is found and the workload loaded. Locust carries what workers need along with its
own options.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from locust.env import Environment
from locust.runners import STATE_RUNNING, MasterRunner, WorkerRunner

from loadtest.client.health import ClientSample
from loadtest.client.outcome import Outcome
from loadtest.client.records import to_entry
from loadtest.errors import LoadTestError

from .options import OPTIONS, LoadOptions
from .session import Session
from .workloads import Workload, make_workload

EXIT_BAD_OPTIONS = 2
_HEAD_START_S = 1.0
"""Between a master's start and the begin of the run, so that all workers are there."""

_SPARE_S = 10.0
"""After which a worker that hangs with its users is given up."""


class LocustRun:
    """What the Locust file shares between its events, its shape and its users.

    Outcomes are made where users run: here, or in workers, whose reports bring them to
    the master, which keeps the records.

    Attributes:
        session: What the users of this process send through, while a test runs.
        failure: Why the run had to end; empty if it did not.
        workers: The workers of the run, by their ids; one that comes later sends
            nothing.
    """

    def __init__(self, environment: Environment) -> None:
        """Listen to Locust's events."""
        self._environment, self._runner = environment, environment.runner
        self._is_master = isinstance(self._runner, MasterRunner)
        self._is_worker = isinstance(self._runner, WorkerRunner)
        self._waits_for_drain = not environment.stop_timeout
        self._epoch_s: float | None = None
        self._lines: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        self.options = LoadOptions(host="")
        self.session: Session | None = None
        self.failure = ""
        self.workers: list[str] = []
        for event, listener in (
            (environment.events.test_start, self._on_start),
            (environment.events.test_stopping, self._on_stopping),
            (environment.events.test_stop, self._on_stop),
            (environment.events.report_to_master, self._on_report_to_master),
            (environment.events.worker_report, self._on_worker_report),
        ):
            event.add_listener(listener)

    @property
    def num_processes(self) -> int:
        """Processes in which users run."""
        return max(1, len(self.workers))

    @property
    def now_s(self) -> float:
        """Seconds since the run began; 0 before and after it."""
        return 0.0 if self._epoch_s is None else time.time() - self._epoch_s

    @property
    def is_over(self) -> bool:
        """Whether the run is to be ended: all is sent and answered, and no user left.

        Ending it earlier would lose what is in flight in Locust's workers, for whose
        last reports a master does not wait.
        """
        latest_s = self.options.duration + self.options.drain + _SPARE_S
        if self.failure or self.now_s >= latest_s:
            return True
        # Before it is running, users may be on their way.
        is_running = self._runner.state == STATE_RUNNING
        is_sent = is_running and self.now_s >= self.options.duration
        return bool(is_sent and not self._runner.user_count)

    def prepare(self) -> bool:
        """Get ready for a run with the options as they are; the page may change them.

        Where it cannot begin, the user has been told why.
        """
        began_s, self.failure = time.monotonic(), ""
        self._environment.process_exit_code = None
        try:
            if self._is_master:
                self.workers = sorted(one.id for one in self._runner.clients.ready)
                if not self.workers:
                    raise LoadTestError("no worker is connected: start one first")
            options = self.read_options()
            workload = _load(options)
            model = options.model or options.endpoint.find_model()
            if self._file is not None:
                self._file.close()
            self._file = None
            if options.records:
                path = Path(options.records)
                self._file = path.open("w", encoding="utf-8")
        except (LoadTestError, OSError) as error:
            self._fail(str(error))
            return False
        self.options = options = replace(options, model=model)
        if self._waits_for_drain:
            self._environment.stop_timeout = options.drain
        self._epoch_s = time.time()
        if self._is_master:
            # Workers load the workload themselves, and may be slower.
            self._epoch_s += _HEAD_START_S + 2 * (time.monotonic() - began_s)
            # Locust hands this on with its own options.
            told = {"model": model, "epoch_s": self._epoch_s, "workers": self.workers}
            self._environment.parsed_options.tetris_run = told
        else:
            given = options, workload, self._take
            self.session = Session(*given, epoch_s=self._epoch_s)
        run = {"epoch_s": self._epoch_s, "num_processes": self.num_processes}
        self._write({"run": run | {"load": options.load}})
        return True

    def read_options(self) -> LoadOptions:
        """Read Locust's options, and check them."""
        parsed = self._environment.parsed_options
        values = {name: getattr(parsed, name) for name in OPTIONS}
        options = LoadOptions(self._environment.host or parsed.host or "", **values)
        options.check()
        return options

    def _on_start(self, **_: Any) -> None:
        """Take part in a master's run; what hinders is reported."""
        if not self._is_worker:
            return  # It has been prepared.
        run = self._environment.parsed_options.tetris_run
        self.failure, self._epoch_s, workers = "", run["epoch_s"], run["workers"]
        own = self._runner.client_id
        if own not in workers:
            sys.stderr.write(
                "this worker came after the test had begun, and sends nothing: start "
                "the master with --expect-workers N\n"
            )
            return
        try:
            self.options = replace(self.read_options(), model=run["model"])
            given = self.options, _load(self.options), self._take
        except (LoadTestError, OSError) as error:
            self._fail(str(error))
            return
        place = {"index": workers.index(own), "count": len(workers)}
        self.session = Session(*given, epoch_s=run["epoch_s"], **place)

    def _fail(self, why: str) -> None:
        sys.stderr.write(f"error: {why}\n")
        self.failure = why
        self._environment.process_exit_code = EXIT_BAD_OPTIONS
        # For the page's list of exceptions.
        self._runner.log_exception("load test", why, why)

    def _on_stopping(self, **_: Any) -> None:
        # Locust lets users finish what they are at, for as long as a drain may take; an
        # open load's one user is at it until the end of the run.
        if self.session is not None:
            self.session.stop_sending()

    def _on_stop(self, **_: Any) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None
        if self._is_worker:
            # All its users have ended, yet it would wait once more for as long as they
            # may take before it is there again. The next start brings the time anew.
            self._environment.stop_timeout = 0.0
        else:
            self._epoch_s = None

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        told = {"epoch_s": self._epoch_s, "failure": self.failure}
        data["tetris"] = told | {"lines": self._lines}
        self._lines = []

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        told = data.get("tetris")
        # What is left to tell of the last run must not come after the next has begun.
        if not told or told["epoch_s"] != self._epoch_s:
            return
        self._write(*told["lines"])
        if told["failure"] and not self.failure:
            self._fail(f"worker {client_id}: {told['failure']}")

    def _take(self, item: Outcome | ClientSample) -> None:
        if isinstance(item, Outcome):
            _log(self._environment, item, self.options)
        self._write(to_entry(item))

    def _write(self, *lines: dict[str, Any]) -> None:
        if self._is_worker:
            self._lines += lines
        elif self._file is not None:
            for line in lines:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()


def _load(options: LoadOptions) -> Workload:
    limit = options.max_prompt_chars or None
    workload = make_workload(options.workload, options.seed, limit)
    workload.conversation(0)  # A file is shuffled with its first conversation.
    return workload


def _log(environment: Environment, outcome: Outcome, options: LoadOptions) -> None:
    """Add a request to Locust's statistics, in the rows of its workload.

    `CHAT` is the whole request and alone counts in the totals; its size is in output
    tokens. `TTFT`, `TPOT` and `ITL` are its parts in ms; the size of `TTFT` is prompt
    tokens. `GOOD` has once more the requests that met the targets, so that its requests
    per second are the goodput, and `CUT` those whose stream broke off.
    """
    whole_ms, num_tokens = outcome.e2e_ms or outcome.waited_ms, outcome.output_tokens
    targets = options.ttft_target_ms or None, options.tpot_target_ms or None
    for method, values, size in (
        ("TTFT", [outcome.ttft_ms], outcome.prompt_tokens or 0),
        ("TPOT", [outcome.tpot_ms], 0),
        ("ITL", outcome.gaps_ms, 0),
        ("GOOD", [whole_ms] * outcome.meets(*targets), num_tokens),
        ("CUT", [whole_ms] * outcome.is_cut, num_tokens),
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
        exception=outcome.failure,
        context={},
    )
