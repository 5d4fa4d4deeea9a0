"""From requests and outputs to evidence, by feature and by draft position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.engine.law.evidence import Evidence, bet
from tests.engine.law.laws import Law, find_laws
from tests.engine.law.traffic import LawRequest

FOLLOWING = "following"
"""Where no draft was verified: first tokens, bonus tokens, steps without drafts."""


@dataclass
class Judged:
    """One request: what came out, and what each token had to follow.

    Attributes:
        law: Of every token.
        drafts: `[num_tokens, vocab]`, float64. The draft's law, 0 where none was
            verified.
        position: `[num_tokens]`, int64. Which draft of its block was verified, from 1
            on; 0 for none.
    """

    request: LawRequest
    output: Sequence[int]
    law: Law
    drafts: torch.Tensor
    position: np.ndarray


def join(requests, outputs, blocks, reference):
    """Put together what is known of each request; the reference is in float64."""
    prompts = [request.prompt for request in requests]
    samplings = [request.sampling for request in requests]
    laws = find_laws(reference, prompts, outputs, samplings)
    judged = []
    for request, output, own, law in zip(requests, outputs, blocks, laws, strict=True):
        drafts = torch.zeros_like(law.target)
        position = np.zeros(len(output), dtype=np.int64)
        for block in own:
            count = block.count_reached(output)
            reached = slice(block.start, block.start + count)
            drafts[reached] = block.laws[:count].double()
            position[reached] = np.arange(1, count + 1)
        judged.append(Judged(request, output, law, drafts, position))
    return judged


@dataclass
class Verdict:
    """Evidence of the same tokens: all of it, and by feature and draft position.

    One of the positions is `FOLLOWING`.
    """

    total: Evidence
    by_feature: dict[str, Evidence]
    by_position: dict[str, Evidence]


def judge(judged):
    """Bet on every token."""
    position = np.concatenate([one.position for one in judged])
    winnings = bet(
        [token for one in judged for token in one.output],
        torch.cat([one.law.target for one in judged]),
        torch.cat([one.law.raw for one in judged]),
        torch.cat([one.drafts for one in judged]),
        torch.from_numpy(position > 0),
        torch.cat([one.law.is_certain for one in judged]),
    )
    lengths = [len(one.output) for one in judged]
    features = np.repeat([one.request.feature for one in judged], lengths)
    by_position = {
        f"draft {depth}" if depth else FOLLOWING: winnings.collect(position == depth)
        for depth in np.unique(position)
    }
    kinds = np.unique(features)
    by_feature = {name: winnings.collect(features == name) for name in kinds}
    return Verdict(winnings.collect(), by_feature, by_position)
