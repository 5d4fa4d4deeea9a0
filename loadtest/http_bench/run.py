"""The controller: rounds, arms and cells in turn, until all is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.engine_bench.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
)
from loadtest.engine_bench.progress import Progress
from loadtest.interrupts import interruptible

from .arms import Arm
from .chaos import ServerChaos
from .client_chaos import log_client_actions
from .deployment import Deployment, Launcher
from .experiment import Cell, Experiment
from .load import Load
from .locust_process import run_locust
from .objectives import Objective
from .outcome import CLIENT_DROPPED, Outcome
from .processes import ProcessSampler
from .records import Records, compress, read_records
from .report import write_results
from .scrape import Scraper
from .shapes import Constant
from .store import LOG_FOLDER, RunKey, Store, key_of
from .summary import summarise

_WARM_UP_IN_FLIGHT = 4.0
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
                with self._launcher.run(arm, progress.say) as deployment:
                    self._warm_up(arm, deployment)
                    for cell in cells:
                        if time.monotonic() > deadline_s:
                            return False
                        self._measure(number, arm, cell, deployment, progress)
        return True

    def _missing_turns(self) -> list[tuple[int, Arm, list[Cell]]]:
        done = {key_of(run) for run in self._store.runs()}
        turns = []
        arms = list(self._experiment.arms)
        for number in range(1, self._experiment.rounds + 1):
            start = (number - 1) % len(arms)
            for arm in [*arms[start:], *arms[:start]]:
                missing = [
                    cell
                    for cell in self._experiment.cells
                    if _key(number, arm, cell) not in done
                ]
                if missing:
                    turns.append((number, arm, missing))
        return turns

    def _note_environment(self) -> None:
        pieces = self._store.environment().get("pieces", [])
        self._store.write_environment(
            {
                "machine": describe_machine(),
                "versions": describe_versions(),
                "pieces": [*pieces, describe_piece()],
            }
        )

    def _warm_up(self, arm: Arm, deployment: Deployment) -> None:
        experiment = self._experiment
        if experiment.warm_up_s <= 0:
            return
        cell = Cell(
            experiment.cells[0].workload, Load("closed", Constant(_WARM_UP_IN_FLIGHT))
        )
        traffic = replace(
            experiment.traffic,
            duration_s=experiment.warm_up_s,
            num_requests=0,
            processes=1,
        )
        records = self._store.folder / "warm-up.jsonl"
        run_locust(
            deployment.url,
            cell,
            traffic,
            experiment.targets,
            seed="warm-up",
            run_id="warm-up",
            records=records,
            log=self._log(f"locust-warm-up-{arm.file_name}"),
        )
        records.unlink()
        if deployment.metrics_urls:
            # Else the warm-up would count into the first run.
            time.sleep(deployment.settle_s)

    def _measure(
        self,
        number: int,
        arm: Arm,
        cell: Cell,
        deployment: Deployment,
        progress: Progress,
    ) -> None:
        experiment, traffic = self._experiment, self._experiment.traffic
        key = _key(number, arm, cell)
        records = self._store.record_file(key)
        chaos = ServerChaos(
            experiment.server_chaos,
            deployment,
            traffic.duration_s,
            experiment.redeploy_command,
            progress.say,
        )
        began_s = time.monotonic()
        scraper = Scraper(deployment)
        pid = deployment.pid if experiment.is_soak else None
        with scraper, ProcessSampler(pid, _SOAK_PERIOD_S) as sampler:
            try:
                run_locust(
                    deployment.url,
                    cell,
                    traffic,
                    experiment.targets,
                    # Equal for all arms: they get the same requests. Not for all
                    # cells: the prefix cache would know those of the one before.
                    seed=f"{traffic.seed}/{number}/{cell.name}",
                    run_id=records.stem,
                    records=records,
                    log=self._log(f"locust-{records.stem}"),
                    client_chaos=experiment.client_chaos,
                    on_begin=chaos.begin,
                    on_wait=_teller(traffic.duration_s, progress.say),
                )
            finally:
                chaos.end()
        read = read_records(records)
        run = self._describe_run(key, cell, read)
        run["records"] = str(compress(records).relative_to(self._store.folder))
        run["server"] = scraper.record.summary()
        run["counters"] = scraper.record.counters
        run["timeline"] = scraper.record.timeline
        run["server_problems"] = scraper.record.problems[:10]
        run["chaos"] = chaos.log + log_client_actions(
            experiment.client_chaos,
            read.outcomes,
            traffic.duration_s,
            traffic.processes,
        )
        run["process_samples"] = sampler.samples
        self._store.append_run(run)
        write_results(self._store, self._objectives)
        progress.advance(
            cell.name,
            time.monotonic() - began_s,
            f"{arm.name} {cell.name}: {_say(run)}",
        )

    def _describe_run(self, key: RunKey, cell: Cell, read: Records) -> dict[str, Any]:
        experiment, traffic = self._experiment, self._experiment.traffic
        number, arm, workload, load = key
        sending_s = traffic.duration_s
        if traffic.num_requests:
            sending_s = max((o.end_s for o in read.outcomes), default=0.0)
        place = {"round": number, "arm": arm, "workload": workload, "load": load}
        return {
            **place,
            "level": cell.level,
            "is_open": cell.load.is_open,
            "is_soak": experiment.is_soak,
            "epoch_s": read.epoch_s,
            "sending_s": sending_s,
            **summarise(
                read,
                is_open=cell.load.is_open,
                duration_s=None if traffic.num_requests else traffic.duration_s,
                warm_up_s=traffic.lead_in_s,
                targets=experiment.targets,
                limits=experiment.limits,
            ),
            "failed_requests": [
                {**place, **_describe_failure(outcome)}
                for outcome in read.outcomes
                if outcome.failure not in (None, CLIENT_DROPPED)
            ],
        }

    def _log(self, name: str) -> Path:
        return self._store.folder / LOG_FOLDER / f"{name}.log"


def _key(number: int, arm: Arm, cell: Cell) -> RunKey:
    return number, arm.name, cell.workload, cell.load.name


def _describe_failure(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "failure": outcome.failure,
        "detail": outcome.detail,
        "status": outcome.status,
        "sent_s": outcome.sent_s,
        "end_s": outcome.end_s,
        "output_tokens": outcome.output_tokens,
    }


def _say(run: dict[str, Any]) -> str:
    ttft = run["ttft_p50_ms"]
    words = [f"{run['output_tokens_per_s']:.0f} tokens/s"]
    if ttft is not None:
        words.append(f"TTFT {ttft:.0f} ms")
    if run["failures"]:
        words.append(", ".join(f"{v} {k}" for k, v in run["failures"].items()))
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
