"""Do two engines answer alike? The same tokens at temperature 0, the same law at 1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

MIN_EXPECTED = 5.0
"""Rarer outcomes are counted together, as the chi-square law asks for."""


def agreement(ours: Sequence[str], theirs: Sequence[str]) -> float | None:
    """Return the share of requests with equal outputs; None if there are none.

    Kernels for batches of other shapes round differently, so in bfloat16 a near-tie of
    two logits may go either way: read it beside the agreement of the fixed arms.
    """
    pairs = list(zip(ours, theirs, strict=True))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def compare_laws(
    first: Iterable[Hashable], second: Iterable[Hashable]
) -> tuple[float, int]:
    """Test whether two samples come from one law (two-sample chi-square).

    Args:
        first: Outcomes, independent of each other.
        second: Likewise.

    Returns:
        The p-value, and how many kinds of outcome were told apart. (1.0, 1) if there
        is nothing to tell apart.

    Source: Pearson's test of homogeneity; the tail by Wilson and Hilferty's cube root,
    good to two digits from 3 degrees of freedom on.
    """
    one, two = Counter(first), Counter(second)
    num_one, num_two = one.total(), two.total()
    if not num_one or not num_two:
        return 1.0, 1
    smaller_share = min(num_one, num_two) / (num_one + num_two)
    rows: list[tuple[int, int]] = []
    rare = [0, 0]
    for outcome in one.keys() | two.keys():
        if (one[outcome] + two[outcome]) * smaller_share >= MIN_EXPECTED:
            rows.append((one[outcome], two[outcome]))
        else:
            rare[0] += one[outcome]
            rare[1] += two[outcome]
    if sum(rare):
        rows.append((rare[0], rare[1]))
    statistic = 0.0
    for a, b in rows:
        for observed, size in ((a, num_one), (b, num_two)):
            expected = (a + b) * size / (num_one + num_two)
            statistic += (observed - expected) ** 2 / expected
    return _chi_square_tail(statistic, len(rows) - 1), len(rows)


def compare_samples(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]
) -> tuple[float, int]:
    """Test whether two samples of replies to one prompt come from one law.

    Whole replies are all different, so what is compared is the token at each position
    and each pair of neighbours.

    Args:
        first: Token ids of each reply; shorter ones end there.
        second: Likewise.

    Returns:
        The smallest p-value times the number of comparisons (Bonferroni), at most 1,
        and that number. (1.0, 0) if all replies are equal.
    """
    length = max(map(len, [*first, *second]), default=0)
    p_values = []
    for start in range(length):
        for end in (start + 1, start + 2):
            p_value, num_kinds = compare_laws(
                (tuple(one[start:end]) for one in first),
                (tuple(one[start:end]) for one in second),
            )
            if num_kinds > 1:
                p_values.append(p_value)
    return min([1.0, *(p * len(p_values) for p in p_values)]), len(p_values)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    if degrees < 1:
        return 1.0
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
