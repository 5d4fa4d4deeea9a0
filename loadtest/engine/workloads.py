"""Requests in tokens: those of the load test over HTTP, the same for every arm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.client.errors import LoadTestError
from loadtest.load.workloads import GENERATED, Conversation, make_workload

from .closed_loop import min_requests
from .plan import Cell

Render = Callable[[Conversation], list[int]]
"""Turns a conversation, up to its last question, into token ids."""

NEIGHBOUR = "drift-neighbour"
DRIFTS = {"drift-context": ("mixed", "long-context"), NEIGHBOUR: ("mixed", "mixed")}
"""Workloads that change on the way: from what to what. With the neighbour another
process takes a core instead."""

WORKLOADS = (*GENERATED, *DRIFTS)

REQUESTS_PER_SLOT = 6
"""Requests of a block for each one in flight; in drifting cells before the change and
after it. Those that come first and last are not measured."""

_SHORT = ("easy", "hard", "mixed", NEIGHBOUR)
MAX_SHORT_TOKENS, MAX_LONG_TOKENS = 320, 1200
"""Longer prompts are left out, so that memory and context can be sized."""

_MAX_IN_A_ROW = 1000
"""Prompts too long for a workload before that is taken for an error."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a block.

    Attributes:
        prompts: Token ids of each request, in the order of admission.
        switch_at: The request with whose admission conditions change; None if they
            do not.
    """

    prompts: tuple[tuple[int, ...], ...]
    switch_at: int | None = None


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes request lists from a seed.

    Attributes:
        render: Of the target's tokenizer.
        eos_token_id: Ends a turn.
        seed: Of all lists.
        min_requests: Fewest requests of a list; in drifting cells after the change.
    """

    render: Render
    eos_token_id: int
    seed: int
    min_requests: int

    @classmethod
    def load(cls, target: Path, seed: int, min_requests: int) -> RequestMaker:
        """Make requests for the tokenizer of a model directory."""
        # Takes seconds, which only who measures shall wait for.
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer = load_tokenizer(target)

        def render_last(conversation: Conversation) -> list[int]:
            *_, messages = conversation.prompts()
            tools = bool(conversation.tools)
            return render(tokenizer, messages, with_tools=tools, reply_follows=True)

        return cls(render_last, int(tokenizer.eos_token_id), seed, min_requests)

    def make(self, cell: Cell, round_number: int, block: int = 0) -> Requests:
        """Make the requests of a block of a cell in a round.

        Temperatures share their requests.
        """
        key = f"{self.seed} {cell.concurrency} {round_number} {block}"
        num_before = REQUESTS_PER_SLOT * cell.concurrency
        num_after = max(self.min_requests, num_before)
        if cell.workload not in DRIFTS:
            return Requests(self._draw(cell.workload, key, num_after))
        before, after = DRIFTS[cell.workload]
        prompts = self._draw(before, f"{key} before", num_before)
        return Requests(
            prompts + self._draw(after, f"{key} after", num_after), num_before
        )

    def make_warm_up(self, concurrency: int) -> Requests:
        """Make mixed requests that are thrown away."""
        key = f"{self.seed} warm-up {concurrency}"
        return Requests(self._draw("mixed", key, min_requests(concurrency)))

    def _draw(self, workload: str, key: str, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(itertools.islice(self._prompts(workload, key), count))

    def _prompts(self, workload: str, key: str) -> Iterator[tuple[int, ...]]:
        """Yield the prompts of a workload that are short enough."""
        source, too_long = make_workload(workload, key), 0
        for number in itertools.count():
            prompt = self.render(source.conversation(number))
            if len(prompt) <= longest_prompt(workload):
                too_long = 0
                yield tuple(prompt)
            elif (too_long := too_long + 1) >= _MAX_IN_A_ROW:
                raise LoadTestError(
                    f"--workloads {workload}: {too_long} prompts in a row have more "
                    f"than {longest_prompt(workload)} tokens"
                )


def longest_prompt(workload: str) -> int:
    """Return the most tokens a prompt of a workload can have."""
    return MAX_SHORT_TOKENS if workload in _SHORT else MAX_LONG_TOKENS


def check_workloads(names: Sequence[str]) -> None:
    """Check that all workloads can be made.

    Raises:
        ValueError: If one is neither ours nor a file with prompts.
    """
    for name in names:
        if name not in DRIFTS:
            try:
                make_workload(name, "")
            except LoadTestError as error:
                raise ValueError(f"{error}; or {', '.join(DRIFTS)}") from None
