"""The controller: run after run, each on an engine of its own."""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.engine.plan import Block, deploy, describe_engine
from loadtest.engine.pool import EngineProcess
from loadtest.engine.workloads import RequestMaker
from loadtest.experiment import BenchFolder, Experiment, Turn
from loadtest.load.workloads import Conversation

from .grid import PRESETS, Arm, make_arms

MAX_MODEL_LEN = 2048
"""As in the paper's scripts; longer prompts are left out."""

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 24

Cell = tuple[str, int]
"""Dataset and batch cap, under which every arm is measured."""


class Store(BenchFolder):
    """An output folder, with a record for each run."""

    records_file = "runs.jsonl"


class Runner(Experiment[Arm, Cell, EngineProcess]):
    """Run after run; the next one of all arms begins when the one before is whole.

    Arms take turns, begun by another one in each run: what drifts falls on all alike.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        store: Store,
        prompts: Mapping[str, Sequence[Conversation]],
        gpu: str | None = None,
    ) -> None:
        self._options, self._prompts = options, prompts
        self._grid, self._began_s = PRESETS[options.preset], 0.0
        self.rounds = self._grid["runs"]
        # Runs are left out: more of them may be added later.
        conditions = {name: v for name, v in self._grid.items() if name != "runs"}
        conditions |= {"gpu": gpu, "datasets": sorted(prompts)}
        for name in ("preset", "temperature", "acceptance"):
            conditions[name] = getattr(options, name)
        models = {"target": options.target, "draft": options.draft}
        super().__init__(store, conditions, models, gpu)

    def plan_round(self, number: int) -> Iterator[tuple[list[Arm], list[Cell]]]:
        """Yield single arms and cells: every run starts an engine of its own."""
        arms = [
            arm
            for arm in make_arms(self._grid)
            if any(fnmatchcase(arm.name, pattern) for pattern in self._options.arms)
        ]
        start = (number - 1) * len(arms) // self.rounds
        for cell in itertools.product(self._prompts, self._grid["caps"]):
            for arm in arms[start:] + arms[:start]:
                yield [arm], [cell]

    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:
        """Return run, dataset, batch cap and arm."""
        return {"run": number, "dataset": cell[0], "cap": cell[1], "arm": arm.name}

    def name_of(self, cell: Cell) -> str:
        """Return the batch cap."""
        return f"{cell[1]}"

    @contextmanager
    def start(self, turn: Turn[Arm, Cell]) -> Iterator[EngineProcess]:
        """Start an engine, and warm it up."""
        ((arm,), (cell,)) = turn.arms, turn.cells
        self.progress.show(_name(turn))
        self._began_s = time.monotonic()
        block = self._make_block(turn.round, cell)
        log = f"logs/{cell[1]}-{arm.name.replace(' ', '-')}.log"
        deployment = self._deploy(arm, cell[1])
        engine = EngineProcess(arm.name, deployment, self.folder.folder / log)
        with closing(engine):
            engine.wait_until_ready()
            first = block.prompts[:_WARM_UP_REQUESTS]
            warm_up = replace(block, prompts=first, concurrency=len(first))
            engine.ask("answer", replace(warm_up, max_tokens=_WARM_UP_TOKENS))
            yield engine

    def measure_cell(
        self, turn: Turn[Arm, Cell], cell: Cell, up: EngineProcess
    ) -> None:
        """Send everything at once, and keep what came of it."""
        found = up.ask("answer", self._make_block(turn.round, cell))
        place = self.place(turn.round, turn.arms[0], cell)
        self.folder.append_record(place | found)
        told = f"{_name(turn)}: {sum(found['num_tokens']) / found['seconds']:.0f}"
        spent_s = time.monotonic() - self._began_s
        self.progress.advance(self.name_of(cell), spent_s, f"{told} tokens/s")

    def _deploy(self, arm: Arm, cap: int) -> dict[str, Any]:
        """Return the settings of an arm's engine under a batch cap."""
        options, policy = self._options, arm.policy
        draft = None if policy["name"] == "none" else options.draft
        if draft is not None and options.acceptance is not None:
            depth = policy.get("max_draft_tokens", policy.get("draft_tokens", 0))
            rates = [*options.acceptance, *[0.0] * depth][:depth]
            chances: dict[str, Any] = {"synthetic_acceptance_rates": rates}
            chances |= {"rejection_sample_method": "synthetic"}
            policy = {**policy, "extra": chances}
        engine = describe_engine(
            (options.target, options.draft),
            num_engines=1,
            length=MAX_MODEL_LEN,
            most=cap,
            device=options.device,
            kv_tokens=MAX_MODEL_LEN // 2,
        )
        own = {"dtype": "auto", "max_num_batched_tokens": 2048}
        return deploy(options.target, draft, policy, engine | own)

    def _make_block(self, run: int, cell: Cell) -> Block:
        """Return other prompts in each run, the same for all arms."""
        (tokens, end), grid = self._tokens, self._grid
        own, count = tokens[cell[0]], grid["requests"]
        numbers = range((run - 1) * count, run * count)
        asked = tuple(own[number % len(own)] for number in numbers)
        return Block(asked, count, self._options.temperature, grid["max_tokens"], end)

    @cached_property
    def _tokens(self) -> tuple[dict[str, list[tuple[int, ...]]], int]:
        """Token ids of the prompts that are short enough, and the end's."""
        most = self._grid["max_tokens"]
        maker = RequestMaker.load(self._options.target, 0, most)
        longest = MAX_MODEL_LEN - most - 16
        found = {}
        for name, conversations in self._prompts.items():
            rendered = map(maker.render, conversations)
            found[name] = [tuple(ids) for ids in rendered if len(ids) <= longest]
            if not found[name]:
                raise LoadTestError(f"{name}: no prompt has {longest} tokens or fewer")
        return found, maker.eos_token_id


def _name(turn: Turn[Arm, Cell]) -> str:
    dataset, cap = turn.cells[0]
    return f"run {turn.round} {dataset} cap {cap} {turn.arms[0].name}"
