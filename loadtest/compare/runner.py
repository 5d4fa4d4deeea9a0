"""The runner: rounds, arms and cells in turn, until all is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from loadtest.client.outcome import CLIENT_DROPPED, Outcome
from loadtest.client.records import Records, compress, read_records
from loadtest.engine_bench.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
)
from loadtest.engine_bench.progress import Progress
from loadtest.interrupts import interruptible
from loadtest.report.objectives import Objective
from loadtest.report.page import write_results
from loadtest.report.summary import summarise

from .arms import Arm
from .chaos import ServerChaos, log_client_actions
from .deployment import Deployment, Launcher
from .experiment import Cell, Experiment
from .locust_process import run_locust
from .processes import ProcessSampler
from .scrape import Scraper
from .store import LOG_FOLDER, RunKey, Store, key_of

_WARM_UP_LOAD = "closed:4"
_SOAK_PERIOD_S = 5.0
_TELL_PERIOD_S = 30.0


class Runner:
    """One invocation on one output folder."""

    def __init__(
        self,
        experiment: Experiment,
        store: Store,
        launcher: Launcher,
        objectives: Sequence[Objective],
    ) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Raises:
            LoadTestError: If it was not.
        """
        self._experiment, self._store = experiment, store
        self._launcher, self._objectives = launcher, objectives
        self._logs = store.folder / LOG_FOLDER
        store.check_conditions(experiment.conditions())

    def measure(self, minutes: float | None = None) -> bool:
        """Measure what is missing; every finished run is kept.

        An arm is started once a round and goes through all cells; the next round
        begins with another arm, so that what drifts falls on all of them alike.

        Args:
            minutes: Begin nothing new after this long; None for no limit.

        Returns:
            Whether everything has been measured.
        """
        turns = self._missing_turns()
        if not turns:
            return True
        self._note_environment()
        deadline_s = time.monotonic() + 60 * minutes if minutes else float("inf")
        progress = Progress(sum(len(cells) for _, _, cells in turns))
        for _, _, cells in turns:
            for cell in cells:
                progress.expect(cell.name, 1)
        with interruptible():
            for number, arm, cells in turns:
                if time.monotonic() > deadline_s:
                    return False
                started_s = round(time.time(), 3)
                with self._launcher.run(arm, progress.say) as deployment:
                    self._warm_up(arm, deployment)
                    for cell in cells:
                        if time.monotonic() > deadline_s:
                            return False
                        key = _key(number, arm, cell)
                        run = self._measure(key, cell, deployment, progress)
                        self._keep(run | {"started_s": started_s})
        return True

    def _missing_turns(self) -> list[tuple[int, Arm, list[Cell]]]:
        done = {key_of(run) for run in self._store.runs()}
        arms, turns = list(self._experiment.arms), []
        for number in range(1, self._experiment.rounds + 1):
            start = (number - 1) % len(arms)
            for arm in [*arms[start:], *arms[:start]]:
                cells = self._experiment.cells
                missing = [c for c in cells if _key(number, arm, c) not in done]
                if missing:
                    turns.append((number, arm, missing))
        return turns

    def _note_environment(self) -> None:
        pieces = self._store.environment().get("pieces", [])
        others = {name: version(name) for name in ("ray", "locust")}
        self._store.write_environment(
            {
                "machine": describe_machine(),
                "versions": describe_versions() | others,
                "models": self._experiment.describe_models(),
                "pieces": [*pieces, describe_piece()],
            }
        )

    def _warm_up(self, arm: Arm, deployment: Deployment) -> None:
        experiment = self._experiment
        if experiment.warm_up_s <= 0:
            return
        records = self._store.folder / "warm-up.jsonl"
        options = replace(
            experiment.options,
            host=deployment.endpoint.url,
            load=_WARM_UP_LOAD,
            workload=experiment.cells[0].workload,
            duration=experiment.warm_up_s,
            requests=0,
            client_chaos="",
            seed="warm-up",
            run_id="warm-up",
            records=str(records.absolute()),
        )
        log = self._logs / f"locust-warm-up-{arm.file_name}.log"
        run_locust(options, log, nice=experiment.nice)
        records.unlink()
        if deployment.metrics_urls:
            # Else the warm-up would count into the first run.
            time.sleep(deployment.settle_s)

    def _measure(
        self, key: RunKey, cell: Cell, deployment: Deployment, progress: Progress
    ) -> dict[str, Any]:
        experiment, sent = self._experiment, self._experiment.options
        records = self._store.record_file(key)
        options = replace(
            sent,
            host=deployment.endpoint.url,
            load=cell.load.name,
            workload=cell.workload,
            # Equal for all arms: they get the same requests. Not for all cells: the
            # prefix cache would know those of the one before.
            seed=f"{sent.seed}/{key[0]}/{cell.name}",
            run_id=records.stem,
            records=str(records.absolute()),
        )
        chaos = ServerChaos(
            experiment.server_chaos,
            deployment,
            sent.duration,
            experiment.redeploy_command,
            progress.say,
        )
        began_s = time.monotonic()
        pid = deployment.pid if experiment.is_soak else None
        with (
            Scraper(deployment) as scraper,
            ProcessSampler(pid, _SOAK_PERIOD_S) as seen,
        ):
            try:
                run_locust(
                    options,
                    self._logs / f"locust-{records.stem}.log",
                    processes=experiment.processes,
                    nice=experiment.nice,
                    on_begin=chaos.begin,
                    on_wait=_teller(sent.duration, progress.say),
                )
            finally:
                chaos.end()
        read = read_records(records)
        run = self._describe(key, cell, read) | {
            "records": str(compress(records).relative_to(self._store.folder)),
            "server": scraper.record.summary(),
            "counters": scraper.record.counters,
            "timeline": scraper.record.timeline,
            "server_problems": scraper.record.problems[:10],
            "chaos": chaos.log
            + log_client_actions(
                sent.client_chaos, read.outcomes, sent.duration, experiment.processes
            ),
            "process_samples": seen.samples,
        }
        label = f"{key[1]} {cell.name}: {_say(run)}"
        progress.advance(cell.name, time.monotonic() - began_s, label)
        return run

    def _describe(self, key: RunKey, cell: Cell, read: Records) -> dict[str, Any]:
        experiment, sent = self._experiment, self._experiment.options
        place = dict(zip(("round", "arm", "workload", "load"), key, strict=True))
        # A number of requests is sent until the last of them has ended.
        last_s = max((o.end_s for o in read.outcomes), default=0.0)
        sending_s = last_s if sent.requests else sent.duration
        return {
            **place,
            "level": cell.load.first if cell.load.kind == "constant" else None,
            "is_open": cell.load.is_open,
            "is_soak": experiment.is_soak,
            "epoch_s": read.epoch_s,
            "sending_s": sending_s,
            **summarise(
                read,
                is_open=cell.load.is_open,
                duration_s=sending_s,
                lead_in_s=experiment.lead_in_s,
                targets=experiment.targets,
                limits=experiment.limits,
            ),
            "failed_requests": [
                {**place, **_describe_failure(outcome)}
                for outcome in read.outcomes
                if outcome.failure not in (None, CLIENT_DROPPED)
            ],
        }

    def _keep(self, run: dict[str, Any]) -> None:
        self._store.append_record(run)
        write_results(self._store, self._store.runs(), self._objectives)


def _key(number: int, arm: Arm, cell: Cell) -> RunKey:
    return number, arm.name, cell.workload, cell.load.name


def _describe_failure(outcome: Outcome) -> dict[str, Any]:
    names = ("id", "failure", "detail", "status", "sent_s", "end_s", "output_tokens")
    return {name: getattr(outcome, name) for name in names}


def _say(run: dict[str, Any]) -> str:
    words = [f"{run['output_tokens_per_s']:.0f} tokens/s"]
    if run["ttft_p50_ms"] is not None:
        words.append(f"TTFT {run['ttft_p50_ms']:.0f} ms")
    words += [f"{count} {kind}" for kind, count in run["failures"].items()]
    if not run["is_valid"]:
        words.append("INVALID, " + "; ".join(run["invalid_because"]))
    return ", ".join(words)


def _teller(duration_s: float, say: Callable[[str], None]) -> Callable[[float], None]:
    """Return what tells how far a long run has come."""
    told_s = 0.0

    def tell(now_s: float) -> None:
        nonlocal told_s
        if now_s - told_s < _TELL_PERIOD_S:
            return
        told_s = now_s
        if now_s < duration_s:
            say(f"  {now_s:.0f} of {duration_s:.0f} s")
        else:
            say(f"  waiting for the last requests, {now_s - duration_s:.0f} s")

    return tell
