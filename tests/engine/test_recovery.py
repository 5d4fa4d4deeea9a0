"""What replaces rejected drafts is drawn from the residual, exactly."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.cpu.recovery import draw_by_inverse, sample_recovered_tokens


@given(st.integers(1, 700), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_the_token_is_the_one_whose_part_holds_the_point(size, rows, excludes, seed):
    """Integer weights have exact sums, so that nothing is left to rounding."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 9, (rows, size)) * (rng.random((rows, size)) < 0.2)
    excluded = rng.integers(0, size, rows)
    counted = weights.copy()
    if excludes:
        counted[np.arange(rows), excluded] = 0
    # In the middle between two whole numbers, and at both ends.
    totals = counted.sum(axis=1)
    wanted = rng.integers(0, np.maximum(totals, 1)) + 0.5
    points = np.minimum(wanted / np.maximum(totals, 1), 1.0 - 2.0**-53)
    points[rng.random(rows) < 0.2] = 0.0
    points[rng.random(rows) < 0.2] = 1.0 - 2.0**-53

    left_out = torch.tensor(excluded) if excludes else None
    drawn = torch.tensor(weights).float(), torch.tensor(points), left_out
    tokens = draw_by_inverse(*drawn).tolist()
    for row, token in enumerate(tokens):
        assert 0 <= token < size
        if totals[row]:
            ends = counted[row].cumsum()
            place = np.searchsorted(ends, points[row] * totals[row], side="right")
            assert counted[row, token] > 0
            assert token == min(place, np.flatnonzero(counted[row])[-1])


def test_a_seed_gives_the_same_token_whatever_runs_beside_it():
    def draw(beside: int) -> int:
        probs = torch.full((1 + beside, 1000), 1e-3)
        tokens = sample_recovered_tokens(
            1,
            [1] * (1 + beside),
            torch.arange(1, 2 + beside),
            torch.zeros(1 + beside, dtype=torch.int64),
            None,
            probs,
            SimpleNamespace(generators={0: torch.Generator().manual_seed(7)}),
            torch.device("cpu"),
        )
        return int(tokens[0])

    assert draw(0) == draw(3)
