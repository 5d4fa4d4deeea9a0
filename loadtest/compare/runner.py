"""The runner: rounds, arms and cells in turn, until all is measured."""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.arms import to_file_name
from loadtest.bench_command import say
from loadtest.client.records import Records, compress, read_records
from loadtest.errors import LoadTestError
from loadtest.experiment import Experiment, Turn
from loadtest.load.arrivals import Load
from loadtest.load.options import LoadOptions, read_header
from loadtest.load.workloads import make_workload
from loadtest.report.page import write_results
from loadtest.report.summary import Limits, Targets, summarise
from loadtest.result_folder import ResultFolder

from .arms import Arm
from .conditions import describe_conditions, find_models
from .cpu import summarise_cpu, watch_cpu
from .deployment import EXPORT_PERIOD_S, RAY_EXPORT_PERIOD_S, Deployment, Launcher
from .locust_process import run_locust
from .scrape import scrape, summarise_server

SENT = (
    *("duration", "drain", "max_tokens", "temperature", "seed", "model", "extra_body"),
    *("max_prompt_chars", "ttft_target_ms", "tpot_target_ms"),
)
"""Options of a run that are ours too."""

_WARM_UP_LOAD = "closed:4"
_OF_FAILURES = (
    *("id", "failure", "detail", "status"),
    *("sent_s", "end_s", "output_tokens"),
)
_KEY = ("round", "arm", "workload", "load")

Cell = tuple[str, Load]
"""Workload and load, under which every arm is measured."""


class Store(ResultFolder):
    """An output folder, with a record for each run."""

    records_file = "runs.jsonl"

    def runs(self) -> list[dict[str, Any]]:
        """Return all finished runs, oldest first; of one run again, the last."""
        runs = {tuple(run[name] for name in _KEY): run for run in self.records()}
        return list(runs.values())


class Runner(Experiment[Arm, Cell, Deployment]):
    """Arms that are started once a round and go through all cells.

    The next round begins with another arm, so that what drifts falls on all alike.
    """

    def __init__(self, options: argparse.Namespace, store: Store) -> None:
        """Check that all fits together, also with what the folder holds."""
        self._options, self._store, self._started_s = options, store, 0.0
        self.rounds = options.rounds
        self._sent = make_load_options(options)
        self._logs = store.folder / "logs"
        self._cells = list(itertools.product(options.workloads, options.loads))
        headers = read_header(options.header)
        period_s = RAY_EXPORT_PERIOD_S if options.unwatched else EXPORT_PERIOD_S
        given = self._logs, options.config, options.set, headers, period_s
        self._launcher = Launcher(*given)
        is_ours = any(arm.policy for arm in options.arms)
        models = find_models(options.config, options.set, say) if is_ours else {}
        super().__init__(store, describe_conditions(options), models)

    def plan_round(self, number: int) -> Iterator[tuple[list[Arm], list[Cell]]]:
        """Yield arms one by one."""
        arms = self._options.arms
        start = (number - 1) % len(arms)
        for arm in [*arms[start:], *arms[:start]]:
            yield [arm], self._cells

    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:
        """Return round, arm, workload and load."""
        names = number, arm.name, cell[0], cell[1].name
        return dict(zip(_KEY, names, strict=True))

    def name_of(self, cell: Cell) -> str:
        """Return workload and load."""
        return f"{cell[0]} {cell[1].name}"

    @contextmanager
    def start(self, turn: Turn[Arm, Cell]) -> Iterator[Deployment]:
        """Start an arm, or find it running, and warm it up."""
        (arm,), seconds = turn.arms, self._options.warm_up
        self._started_s = round(time.time(), 3)
        with self._launcher.run(arm, self.progress.say) as deployment:
            if seconds > 0:
                self._send(
                    deployment,
                    f"warm-up-{arm.file_name}",
                    load=_WARM_UP_LOAD,
                    workload=self._cells[0][0],
                    seed="warm-up",
                    duration=seconds,
                ).unlink()
                if deployment.metrics_urls:
                    # Else the warm-up would count into the first run.
                    time.sleep(deployment.settle_s)
            yield deployment

    def _records_of(self, run_id: str) -> Path:
        folder = self._store.folder.absolute() / "records"
        folder.mkdir(exist_ok=True)
        return folder / f"{run_id}.jsonl"

    def _send(
        self, up: Deployment, run_id: str, processes: int = 1, **changes: Any
    ) -> Path:
        """Put load on a deployment; return the records of all requests."""
        records = self._records_of(run_id)
        changes |= {"host": up.endpoint.url, "run_id": run_id, "records": str(records)}
        run_locust(
            replace(self._sent, **changes),
            self._logs / f"locust-{run_id}.log",
            processes=processes,
            nice=self._options.client_nice,
        )
        return records

    def measure_cell(self, turn: Turn[Arm, Cell], cell: Cell, up: Deployment) -> None:
        """Put load on an arm, and keep what came of it."""
        options, (arm,), (workload, load) = self._options, turn.arms, cell
        cell_name, began_s = self.name_of(cell), time.monotonic()
        name = f"{turn.round}-{Path(workload).name}-{load.name}-{arm.name}"
        run_id = to_file_name(name)
        ends_s = options.lead_in, options.duration
        with (
            scrape(
                up, samples_processes=options.soak, only_at_ends=options.unwatched
            ) as seen,
            watch_cpu(up.pid, self._records_of(run_id), ends_s) as looks,
        ):
            records = self._send(
                up,
                run_id,
                options.processes,
                load=load.name,
                workload=workload,
                # Equal for all arms: they get the same requests. Not for all cells:
                # the prefix cache would know those of the one before.
                seed=f"{options.seed}/{turn.round}/{cell_name}",
            )
        read = read_records(records)
        place = self.place(turn.round, arm, cell)
        run = {
            **place,
            "level": load.first if load.kind == "constant" else None,
            "is_open": load.is_open,
            "is_soak": options.soak,
            "epoch_s": read.epoch_s,
            "sending_s": options.duration,
            **self._summarise(read, load.is_open),
            **summarise_cpu(looks, read),
            "failed_requests": [
                place | {name: getattr(outcome, name) for name in _OF_FAILURES}
                for outcome in read.outcomes
                if not outcome.is_ok
            ],
            "records": f"records/{compress(records).name}",
            "server": summarise_server(seen.counters, seen.timeline),
            "counters": {n: v for n, v in seen.counters.items() if v},
            "timeline": seen.timeline,
            "server_problems": seen.problems[:10],
            "process_samples": seen.process_samples,
            "started_s": self._started_s,
        }
        told = f"{arm.name} {cell_name}: {_say(run)}"
        self.progress.advance(cell_name, time.monotonic() - began_s, told)
        self._store.append_record(run)
        write_results(self._store, self._store.runs(), options.objective)

    def _summarise(self, read: Records, is_open: bool) -> dict[str, Any]:
        options = self._options
        return summarise(
            read,
            is_open=is_open,
            duration_s=options.duration,
            lead_in_s=options.lead_in,
            targets=Targets(
                options.ttft_target_ms or None, options.tpot_target_ms or None
            ),
            limits=Limits(options.max_client_cpu, options.max_lag_ms),
        )


def make_load_options(options: argparse.Namespace) -> LoadOptions:
    """Return what all runs have in common, after a check that all fits together."""
    if len({arm.name for arm in options.arms}) < len(options.arms):
        raise LoadTestError("two arms have the same name; name them with --arm NAME=")
    if options.lead_in >= options.duration:
        raise LoadTestError(
            f"--lead-in {options.lead_in:g} leaves nothing of --duration "
            f"{options.duration:g}"
        )
    told = {name: getattr(options, name) for name in SENT}
    sent = LoadOptions(host="http://unknown", header=options.header, **told)
    for load in options.loads:
        replace(sent, load=load.name).check()
    for workload in options.workloads:
        make_workload(workload, "check", options.max_prompt_chars or None)
    attached = [arm.name for arm in options.arms if arm.url is not None]
    if options.soak and attached:
        raise LoadTestError(
            f"--soak needs the processes of {attached[0]}, which runs already: have us "
            f"start it, --arm '{attached[0]}=cmd:...'"
        )
    return sent


def _say(run: Mapping[str, Any]) -> str:
    words = [f"{run['output_tokens_per_s']:.0f} tokens/s"]
    if run["ttft_p50_ms"] is not None:
        words.append(f"TTFT {run['ttft_p50_ms']:.0f} ms")
    if run["cpu_ms_per_token"] is not None:
        words.append(f"CPU {run['cpu_ms_per_token']:.3f} ms a token")
    words += [f"{count} {kind}" for kind, count in run["failures"].items()]
    if not run["is_valid"]:
        words.append("INVALID, " + "; ".join(run["invalid_because"]))
    return ", ".join(words)
