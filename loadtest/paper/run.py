"""The controller: run after run, a group of arms at a time, side by side."""

import argparse
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from loadtest.engine.plan import Block, deploy, describe_engine
from loadtest.engine.pool import EngineProcess
from loadtest.engine.run import SideBySide, digest_conditions
from loadtest.engine.workloads import RequestMaker
from loadtest.errors import LoadTestError
from loadtest.experiment import Turn, shuffle
from loadtest.load.workloads import Conversation
from loadtest.result_folder import ResultFolder

from .grid import PRESETS, Method, group_arms, make_arms

MAX_MODEL_LEN = 2048
"""As in the paper's scripts; longer prompts are left out."""

KV_TOKENS = 512
"""Positions for which each request has room on average, where engines share memory."""

_WARM_UP_PER_SLOT, _WARM_UP_TOKENS = 2, 24

Engines = Mapping[Method, EngineProcess]


@dataclass(frozen=True, slots=True)
class Cell:
    """Dataset and batch cap, under which every arm of a group is measured."""

    dataset: str
    cap: int
    group: int


class Runner(SideBySide[Method, Cell]):
    """Run after run on engines that start anew; the same requests for all arms.

    A batch cap is kept by whoever sends: times count from when all requests came.
    A GPU holds one engine, so there each arm is alone.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        store: ResultFolder,
        prompts: Mapping[str, Sequence[Conversation]],
        gpu: str | None = None,
    ) -> None:
        self._options, self._prompts, self._gpu = options, prompts, gpu
        self._grid = PRESETS[options.preset]
        self.rounds = self._grid["runs"]
        # Runs are left out: more of them may be added later.
        conditions = {name: v for name, v in self._grid.items() if name != "runs"}
        conditions |= {"gpu": gpu, "datasets": sorted(prompts)}
        for name in ("preset", "temperature", "acceptance"):
            conditions[name] = getattr(options, name)
        for name, chats in prompts.items():
            text = repr([chat.messages for chat in chats]).encode()
            digest = hashlib.sha256(text).hexdigest()[:12]
            conditions[f"prompts of {name}"] = digest
        conditions |= digest_conditions("loadtest/paper/*.py")
        models = {"target": options.target, "draft": options.draft}
        requests = RequestMaker.load(
            options.target, options.seed, self._grid["max_tokens"]
        )
        super().__init__(store, requests, conditions, models, gpu)

    def plan_round(self, number: int) -> Iterator[tuple[list[Method], list[Cell]]]:
        """Yield groups of arms, with all cells of each."""
        arms = [
            arm
            for arm in make_arms(self._grid)
            if any(fnmatchcase(arm.name, pattern) for pattern in self._options.arms)
        ]
        groups = group_arms(arms)
        if self._gpu is not None:
            # By their places in the table, whatever the turn of each.
            groups = [[arm] for arm in arms]
        cells = [*itertools.product(self._prompts, self._grid["caps"])]
        for group in shuffle(range(len(groups)), f"{number}"):
            yield groups[group], [Cell(*cell, group) for cell in cells]

    def place(self, number: int, arm: Method, cell: Cell) -> dict[str, Any]:
        """Return run, dataset, batch cap, group and arm."""
        own = {"dataset": cell.dataset, "cap": cell.cap, "group": cell.group}
        return {"run": number, **own, "arm": arm.name}

    def name_of(self, cell: Cell) -> str:
        """Return dataset and batch cap."""
        return f"{cell.dataset}-cap-{cell.cap}"

    def start(self, turn: Turn[Method, Cell]) -> AbstractContextManager[Engines]:
        """Start engines, and warm them up at every batch cap, by prompts of the end."""
        warm_ups = []
        for cell in turn.cells:
            block = self._make_block(turn.round, cell)
            last = block.prompts[-_WARM_UP_PER_SLOT * cell.cap :]
            warm_ups.append(replace(block, prompts=last, max_tokens=_WARM_UP_TOKENS))
        return self.start_warm(turn.arms, self._deploy, warm_ups)

    def measure_cell(self, turn: Turn[Method, Cell], cell: Cell, up: Engines) -> None:
        """Send everything at once to one arm after the other; keep what came of it."""
        asked = "answer", self._make_block(turn.round, cell)
        # Only what was up at the same time is compared in pairs, where several can be.
        start = f"{turn.round}"
        if self._gpu is None:
            start += f".{self.piece}.{cell.group}"
        found, messages = [], dict.fromkeys(up, asked)
        for arm, result in self.ask_in_turn(turn, cell, 0, up, messages):
            place = self.place(turn.round, arm, cell) | {"start": start}
            found.append(place | result)
            told = f"{sum(result['num_tokens']) / result['seconds']:.0f} tokens/s"
            label = f"run {turn.round} {self.name_of(cell)} {arm.name}: {told}"
            self.progress.advance(self.name_of(cell), self.spent_s[arm], label)
        self.folder.append_record(found)

    def _deploy(self, arm: Method) -> dict[str, Any]:
        """Return the settings of an arm's engine."""
        options, policy = self._options, arm.settings()
        draft = None if arm.policy == "none" else options.draft
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
            most=max(self._grid["caps"]),
            device=options.device,
            kv_tokens=KV_TOKENS,
        )
        own: dict[str, Any] = {"max_num_batched_tokens": 2048}
        if options.device == "gpu":
            own["dtype"] = "auto"
        return deploy(options.target, draft, policy, engine | own)

    def _make_block(self, run: int, cell: Cell) -> Block:
        """Return the next prompts in each run, the first ones again after the last."""
        own, count = self._tokens[cell.dataset], self._grid["requests"]
        numbers = range((run - 1) * count, run * count)
        asked = tuple(own[number % len(own)] for number in numbers)
        rest = self._options.temperature, self._grid["max_tokens"]
        return Block(asked, cell.cap, *rest, self.requests.eos_token_id)

    @cached_property
    def _tokens(self) -> dict[str, list[tuple[int, ...]]]:
        """Token ids of the prompts that are short enough."""
        longest = MAX_MODEL_LEN - self._grid["max_tokens"] - 16
        found = {}
        for name, conversations in self._prompts.items():
            rendered = map(self.requests.render, conversations)
            found[name] = [tuple(ids) for ids in rendered if len(ids) <= longest]
            if not found[name]:
                raise LoadTestError(f"{name}: no prompt has {longest} tokens or fewer")
        return found
