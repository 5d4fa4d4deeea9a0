"""One cell: a block of requests answered in four ways, again and again."""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.engine.models import pad
from loadtest.engine.plan import Block, Cell, deploy, describe_engine, longest_prompt
from loadtest.engine.pool import EngineProcess, start_engines
from loadtest.engine.workloads import RequestMaker
from loadtest.environment import describe_run
from loadtest.experiment import BenchFolder, Experiment, Turn, shuffle

from .engine import AUDITED, HELD, POLICY, AlternatingEngine

PLAIN = "none"
"""In an engine of its own, without a drafter."""

WAYS = (AUDITED, POLICY, HELD, PLAIN)

Engines = Mapping[str, EngineProcess]
"""By way."""


class Bench(Experiment[Arm, Cell, Engines]):
    """Cells one by one, each on engines that start anew.

    A folder may hold several policies and drafters, each with all its cells.
    """

    def __init__(
        self, options: argparse.Namespace, folder: BenchFolder, requests: RequestMaker
    ) -> None:
        self._options, self._requests, self._arm = options, requests, options.policy
        self._target = pad(options.target, options.target_parameters)
        conditions = {"audit": options.audit, "max_tokens": options.max_tokens}
        conditions["seed"] = options.seed
        super().__init__(folder, conditions, {"target": self._target})

    def plan_round(
        self,
        number: int,  # noqa: ARG002 - there is one
    ) -> Iterator[tuple[Sequence[Arm], Sequence[Cell]]]:
        """Yield cells one by one."""
        options = self._options
        axes = itertools.product(options.workloads, options.concurrency)
        for workload, count in axes:
            yield [self._arm], [Cell(workload, options.temperature, count)]

    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:  # noqa: ARG002
        """Return cell, policy and drafter."""
        draft = self._options.draft.name
        return {"cell": cell.name, "policy": arm.name, "draft": draft}

    def name_of(self, cell: Cell) -> str:
        """Return the name."""
        return cell.name

    @contextmanager
    def start(self, turn: Turn[Arm, Cell]) -> Iterator[Engines]:
        """Start engines, and let an audit begin anew after warming up."""
        (cell,), plain = turn.cells, Arm(PLAIN)
        arms = [self._arm, *[plain] * (PLAIN in self._options.ways)]
        logs, say = self.folder.folder / "logs", self.progress.say
        given = arms, self._deploy, logs, say, AlternatingEngine
        with start_engines(*given) as engines:
            ours = engines[self._arm]
            up = dict.fromkeys((AUDITED, POLICY, HELD), ours)
            if plain in engines:
                up[PLAIN] = engines[plain]
            warm_up = self._requests.make_warm_up(cell.concurrency)
            for way, engine in up.items():
                engine.ask("run_as", way, warm_up)
            # What it finds out in these, and a trial that it loses, is not measured.
            for number in range(self._options.warm_up_rounds):
                ours.ask("run_as", AUDITED, self._make(cell, 0, number))
            ours.ask("forget")
            yield up

    def measure_cell(self, turn: Turn[Arm, Cell], cell: Cell, up: Engines) -> None:
        """Answer blocks in all ways, and keep tokens per second, one for each round.

        Beside them, what the audit reports in the end.
        """
        (arm,), options, began_s = turn.arms, self._options, time.monotonic()
        report: dict[str, float] = {}
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            block = self._make(cell, 1, number)
            for way in shuffle(options.ways, f"{cell.name} {number}"):
                found = up[way].ask("run_as", way, block)
                if way == AUDITED:
                    report = found["report"]
                speeds[way].append(found["num_tokens"] / found["seconds"])
            told = [f"{way} {own[-1]:.1f}" for way, own in speeds.items() if own]
            told += [
                f"{name} {value:.4g}"
                for name, value in report.items()
                if any(part in name for part in ("gain", "audit", "held"))
            ]
            self.progress.say(f"{cell.name} {number + 1}: {', '.join(told)}")
        row = self.place(turn.round, arm, cell) | {"audit": options.audit}
        row |= {"rounds": options.rounds, "tokens_per_s": speeds, "report": report}
        self.folder.append_record(row | describe_run())
        self.progress.advance(cell.name, time.monotonic() - began_s, cell.name)

    def _make(self, cell: Cell, kind: int, number: int) -> Block:
        """Put blocks together; `kind` is 0 while warming up.

        With short replies one is over in a few dozen steps, most of which are its begin
        or end.
        """
        count = self._options.blocks
        parts = [
            self._requests.make(cell, kind, count * number + n) for n in range(count)
        ]
        prompts = tuple(prompt for part in parts for prompt in part.prompts)
        return replace(parts[0], prompts=prompts)

    def _deploy(self, arm: Arm) -> dict[str, Any]:
        options, pair = self._options, (self._target, self._options.draft)
        engine = describe_engine(
            pair,
            num_engines=2,
            length=longest_prompt("mixed") + options.max_tokens + self._arm.max_depth,
            most=max(options.concurrency),
        )
        if arm.policy == PLAIN:
            return deploy(self._target, None, arm.settings(), engine)
        audited = arm.settings() | {"audit": options.audit}
        return deploy(self._target, options.draft, audited, engine)


def write_untrained(draft: Path, folder: Path) -> Path:
    """Write a drafter like another one, whose weights nobody has trained."""
    if folder.exists():
        return folder
    # Take seconds, which only who asks for it shall wait for.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
