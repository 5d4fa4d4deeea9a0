"""Scores of single tokens, and e-values: evidence that adds up, whenever one looks.

Under its law p a token's score `f(y) - E_p[f]` has mean 0, whatever `f` is, as long as
`f` was known before the token was drawn. A gambler who stakes a share `b` of his money
on the score multiplies it by `1 + b * score`. If every token follows its law, his money
is a martingale: that it ever multiplies by 10,000 has a probability of 1 in 10,000
(Ville's inequality), whatever comes to pass and however long he plays. Money may be
multiplied over tokens, requests, engines and seeds, and averaged over gamblers, and
stays evidence of that kind.

Three directions `f`, each towards a way in which speculation goes wrong:
    draft: `q(y) / p(y)`: some tokens come from the draft's law q. A stake of .05 is the
        likelihood ratio of 5 % such tokens.
    likely: `q(y)`: what the draft holds likely comes too often, as when it is decided
        by the token drawn which drafts are verified, or the temperature is wrong.
        Where nothing was drafted p itself takes the place of q.
    raw: `p0(y) / p(y)`, p0 the model's own distribution: some tokens were sampled as if
        no temperature, penalty, grammar or truncation had been asked for.

Source: e-values and betting, Ramdas et al., arXiv 2210.01948; the likelihood ratio
against a mixture is Robbins' method.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

STAKES = (0.2, 0.05, 0.01, -0.2, -0.05, -0.01)
"""Share staked on every score; the best is the share of tokens that went wrong."""

MOST = 4.0
"""Where a stake is negative, `f` is cut here, so that no score costs all the money."""

ALARM = 1e4

FAMILY = 64
"""Tests, of both runners together, in what runs in CI."""

NUM_TESTS_OF_V2 = 12
"""Of those, at most."""

SERIES = ("draft", "likely, verified", "likely", "raw")
"""What the gamblers bet on, each with every stake: tokens at verified positions in the
first two, all in the others."""


@dataclass
class Evidence:
    """What was won by tokens that belong together.

    Attributes:
        log_e: `[len(SERIES), len(STAKES)]`, float64. Logarithm of each one's money.
        num_tokens: Tokens judged.
        num_verified: Those of them at verified positions.
        num_impossible: Those that the law rules out; a single one is proof.
    """

    log_e: np.ndarray = field(
        default_factory=lambda: np.zeros((len(SERIES), len(STAKES)))
    )
    num_tokens: int = 0
    num_verified: int = 0
    num_impossible: int = 0

    def add(self, other):
        """Take in tokens that do not overlap with these."""
        self.log_e = self.log_e + other.log_e
        self.num_tokens += other.num_tokens
        self.num_verified += other.num_verified
        self.num_impossible += other.num_impossible

    @property
    def log_e_value(self):
        """Logarithm of the money of all gamblers, who began with equal parts of 1."""
        if self.num_impossible:
            return math.inf
        total = float(np.logaddexp.reduce(self.log_e, axis=None))
        return total - math.log(self.log_e.size)


def is_alarming(evidence, num_tests=FAMILY):
    """Tell whether one of several tests has evidence that is no accident.

    That any of `num_tests` does so although all follow their laws has a probability of
    at most `1 / ALARM`.
    """
    return evidence.log_e_value > math.log(ALARM * num_tests)


@dataclass
class Winnings:
    """What each token of a sequence won.

    Attributes:
        log_e: `[num_tokens, len(SERIES), len(STAKES)]`, float64.
        is_judged: `[num_tokens]`, bool.
        is_verified: `[num_tokens]`, bool.
        is_impossible: `[num_tokens]`, bool.
    """

    log_e: np.ndarray
    is_judged: np.ndarray
    is_verified: np.ndarray
    is_impossible: np.ndarray

    def collect(self, chosen=None):
        """Add up the tokens chosen, all by default, as far as they are judged."""
        judged = self.is_judged if chosen is None else self.is_judged & chosen
        return Evidence(
            log_e=self.log_e[judged].sum(axis=0),
            num_tokens=int(judged.sum()),
            num_verified=int((judged & self.is_verified).sum()),
            num_impossible=int((judged & self.is_impossible).sum()),
        )


def bet(tokens, target, raw, draft, is_verified, is_judged):
    """Bet on every token.

    Args:
        tokens: `[num_tokens]`, what was emitted.
        target: `[num_tokens, vocab]`, float64. The law of each.
        raw: Same shape, see `Law.raw`.
        draft: Same shape. The draft's law; not read where nothing was verified.
        is_verified: `[num_tokens]`, bool. Positions where a draft was verified.
        is_judged: `[num_tokens]`, bool.
    """
    emitted = torch.as_tensor(tokens)[:, None]
    possible = target > 0
    ratio = torch.where(possible, draft / target, 0.0)
    favoured = torch.where(is_verified[:, None], draft.to(target), target)
    mean = (target * favoured).sum(dim=-1, keepdim=True)
    # A draft that is sure of something impossible favours nothing.
    likely = torch.where(mean > 0, favoured / mean, 1.0)
    unshaped = torch.where(possible, raw / target, 0.0)
    won = torch.stack(
        [
            _win(ratio, target, emitted) * is_verified[:, None],
            _win(likely, target, emitted) * is_verified[:, None],
            _win(likely, target, emitted),
            _win(unshaped, target, emitted),
        ],
        dim=1,
    )
    return Winnings(
        log_e=won.numpy(),
        is_judged=is_judged.numpy(),
        is_verified=is_verified.numpy(),
        is_impossible=~possible.gather(-1, emitted)[:, 0].numpy(),
    )


def _win(direction, target, emitted):
    """Return the logarithm of what each stake wins, `[num_tokens, len(STAKES)]`."""
    won = []
    for stake in STAKES:
        f = direction if stake > 0 else direction.clamp(max=MOST)
        score = f.gather(-1, emitted)[:, 0] - (target * f).sum(dim=-1)
        won.append(torch.log1p(stake * score))
    return torch.stack(won, dim=-1)
