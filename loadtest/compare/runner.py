"""The runner: rounds, arms and cells in turn, until all is measured."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loadtest.client.records import compress, read_records
from loadtest.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
)
from loadtest.interrupts import interruptible
from loadtest.load.arrivals import Load
from loadtest.load.options import LoadOptions, read_header
from loadtest.progress import Progress
from loadtest.report.page import write_results
from loadtest.report.summary import Limits, Targets, summarise

from .arms import Arm
from .chaos import ServerChaos, log_client_actions, parse_chaos
from .conditions import describe_conditions, describe_models
from .deployment import Deployment, Launcher
from .locust_process import run_locust
from .processes import ProcessSampler
from .scrape import Scraper, summarise_server
from .store import LOG_FOLDER, RunKey, Store, key_of

_WARM_UP_LOAD = "closed:4"
_SOAK_PERIOD_S = 5.0
_TELL_PERIOD_S = 30.0
_OF_FAILURES = (
    *("id", "failure", "detail", "status"),
    *("sent_s", "end_s", "output_tokens"),
)

Cell = tuple[str, Load]
"""Workload and load, under which every arm is measured."""


class Runner:
    """One invocation on one output folder."""

    def __init__(
        self, options: argparse.Namespace, sent: LoadOptions, store: Store
    ) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Args:
            options: As `cli` parses them.
            sent: What all runs have in common.
            store: Where results go.

        Raises:
            LoadTestError: If it was not.
        """
        self._options, self._sent, self._store = options, sent, store
        self._logs = store.folder / LOG_FOLDER
        self._cells = list(itertools.product(options.workloads, options.loads))
        self._server_chaos, _ = parse_chaos(options.chaos)
        self._launcher = Launcher(
            logs=self._logs,
            config=options.config,
            settings=options.set,
            metrics_urls=dict(options.metrics_url),
            deployment_pid=options.deployment_pid,
            headers=read_header(options.header),
        )
        store.check_conditions(describe_conditions(options))

    def measure(self) -> bool:
        """Measure what is missing; every finished run is kept.

        An arm is started once a round and goes through all cells; the next round
        begins with another arm, so that what drifts falls on all of them alike.

        Returns:
            Whether everything has been measured before `--minutes` were over.
        """
        turns = self._missing_turns()
        if not turns:
            return True
        self._note_environment()
        limit_s = 60 * (self._options.minutes or math.inf)
        deadline_s = time.monotonic() + limit_s
        progress = Progress(sum(len(cells) for _, _, cells in turns))
        for _, _, cells in turns:
            for cell in cells:
                progress.expect(_name(cell), 1)
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
                        run = self._measure(key, cell[1], deployment, progress)
                        self._store.append_record(run | {"started_s": started_s})
                        runs = self._store.runs()
                        write_results(self._store, runs, self._options.objective)
        return True

    def _missing_turns(self) -> list[tuple[int, Arm, list[Cell]]]:
        done = {key_of(run) for run in self._store.runs()}
        arms, turns = self._options.arms, []
        for number in range(1, self._options.rounds + 1):
            start = (number - 1) % len(arms)
            for arm in [*arms[start:], *arms[:start]]:
                missing = [c for c in self._cells if _key(number, arm, c) not in done]
                if missing:
                    turns.append((number, arm, missing))
        return turns

    def _note_environment(self) -> None:
        options = self._options
        is_ours = any(arm.policy for arm in options.arms)
        models = describe_models(options.config, options.set) if is_ours else {}
        pieces = self._store.environment().get("pieces", [])
        self._store.write_environment(
            {
                "machine": describe_machine(),
                "versions": describe_versions(),
                "models": models,
                "pieces": [*pieces, describe_piece()],
            }
        )

    def _warm_up(self, arm: Arm, deployment: Deployment) -> None:
        if self._options.warm_up <= 0:
            return
        records = self._store.folder / "warm-up.jsonl"
        options = replace(
            self._sent,
            host=deployment.endpoint.url,
            load=_WARM_UP_LOAD,
            workload=self._cells[0][0],
            duration=self._options.warm_up,
            requests=0,
            client_chaos="",
            seed="warm-up",
            run_id="warm-up",
            records=str(records.absolute()),
        )
        log = self._logs / f"locust-warm-up-{arm.file_name}.log"
        run_locust(options, log, nice=self._options.client_nice)
        records.unlink()
        if deployment.metrics_urls:
            # Else the warm-up would count into the first run.
            time.sleep(deployment.settle_s)

    def _measure(
        self, key: RunKey, load: Load, deployment: Deployment, progress: Progress
    ) -> dict[str, Any]:
        options, (number, arm, workload, load_name) = self._options, key
        records = self._store.record_file(key)
        cell_name = f"{workload} {load_name}"
        sent = replace(
            self._sent,
            host=deployment.endpoint.url,
            load=load_name,
            workload=workload,
            # Equal for all arms: they get the same requests. Not for all cells: the
            # prefix cache would know those of the one before.
            seed=f"{options.seed}/{number}/{cell_name}",
            run_id=records.stem,
            records=str(records.absolute()),
        )
        chaos = ServerChaos(
            self._server_chaos,
            deployment,
            sent.duration,
            options.redeploy_command,
            progress.say,
        )
        began_s = time.monotonic()
        pid = deployment.pid if options.soak else None
        with (
            Scraper(deployment) as seen,
            ProcessSampler(pid, _SOAK_PERIOD_S) as processes,
        ):
            try:
                run_locust(
                    sent,
                    self._logs / f"locust-{records.stem}.log",
                    processes=options.processes,
                    nice=options.client_nice,
                    on_begin=chaos.begin,
                    on_wait=_teller(sent.duration, progress.say),
                )
            finally:
                chaos.end()
        read = read_records(records)
        # A number of requests is sent until the last of them has ended.
        last_s = max((o.end_s for o in read.outcomes), default=0.0)
        sending_s = last_s if sent.requests else sent.duration
        place = {"round": number, "arm": arm, "workload": workload, "load": load_name}
        run = {
            **place,
            "level": load.first if load.kind == "constant" else None,
            "is_open": load.is_open,
            "is_soak": options.soak,
            "epoch_s": read.epoch_s,
            "sending_s": sending_s,
            **summarise(
                read,
                is_open=load.is_open,
                duration_s=sending_s,
                lead_in_s=0.0 if sent.requests else options.lead_in,
                targets=Targets(
                    sent.ttft_target_ms or None, sent.tpot_target_ms or None
                ),
                limits=Limits(options.max_client_cpu, options.max_lag_ms),
            ),
            "failed_requests": [
                place | {name: getattr(outcome, name) for name in _OF_FAILURES}
                for outcome in read.outcomes
                if outcome.is_failed
            ],
            "records": str(compress(records).relative_to(self._store.folder)),
            "server": summarise_server(seen.counters, seen.timeline),
            "counters": seen.counters,
            "timeline": seen.timeline,
            "server_problems": seen.problems[:10],
            "chaos": chaos.log
            + log_client_actions(
                sent.client_chaos, read.outcomes, sent.duration, options.processes
            ),
            "process_samples": processes.samples,
        }
        told = f"{arm} {cell_name}: {_say(run)}"
        progress.advance(cell_name, time.monotonic() - began_s, told)
        return run


def _key(number: int, arm: Arm, cell: Cell) -> RunKey:
    return number, arm.name, cell[0], cell[1].name


def _name(cell: Cell) -> str:
    return f"{cell[0]} {cell[1].name}"


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
    due_s = itertools.count(_TELL_PERIOD_S, _TELL_PERIOD_S)
    next_s = next(due_s)

    def tell(now_s: float) -> None:
        nonlocal next_s
        if now_s >= next_s:
            next_s = next(due_s)
            is_over = " over, waiting for the last requests" * (now_s >= duration_s)
            say(f"  {now_s:.0f} of {duration_s:.0f} s{is_over}")

    return tell
