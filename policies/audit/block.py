"""An audited block, and the policy's own steps on either side of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

Arm = Literal["none", "best_fixed"]
"""What a block does instead: draft nothing, or the best fixed length."""

NUM_NEIGHBOURS = 16
"""Steps on either side that a block is compared with: near enough for what drifts."""

MIN_NEIGHBOURS = 3
"""On either side; with fewer of the same load a block tells nothing."""


class SeenStep(NamedTuple):
    """A step that was timed.

    Attributes:
        num_reqs: Requests in it.
        ms: What it took.
        tokens: Emitted per request.
        num_prompt: Prompt tokens in it.
        target_ms: What it took without the drafter's passes.
        width: Tokens of the target's pass: one per request, drafts and prompts.
    """

    num_reqs: int
    ms: float
    tokens: float
    num_prompt: int
    target_ms: float
    width: int


class BlockResult(NamedTuple):
    """What a block has shown.

    Attributes:
        at_s: When, in seconds of the engine's own time.
        arm: What it did.
        num_reqs: In its measured steps.
        num_steps: Measured.
        ms: All of them together.
        tokens: All of them together, per request.
        num_prompt: Prompt tokens in all of them.
        near_target_ms: A step of the policy's at a load like it, before and after,
            without the drafter's passes.
        near_width: Likewise, tokens of the target's pass.
    """

    at_s: float
    arm: Arm
    num_reqs: int
    num_steps: int
    ms: float
    tokens: float
    num_prompt: int
    near_target_ms: float
    near_width: float


def is_same_load(num_reqs: int, other: int) -> bool:
    """Whether steps of so many requests are of one load: the same, or a 16th apart."""
    return 16 * abs(num_reqs - other) <= num_reqs


def is_like_load(num_reqs: int, other: int) -> bool:
    """Whether a step tells the engine's pace at another load: one or a quarter apart.

    What the tokens of more or fewer requests take is known, and taken out; were only
    the same load admitted, hardly a block would have steps on both sides while requests
    come and go.
    """
    return 4 * abs(num_reqs - other) <= max(4, num_reqs)


@dataclass(slots=True)
class Block:
    """A block under way, or waiting for the steps after it.

    Attributes:
        arm: What it does.
        draft_tokens: What it drafts and verifies of every request; 0 for `none`.
        before: The policy's steps before it.
        num_begun: Steps so far.
    """

    arm: Arm
    draft_tokens: int
    before: tuple[SeenStep, ...]
    num_begun: int = 0
    measured: list[SeenStep] = field(default_factory=list)
    after: list[SeenStep] = field(default_factory=list)

    def settle(self, at_s: float) -> BlockResult | None:
        """Compare with the steps on both sides; None if they are too few.

        Both sides weigh alike, so that whatever drifts evenly leaves no trace.
        """
        if not self.measured:
            return None
        loads = [step.num_reqs for step in self.measured]
        num_reqs = max(loads, key=loads.count)
        own = [one for one in self.measured if is_same_load(num_reqs, one.num_reqs)]
        before, after = (
            [
                (step.target_ms, step.width)
                for step in steps
                if is_like_load(num_reqs, step.num_reqs)
            ]
            for steps in (self.before, self.after)
        )
        if min(len(before), len(after)) < MIN_NEIGHBOURS:
            return None
        sides = np.array(before).mean(axis=0), np.array(after).mean(axis=0)
        near = (0.5 * sum(sides)).tolist()
        return BlockResult(
            at_s,
            self.arm,
            num_reqs,
            len(own),
            sum(step.ms for step in own),
            sum(step.tokens for step in own),
            sum(step.num_prompt for step in own),
            *near,
        )


@dataclass(slots=True)
class Neighbours:
    """Keeps the policy's latest steps for the block that they stand beside."""

    _latest: deque[SeenStep] = field(
        default_factory=lambda: deque(maxlen=NUM_NEIGHBOURS)
    )
    _waiting: Block | None = None

    def before(self) -> tuple[SeenStep, ...]:
        """Return the steps before a block that begins now, after the one before it."""
        return tuple(self._latest)

    def end(self, block: Block) -> None:
        """Let a block that has ended wait for the steps after it."""
        self._latest.clear()
        self._waiting = block

    def add(self, step: SeenStep) -> Block | None:
        """Take in a step of the policy's; return a block that needs no further one."""
        self._latest.append(step)
        block = self._waiting
        if block is None:
            return None
        block.after.append(step)
        return self.stop_waiting() if len(block.after) >= NUM_NEIGHBOURS else None

    def stop_waiting(self) -> Block | None:
        """Return the block that waits, with what there is after it."""
        block, self._waiting = self._waiting, None
        return block
