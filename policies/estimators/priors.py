"""What is believed of a drafter before its first outcome, by drafting method."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AcceptancePrior:
    """A start on the safe side: acceptance is found higher more cheaply than lower.

    Attributes:
        intercept: Log-odds of acceptance where the drafter gives its best token 1/2.
        slope: How much of the drafter's own log-odds to believe.
        acceptance: Per position, 0-1, for drafts without confidence.
    """

    intercept: float = -0.3
    slope: float = 0.8
    acceptance: float = 0.5


_DRAFT_MODEL = AcceptancePrior()
_TARGET_FEATURES = AcceptancePrior(intercept=0.0, slope=0.8, acceptance=0.6)

_PRIORS = {
    # A model of its own is overconfident: it never saw what the target would say.
    "draft_model": _DRAFT_MODEL,
    # These read the target's hidden states and were trained on its outputs.
    "eagle": _TARGET_FEATURES,
    "eagle3": _TARGET_FEATURES,
    "mtp": _TARGET_FEATURES,
    # Repeated text is mostly not repeated further, unless it is copied.
    "ngram": AcceptancePrior(acceptance=0.3),
    "suffix": AcceptancePrior(acceptance=0.5),
}


def prior_of(method: str) -> AcceptancePrior:
    """Return the prior of a drafting method, by vLLM's name; unknown ones are safe.

    Source: ours; the order of the methods is that of published acceptance rates
    (arXiv 2406.16858 for EAGLE-2, arXiv 2411.04975 for suffix decoding).
    """
    return _PRIORS.get(method, _DRAFT_MODEL)
