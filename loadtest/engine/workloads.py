"""Requests in tokens: those of the load test over HTTP, the same for every arm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import LoadTestError
from loadtest.load.workloads import GENERATED, Conversation, make_workload

from .loop import REQUESTS_TO_BE_STEADY
from .plan import Block, Cell, longest_prompt

DRIFTS = {"drift-context": ("mixed", "long-context")}
"""Workloads that change on the way: from what to what."""

WORKLOADS = (*GENERATED, *DRIFTS)

REQUESTS_PER_SLOT, MIN_REQUESTS = 6, 24
"""Requests of a block for each one in flight, and of all; in drifting cells before the
change and after it. Those that come first and last are not measured."""

_WARM_UP_TOKENS = 72
"""Reply length while warming up: enough for the numbers of tokens that steps carry to
occur, for each of which oneDNN compiles its products once."""

_MAX_IN_A_ROW = 1000
"""Prompts too long for a workload before that is taken for an error."""


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes request lists from a seed.

    `render` turns a conversation, up to its last question, into token ids.
    """

    render: Callable[[Conversation], list[int]]
    eos_token_id: int
    seed: int
    max_tokens: int
    max_prompt_tokens: int | None = None

    @classmethod
    def load(
        cls,
        target: Path,
        seed: int,
        max_tokens: int,
        max_prompt_tokens: int | None = None,
    ) -> RequestMaker:
        """Make requests for the tokenizer of a model directory."""
        # Takes seconds, which only who measures shall wait for.
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer = load_tokenizer(target)

        def render_last(conversation: Conversation) -> list[int]:
            *_, messages = conversation.prompts()
            tools = bool(conversation.tools)
            return render(tokenizer, messages, with_tools=tools, reply_follows=True)

        end = int(tokenizer.eos_token_id)
        return cls(render_last, end, seed, max_tokens, max_prompt_tokens)

    def make(self, cell: Cell, round_number: int, block: int = 0) -> Block:
        """Make the requests of a block of a cell in a round, for all temperatures."""
        key = f"{self.seed} {cell.concurrency} {round_number} {block}"
        place = cell.concurrency, cell.temperature, self.max_tokens, self.eos_token_id
        num_before = REQUESTS_PER_SLOT * cell.concurrency
        num_after = max(MIN_REQUESTS, num_before)
        if cell.workload not in DRIFTS:
            return Block(self.draw(cell.workload, key, num_after), *place)
        before, after = DRIFTS[cell.workload]
        prompts = self.draw(before, f"{key} before", num_before)
        prompts += self.draw(after, f"{key} after", num_after)
        return Block(prompts, *place, num_before)

    def make_warm_up(self, concurrency: int) -> Block:
        """Make mixed requests that are thrown away."""
        count = REQUESTS_TO_BE_STEADY * concurrency
        prompts = self.draw("mixed", f"{self.seed} warm-up {concurrency}", count)
        return Block(prompts, concurrency, 0.0, _WARM_UP_TOKENS, self.eos_token_id)

    def draw(self, workload: str, key: str, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the first prompts of a workload that are short enough, as tokens."""
        return tuple(itertools.islice(self._prompts(workload, key), count))

    def _prompts(self, workload: str, key: str) -> Iterator[tuple[int, ...]]:
        """Yield the prompts of a workload that are short enough."""
        source, too_long = make_workload(workload, key), 0
        limit = self.max_prompt_tokens or longest_prompt(workload)
        for number in itertools.count():
            prompt = self.render(source.conversation(number))
            too_long = 0 if len(prompt) <= limit else too_long + 1
            if not too_long:
                yield tuple(prompt)
            elif too_long >= _MAX_IN_A_ROW:
                raise LoadTestError(
                    f"--workloads {workload}: {too_long} prompts in a row have more "
                    f"than {limit} tokens"
                )
