"""What can meet in an engine, and the few cases in which every two of it do."""

import itertools
from dataclasses import dataclass

DRAFTERS = ("draft_model", "argmax", "eagle", "eagle3", "mtp")
"""vLLM's methods; `argmax` is a draft model whose drafts are not sampled."""

SELECTED_BY = ("fixed", "dynamic", "tetris", "goodput")


@dataclass(frozen=True)
class Case:
    """One batch of requests of all kinds.

    Attributes:
        drafter: Whose drafts.
        policy: Which of them are verified.
        long_prompts: Computed in chunks.
        tight: KV blocks run short: requests are preempted and start again.
        gaps: Drafting is broken off and resumed cold.
        classes: Requests weigh differently and have latency targets.
    """

    drafter: str
    policy: str
    long_prompts: bool = False
    tight: bool = False
    gaps: bool = False
    classes: bool = False

    def __str__(self):
        """Name it in a test's id and in the file of evidence."""
        flags = ("long_prompts", "tight", "gaps", "classes")
        on = [flag.removesuffix("_prompts") for flag in flags if getattr(self, flag)]
        return "-".join([self.drafter, self.policy, *on])


def pair_up():
    """Return cases in which any two values of any two attributes meet."""
    return [
        Case(
            drafter,
            policy,
            long_prompts=bool((d + p) % 2),
            tight=bool((d + p // 2) % 2),
            gaps=bool((d // 2 + p) % 2),
            classes=bool((d // 2 + p // 2) % 2),
        )
        for d, drafter in enumerate(DRAFTERS)
        for p, policy in enumerate(SELECTED_BY)
    ]


def combine_all(drafters=DRAFTERS):
    """Return all cases there are, those of one drafter together."""
    return [
        Case(drafter, policy, *flags)
        for drafter in drafters
        for policy in SELECTED_BY
        for flags in itertools.product((False, True), repeat=4)
    ]


def pair_up_policies(drafter):
    """Return one case for each policy, in which any two of the other values meet.

    For an engine that is too slow for more; `classes` goes with `tight`.
    """
    return [
        Case(
            drafter,
            policy,
            long_prompts=p in (1, 3),
            tight=p in (2, 3),
            gaps=p in (1, 2),
            classes=p in (2, 3),
        )
        for p, policy in enumerate(SELECTED_BY)
    ]
