"""What is measured: cells, rounds, and the presets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import Arm, parse_bench_arm

DRIFT_REQUESTS_PER_SLOT = 8
"""Recovery is counted in steps: so many replies of the demo pair's tasks for each one
in flight take a hundred of them, four tokens a step."""

PLANNING = "planning"
"""Workload of mixed requests for `goodput` alone: to time its planning, more must be in
flight than are worth the time of all policies."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which every arm is measured."""

    workload: str
    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        """Short name, also fit for a file."""
        return f"{self.workload}-t{self.temperature:g}-c{self.concurrency}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "workload": self.workload,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
        }


def is_planning(cell: Cell) -> bool:
    """Tell whether a cell is there for the time of planning alone."""
    return cell.workload == PLANNING


def is_sweep(cell: Cell) -> bool:
    """Tell whether a cell belongs to the sweep over loads, where settings compete."""
    return cell.workload == "mixed" and cell.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """A product of workloads, temperatures and concurrencies."""

    workloads: tuple[str, ...]
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named run.

    The last request of each place passes unmeasured, and those of few places are over
    in few steps of long drafts. So there are rather more requests than rounds. A round
    is shortened where most of it goes, in drifting cells: before the change, which only
    has to find a settled policy, there are as many requests as in a steady cell. The
    steps after it stay as many, and the policies compared too: recovery is judged by
    them.

    Attributes:
        summary: What it is for.
        policies: Arms in the order of the tables.
        blocks: Cells are the union of these products.
        sweep_policies: Those of `policies` that take part in the sweep alone.
        rounds: Measured rounds.
        max_tokens: Longest reply.
        min_requests: Fewest requests of a cell; in drifting cells after the change.
        requests_per_slot: Requests of a cell for each one in flight.
        drift_requests_per_slot: The same after a change of conditions; before it there
            are `requests_per_slot`.
        planning_at: Requests in flight of a cell that times planning; None for none.
        target_parameters: Size of the padded target; None for the target as it is.
        trace: Whether a traced round, which the plots of decisions need, follows.
        rounds_per_start: Rounds on the same engines; None for all of them.
    """

    summary: str
    policies: tuple[str, ...]
    blocks: tuple[Block, ...]
    sweep_policies: tuple[str, ...] = ()
    rounds: int = 5
    max_tokens: int = 128
    min_requests: int = 16
    requests_per_slot: int = 5
    drift_requests_per_slot: int = DRIFT_REQUESTS_PER_SLOT
    planning_at: int | None = None
    target_parameters: int | None = 100_000_000
    trace: bool = True
    rounds_per_start: int | None = None

    def arms(self) -> tuple[Arm, ...]:
        """Return the arms."""
        return tuple(parse_bench_arm(text) for text in self.policies)

    def sweep_arms(self) -> frozenset[Arm]:
        """Return the arms of the sweep alone."""
        return frozenset(parse_bench_arm(text) for text in self.sweep_policies)

    def planning_blocks(self) -> tuple[Block, ...]:
        """Return what is measured on `goodput` alone."""
        if self.planning_at is None:
            return ()
        return (Block((PLANNING,), (0.0,), (self.planning_at,)),)


_FIXED = ("none", *(f"fixed:{k}" for k in range(1, 7)))
_TETRIS = tuple(f"tetris:{k}+2" for k in range(2, 5))
_ALL = (*_FIXED, "dynamic:6", *_TETRIS, "goodput:8")
_FEW = (1, 4, 16)
_FEWER = (1, 2, 4)
"""For long prompts, which take most of the time themselves."""
_BESIDE_NEIGHBOUR = (1, 4, 8)
"""Half the machine is as busy with 8 as all of it with 16, in half the time."""

PRESETS: dict[str, Preset] = {
    "full": Preset(
        summary="every policy; mixed requests at six concurrencies, the rest at three",
        policies=_ALL,
        sweep_policies=("tetris:4+2",),
        blocks=(
            Block(("mixed",), (0.0,), (1, 2, 4, 8, 16, 32)),
            Block(("easy", "hard"), (0.0,), _FEW),
            Block(("drift-context",), (0.0,), _FEWER),
            Block(("drift-neighbour",), (0.0,), _BESIDE_NEIGHBOUR),
            Block(("mixed",), (1.0,), _FEW),
        ),
        rounds=3,
        # Fewer would leave 4 in flight some 30 steps.
        min_requests=24,
        planning_at=64,
    ),
    "readme": Preset(
        summary="the small table: none, fixed 1 to 6, tetris and goodput at 1, 4, 16",
        policies=(*_FIXED, "tetris:2+2", "goodput:8"),
        blocks=(Block(("mixed",), (0.0,), _FEW),),
        trace=False,
    ),
    "drift": Preset(
        summary="long contexts, or a neighbour on one core, arrive on the way",
        policies=("none", "fixed:1", "fixed:3", "dynamic:6", "tetris:2+2", "goodput:8"),
        blocks=(
            Block(("drift-context",), (0.0,), _FEWER),
            Block(("drift-neighbour",), (0.0,), _BESIDE_NEIGHBOUR),
        ),
    ),
    "cold": Preset(
        summary="what depth 0 costs beside no speculation: cold, and warm",
        policies=("cold:8", "warm:8", "none"),
        blocks=(Block(("mixed",), (0.0,), _FEW),),
        # The interval must be narrower than the one per cent in question, and two
        # engines of one kind are further apart than that: one start would decide it.
        rounds=10,
        rounds_per_start=1,
        trace=False,
    ),
    "gpu": Preset(
        summary="with --device gpu: vLLM's own ways and ours, 1 to 256 in flight",
        policies=(
            *("none", "fixed:2", "fixed:4", "fixed:6", "adaptive:6"),
            *("tetris:2+4", "goodput:6"),
        ),
        blocks=(
            Block(("mixed",), (0.0,), (1, 16, 64, 256)),
            Block(("drift-context",), (0.0,), (64,)),
            Block(("mixed",), (1.0,), (64,)),
        ),
        min_requests=24,
        target_parameters=None,
        trace=False,
        rounds_per_start=1,
    ),
    "smoke": Preset(
        summary="does it run: few tiny cells, numbers without meaning",
        policies=("none", "fixed:2", "tetris:2+2", "goodput:4"),
        blocks=(
            Block(("mixed",), (0.0,), (1, 4)),
            Block(("mixed",), (1.0,), (4,)),
            Block(("drift-neighbour",), (0.0,), (4,)),
        ),
        rounds=2,
        max_tokens=32,
        min_requests=6,
        requests_per_slot=3,
        drift_requests_per_slot=3,
        target_parameters=None,
    ),
}


def replace_axes(
    blocks: Iterable[Block],
    workloads: Sequence[str] | None = None,
    temperatures: Sequence[float] | None = None,
    concurrencies: Sequence[int] | None = None,
) -> tuple[Block, ...]:
    """Return the blocks with the given axes in the place of their own."""
    return tuple(
        Block(
            tuple(workloads or block.workloads),
            tuple(block.temperatures if temperatures is None else temperatures),
            tuple(concurrencies or block.concurrencies),
        )
        for block in blocks
    )


def list_cells(blocks: Iterable[Block]) -> tuple[Cell, ...]:
    """Return the cells of all blocks, each once, in the order of the blocks."""
    return tuple(
        dict.fromkeys(
            Cell(workload, temperature, concurrency)
            for block in blocks
            for workload in block.workloads
            for temperature in block.temperatures
            for concurrency in block.concurrencies
        )
    )


def shuffle(arms: Sequence[Arm], key: str) -> list[Arm]:
    """Return the arms in an order that the key decides.

    With other keys every arm comes first and last, and after every other one: what one
    leaves behind, and what drifts, falls on all of them alike.
    """
    order = list(arms)
    random.Random(key).shuffle(order)
    return order
