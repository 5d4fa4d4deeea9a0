"""Recorded drafts: what became of each draft token, in place of chances.

Traces of `tetris-serve bench engine`, of arms of fixed length: all they drafted was
verified, so that the outcome of any shorter choice is known. Other choices would have
led to other drafts; recorded ones stand for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from policies.estimators.acceptance import split_observed
from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.logit import to_log_odds, to_probability
from policies.estimators.request_effects import PRIOR_TOKENS

from .state import Drafts, Floats, Ints

_PULL = 4.0
"""Of every shared coefficient towards its start, about 16 coin flips: for positions
that were hardly ever reached, and where everything was accepted."""


def read_drafts(path: Path, *, knows_outcomes: bool = False) -> Drafts:
    """Read the drafts of one trace's steady part, all of one kind.

    Args:
        path: An `.npz` of an arm of fixed length.
        knows_outcomes: Whether chances are 0 and 1, as it turned out. Otherwise they
            are what all outcomes of the trace together say of the confidences.

    Raises:
        ValueError: If it holds no step whose drafts were all verified.
    """
    with path.open("rb") as file, np.load(file) as arrays:
        step, request = arrays["draft_step"], arrays["draft_req"]
        offered, accepted = arrays["draft_num_offered"], arrays["draft_num_accepted"]
        begin, end = arrays["window"]
        known = (accepted >= 0) & (arrays["draft_num_verified"] == offered)
        known &= ~np.isnan(arrays["step_num_decode_tokens"])[step]
        kept = (begin <= step) & (step < end) & ~np.isin(step, step[~known])
        confidence = np.nan_to_num(arrays["draft_confidence"]).astype(np.float64)[kept]
    if not kept.any():
        raise ValueError(f"{path}: no step whose drafts were all verified")
    offered = offered[kept].astype(np.int64)
    accepted = accepted[kept].astype(np.int64)
    position = np.arange(confidence.shape[1])
    acceptance = np.asarray(position < accepted[:, None], dtype=np.float64)
    if not knows_outcomes:
        acceptance = calibrate(confidence, offered, accepted, request[kept])
    acceptance[position >= offered[:, None]] = 0.0
    return Drafts(
        survival=acceptance.cumprod(axis=1),
        confidence=confidence,
        num_offered=offered,
        num_accepted=accepted,
        first=np.array([0, offered.size]),
    )


def read_folder(folder: Path) -> Drafts:
    """Read all traces below a folder, by how much of them was accepted: easy and hard.

    Raises:
        ValueError: If there are none, or not of one length.
    """
    paths = sorted(folder.rglob("*.npz"))
    if not paths:
        raise ValueError(f"{folder}: no recorded drafts (*.npz)")
    try:
        return split_by_ease(map(read_drafts, paths))
    except (KeyError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"{folder}: no recorded drafts ({error})") from error


def split_by_ease(found: Iterable[Drafts]) -> Drafts:
    """Return the traces in which most is accepted as easy, as many others as hard.

    A single one is both.
    """
    ranked = sorted(found, key=lambda one: -one.num_accepted.mean())
    ranked *= 2 if len(ranked) == 1 else 1
    half = sum(one.num_offered.size for one in ranked[: (len(ranked) + 1) // 2])
    joined = Drafts(*(np.concatenate(parts) for parts in zip(*ranked, strict=True)))
    return joined._replace(first=np.array([0, half, joined.num_offered.size]))


def calibrate(
    confidence: Floats,
    num_offered: Ints,
    num_accepted: Ints,
    request: NDArray[np.integer],
) -> Floats:
    """Fit `ConfidenceCalibration`'s model to all outcomes at once; none is forgotten.

        log-odds(accept at j of request i)
            = level + deviation_j + slope * log-odds(confidence_ij) + effect_i

    Args:
        confidence: `[num_drafts, max_depth]`, 0-1.
        num_offered: `[num_drafts]`.
        num_accepted: `[num_drafts]`.
        request: `[num_drafts]`, whose.

    Returns:
        `[num_drafts, max_depth]`, acceptance given that all before was accepted.
    """
    depth = confidence.shape[1]
    prior = ConfidenceCalibration(depth)
    _, owner = np.unique(request, return_inverse=True)
    observed, accepted = split_observed(num_offered, num_accepted, depth)
    feature = to_log_odds(confidence)

    def predict(found: Floats) -> Floats:
        deviation, effect = np.split(found[2:], [depth])
        shared = found[0] + deviation + found[1] * feature
        return np.asarray(shared + effect[owner][:, None])

    start = np.zeros(2 + depth + owner.max() + 1)
    start[:2] = prior.prior_intercept, prior.prior_slope
    # An observed token of p = 1/2 carries 1/4.
    pull = np.full(start.size, PRIOR_TOKENS / 4)
    pull[: 2 + depth] = _PULL

    def loss(found: Floats) -> tuple[float, Floats]:
        log_odds = predict(found)
        surprise = np.logaddexp(0.0, log_odds) - accepted * log_odds
        wrong = np.where(observed, to_probability(log_odds) - accepted, 0.0)
        by_owner = np.bincount(owner, wrong.sum(axis=1))
        slope = [wrong.sum(), (wrong * feature).sum()]
        away = found - start
        return (
            float(surprise[observed].sum() + 0.5 * pull @ away**2),
            np.concatenate((slope, wrong.sum(axis=0), by_owner)) + pull * away,
        )

    bounds = [(None, None), (0.0, None)] + [(None, None)] * (start.size - 2)
    fit = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return to_probability(predict(fit.x))
