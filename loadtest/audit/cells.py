"""One cell: a block of requests answered in four ways, again and again."""

import argparse
import itertools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.engine.models import pad
from loadtest.engine.plan import Block, Cell, deploy, describe_engine, longest_prompt
from loadtest.engine.pool import EngineProcess, start_engines
from loadtest.engine.workloads import RequestMaker
from loadtest.environment import describe_piece
from loadtest.experiment import Experiment, Turn, shuffle
from loadtest.model_files import digest_model
from loadtest.result_folder import ResultFolder

from .engine import AUDITED, HELD, POLICY, AlternatingEngine

PLAIN = "none"
"""In an engine of its own, without a drafter."""

WAYS = (AUDITED, POLICY, HELD, PLAIN)

Engines = Mapping[str, EngineProcess]
"""By way."""


class Bench(Experiment[Arm, Cell, Engines]):
    """Cells one by one, each on engines that start anew.

    They stay for all rounds of a cell that are missing. A folder may hold several
    policies and drafters, each with all its cells, measured in one way.
    """

    def __init__(
        self, options: argparse.Namespace, folder: ResultFolder, requests: RequestMaker
    ) -> None:
        self._options, self._requests, self._arm = options, requests, options.policy
        self._target = pad(options.target, options.target_parameters)
        self.rounds = options.rounds
        names = "audit", "max_tokens", "seed", "blocks", "warm_up_rounds"
        conditions = {name: getattr(options, name) for name in names}
        conditions["ways"] = sorted(options.ways)
        super().__init__(folder, conditions, {"target": self._target})

    def plan_round(
        self,
        number: int,  # noqa: ARG002 - all are alike
    ) -> Iterator[tuple[Sequence[Arm], Sequence[Cell]]]:
        """Yield cells one by one."""
        options = self._options
        axes = itertools.product(options.workloads, options.concurrency)
        for workload, count in axes:
            yield [self._arm], [Cell(workload, options.temperature, count)]

    def find_turns(self) -> list[Turn[Arm, Cell]]:
        """Return one for each cell, of its first round that is missing."""
        first: dict[Cell, Turn[Arm, Cell]] = {}
        for turn in super().find_turns():
            first.setdefault(turn.cells[0], turn)
        return list(first.values())

    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:
        """Return cell, policy, drafter and round."""
        place = {"cell": cell.name, "policy": arm.name, "round": number}
        return place | {"draft": self._options.draft.name}

    def name_of(self, cell: Cell) -> str:
        """Return the name."""
        return cell.name

    @contextmanager
    def start(self, turn: Turn[Arm, Cell]) -> Iterator[Engines]:
        """Start engines, and let an audit begin anew after warming up."""
        (cell,), plain = turn.cells, Arm(PLAIN)
        arms = [self._arm, *[plain] * (PLAIN in self._options.ways)]
        logs, say = self.folder.folder / "logs", self.progress.say
        deploy = partial(self._deploy, cell)
        given = arms, deploy, logs, say, AlternatingEngine
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
        """Answer blocks in all ways, round by round, each of which is kept as it ends.

        Beside tokens per second, what the audit counted in the round, and what it
        reports of all since its engine's start.
        """
        (arm,), began_s = turn.arms, time.monotonic()
        for number in range(turn.round, self.rounds + 1):
            speeds, counts = defaultdict[str, list[float]](list), Counter[str]()
            report: dict[str, float] = {}
            for way, block in self._runs(cell, number):
                found = up[way].ask("run_as", way, block)
                speeds[way].append(found["num_tokens"] / found["seconds"])
                counts.update(found.get("counts", {}))
                report = found.get("report", report)
            means = {way: statistics.fmean(own) for way, own in speeds.items()}
            told = [f"{way} {mean:.1f}" for way, mean in means.items()]
            told += [f"{name} {count:g}" for name, count in counts.items()]
            told += [
                f"{name} {value:.4g}"
                for name, value in report.items()
                if "gain" in name or "audit" in name
            ]
            self.progress.say(f"{cell.name} {number}: {', '.join(told)}")
            row = self.place(number, arm, cell) | {"engine_start": self.piece}
            row |= {"tokens_per_s": speeds, "counts": counts, "report": report}
            self.folder.append_record(row | describe_piece())
        self.progress.advance(cell.name, time.monotonic() - began_s, cell.name)

    def _runs(self, cell: Cell, number: int) -> Iterator[tuple[str, Block]]:
        """Yield the ways of a round there and back, each time with another block.

        Who answers a block first may be faster by per cents: that falls on all alike.
        """
        there = shuffle(self._options.ways, f"{cell.name} {number}")
        for half, ways in enumerate((there, there[::-1])):
            block = self._make(cell, 1, 2 * number + half)
            yield from ((way, block) for way in ways)

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

    def _deploy(self, cell: Cell, arm: Arm) -> dict[str, Any]:
        options, pair = self._options, (self._target, self._options.draft)
        engine = describe_engine(
            pair,
            num_engines=2,
            length=longest_prompt("mixed") + options.max_tokens + self._arm.max_depth,
            most=cell.concurrency,
        )
        if arm.policy == PLAIN:
            return deploy(self._target, None, arm.settings(), engine)
        audited = arm.settings() | {"audit": options.audit}
        return deploy(self._target, options.draft, audited, engine)


def write_untrained(draft: Path, cache: Path) -> Path:
    """Write a drafter like another one, whose weights nobody has trained; once."""
    folder = cache / f"untrained-{digest_model(draft)}"
    if folder.exists():
        return folder
    # Take seconds, which only who asks for it shall wait for.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft))
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    return unfinished.rename(folder)
