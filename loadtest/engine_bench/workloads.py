"""Requests: held-out demo prompts by difficulty, the same for every arm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.models.tasks import TASKS, Exchange, Message, Task, draw

from .closed_loop import min_requests
from .errors import BenchError
from .plan import DRIFT_REQUESTS_PER_SLOT, PLANNING, Cell

Render = Callable[[Sequence[Message], bool], list[int]]
"""Turns chat messages into token ids; the flag lists the demo tools."""

LONG_PROMPT_TOKENS = (600, 800)
"""Range of lengths aimed at after the shift of `drift-context`; the turn that reaches
them is kept whole."""

MAX_SHORT_TOKENS = 320
MAX_LONG_TOKENS = 1200
"""Longer prompts are drawn again, so that memory and context can be sized."""

_MAX_DRAWS = 1000

_DIFFICULTIES = {
    "easy": ("easy",),
    "hard": ("hard",),
    "mixed": ("easy", "mixed", "hard"),
    "drift-context": ("easy", "mixed", "hard"),
    "drift-neighbour": ("easy", "mixed", "hard"),
    PLANNING: ("easy", "mixed", "hard"),
}
WORKLOADS = tuple(_DIFFICULTIES)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one cell in one round.

    Attributes:
        prompts: Token ids of each request, in the order of admission.
        switch_at: The request with whose admission conditions change; None if they
            do not.
        neighbour: Whether another process takes a core from then on.
    """

    prompts: tuple[tuple[int, ...], ...]
    switch_at: int | None = None
    neighbour: bool = False


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes request lists from a seed.

    Attributes:
        render: Chat messages to token ids.
        eos_token_id: Ends a turn.
        seed: Of all lists.
        min_requests: Fewest requests of a list; in drifting cells after the change.
        requests_per_slot: Requests for each one in flight; in drifting cells before the
            change of conditions.
        drift_requests_per_slot: The same after the change.
    """

    render: Render
    eos_token_id: int
    seed: int
    min_requests: int
    requests_per_slot: int
    drift_requests_per_slot: int = DRIFT_REQUESTS_PER_SLOT

    def make(self, cell: Cell, round_number: int) -> Requests:
        """Make the requests of a cell in a round.

        Temperatures share their requests.
        """
        workload = cell.workload
        rng = random.Random(f"{self.seed} {workload} {cell.concurrency} {round_number}")
        num_requests = self.count(cell)
        num_before = self.requests_per_slot * cell.concurrency
        num_short = num_before if workload == "drift-context" else num_requests
        return Requests(
            prompts=tuple(
                self._prompt(workload, rng, is_long=index >= num_short)
                for index in range(num_requests)
            ),
            switch_at=num_before if is_drifting(workload) else None,
            neighbour=workload == "drift-neighbour",
        )

    def make_warm_up(self, concurrency: int) -> Requests:
        """Make mixed requests that are thrown away."""
        rng = random.Random(f"{self.seed} warm-up {concurrency}")
        num_requests = min_requests(concurrency)
        return Requests(tuple(self._prompt("mixed", rng) for _ in range(num_requests)))

    def count(self, cell: Cell) -> int:
        """Return how many requests a cell has."""
        num_requests = self.requests_per_slot * cell.concurrency
        if is_drifting(cell.workload):
            num_after = self.drift_requests_per_slot * cell.concurrency
            return num_requests + max(self.min_requests, num_after)
        return max(self.min_requests, num_requests)

    def _prompt(
        self, workload: str, rng: random.Random, *, is_long: bool = False
    ) -> tuple[int, ...]:
        limit = MAX_LONG_TOKENS if is_long else MAX_SHORT_TOKENS
        for _ in range(_MAX_DRAWS):
            wanted = rng.randint(*LONG_PROMPT_TOKENS) if is_long else 0
            prompt = self._chat(workload, rng, wanted)
            if len(prompt) <= limit:
                return tuple(prompt)
        raise BenchError(
            f"--target: its tokenizer turns no {workload} prompt into {limit} tokens "
            "or fewer; use the tokenizer of the demo pair"
        )

    def _chat(self, workload: str, rng: random.Random, wanted: int) -> list[int]:
        """Draw a question, behind as many earlier turns as make it `wanted` long."""
        asked = _draw(workload, rng)
        question = list(asked.messages[:-1])
        history: list[Message] = []
        while True:
            prompt = self.render([*history, *question], asked.needs_tools)
            if len(prompt) >= wanted:
                return prompt
            history.extend(_draw(workload, rng).messages)


def longest_prompt(workload: str) -> int:
    """Return the most tokens a prompt of a workload can have."""
    return MAX_LONG_TOKENS if workload == "drift-context" else MAX_SHORT_TOKENS


def is_drifting(workload: str) -> bool:
    """Tell whether conditions change on the way."""
    return workload.startswith("drift-")


def load_render(model: Any) -> tuple[Render, int]:
    """Load a model directory's tokenizer.

    Args:
        model: Directory with `tokenizer.json`.

    Returns:
        The function that `RequestMaker` needs, and the end-of-turn token.
    """
    from loadtest.models.tokenizer import load_tokenizer, render

    tokenizer = load_tokenizer(model)

    def render_chat(messages: Sequence[Message], with_tools: bool) -> list[int]:
        return render(tokenizer, messages, with_tools=with_tools, reply_follows=True)

    return render_chat, int(tokenizer.eos_token_id)


def _draw(workload: str, rng: random.Random) -> Exchange:
    """Draw a held-out exchange: its difficulty evenly, then its task by weight."""
    difficulty = rng.choice(_DIFFICULTIES[workload])
    tasks: list[Task] = [t for t in TASKS.values() if t.difficulty == difficulty]
    task = rng.choices(tasks, weights=[task.weight for task in tasks])[0]
    return draw(task, rng, held_out=True)
