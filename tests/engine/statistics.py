"""Exact laws of small models and the chi-square test against them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    Restriction = Callable[[tuple[int, ...]], Sequence[int]]

MIN_EXPECTED = 5.0
"""Cells expected to hold fewer samples are pooled (Cochran's rule), so that the
chi-square approximation holds far into its tail."""


def chi_square(
    counts: NDArray[np.int64], law: NDArray[np.float64]
) -> tuple[float, int]:
    """Measure how far counts are from a law.

    Args:
        counts: Any shape, integer. How often each outcome was seen.
        law: Same shape, float64, sums to 1. Probability of each outcome.

    Returns:
        Pearson's statistic and its degrees of freedom, after pooling the rarest
        outcomes. The statistic is infinite if an impossible outcome was seen.
    """
    flat_counts, expected = counts.ravel(), law.ravel() * counts.sum()
    if flat_counts[expected == 0.0].any():
        return float("inf"), 1
    order = np.argsort(expected)
    cumulative = np.cumsum(expected[order])
    # Consecutive cells share a bin until it is expected to hold enough.
    bins = np.zeros(order.size, dtype=np.int64)
    start, number = 0.0, 0
    for rank in range(order.size):
        bins[rank] = number
        if cumulative[rank] - start >= MIN_EXPECTED:
            start, number = cumulative[rank], number + 1
    if number == 0:
        raise ValueError(f"{counts.sum()} samples are too few for a chi-square test")
    # What is left after the last full bin joins it.
    bins = np.minimum(bins, number - 1)
    seen = np.bincount(bins, weights=flat_counts[order])
    wanted = np.bincount(bins, weights=expected[order])
    return float(((seen - wanted) ** 2 / wanted).sum()), number - 1


def chi_square_p_value(parts: Iterable[tuple[float, int]]) -> float:
    """Return the probability of a sum of independent statistics at least this large.

    Args:
        parts: Statistics with their degrees of freedom, as `chi_square` returns them.
    """
    statistics, degrees = zip(*parts, strict=True)
    half = torch.tensor([sum(degrees) / 2, sum(statistics) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def token_law(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Turn logits into the distribution a request with these settings samples from.

    Args:
        logits: `[..., vocab]`, float64.
        temperature: 0 means argmax.
        top_k: Keep this many largest probabilities; 0 keeps all.
        top_p: Then keep the smallest set of largest ones that reaches this mass.

    Returns:
        `[..., vocab]`, float64, sums to 1.
    """
    if temperature == 0.0:
        most_likely = logits.argmax(dim=-1)
        return torch.nn.functional.one_hot(most_likely, logits.shape[-1]).to(logits)
    scores, order = (logits / temperature).sort(dim=-1, descending=True)
    if top_k:
        scores[..., top_k:] = -torch.inf
    probs = scores.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(mass_before >= top_p, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)


@torch.no_grad()
def sequence_law(
    model: PreTrainedModel,
    prompt: Sequence[int],
    length: int,
    *,
    allowed: Restriction | None = None,
    **sampling: float,
) -> NDArray[np.float64]:
    """Compute the exact joint law of the first tokens a model generates.

    Args:
        model: In float64.
        prompt: Token ids.
        length: Tokens generated; the cost is `vocab ** (length - 1)` sequences.
        allowed: A grammar: the tokens allowed after those generated so far. None
            allows every token. Prefixes that it rules out get probability 0 and are
            never asked about.
        **sampling: Arguments of `token_law`.

    Returns:
        `[vocab] * length`, float64, sums to 1.
    """
    vocab = model.config.vocab_size
    law = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        prefixes = list(itertools.product(range(vocab), repeat=depth))
        ids = [[*prompt, *prefix] for prefix in prefixes]
        logits = model(torch.tensor(ids)).logits[:, -1]
        if allowed is not None:
            reachable = (law.reshape(-1) > 0).tolist()
            for row, prefix in enumerate(prefixes):
                keep = list(allowed(prefix)) if reachable[row] else range(vocab)
                ruled_out = torch.ones(vocab, dtype=torch.bool)
                ruled_out[list(keep)] = False
                logits[row, ruled_out] = -torch.inf
        conditional = token_law(logits, **sampling).reshape((vocab,) * (depth + 1))
        law = law.unsqueeze(-1) * conditional
    exact: NDArray[np.float64] = law.numpy()
    return exact


def count_sequences(
    sequences: Iterable[Sequence[int]], vocab: int, length: int
) -> NDArray[np.int64]:
    """Count how often each combination of the first tokens occurs.

    Returns:
        `[vocab] * length`, int64.
    """
    counts = np.zeros((vocab,) * length, dtype=np.int64)
    for sequence in sequences:
        counts[tuple(sequence[:length])] += 1
    return counts
