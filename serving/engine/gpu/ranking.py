"""Torch twins of what must be decided where the drafts are: on the device.

`policies.estimators.calibration` and `policies.decisions.select` are the reference;
tests compare both on the same inputs. Nothing here reads a value back to the host.
"""

from __future__ import annotations

import torch


def predict_acceptance(
    confidence: torch.Tensor,
    slope: float,
    intercept: torch.Tensor,
    effect: torch.Tensor,
    max_log_odds: float,
) -> torch.Tensor:
    """Turn confidence into acceptance probability.

    Args:
        confidence: `[num_reqs, depth]`, float32, 0-1.
        slope: Of the calibration.
        intercept: `[depth]`, float32.
        effect: `[num_reqs]`, float32.
        max_log_odds: Log-odds of the confidence are clipped to +- this.

    Returns:
        `[num_reqs, depth]`, float32, strictly between 0 and 1.

    Source: `policies.estimators.calibration.ConfidenceCalibration.predict`.
    """
    # log1p keeps confidences apart that float32 would round to the same 1 - p.
    log_odds = confidence.log() - torch.log1p(-confidence)
    log_odds = log_odds.clamp(-max_log_odds, max_log_odds)
    return torch.sigmoid(slope * log_odds + intercept + effect[:, None])


def select_drafts(
    acceptance: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    draft_budget: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Admit the `draft_budget` drafts of the batch most likely to survive.

    Ties go to the shallower position, then to the lower row, so that a position never
    depends on later ones of its own request; an unstable top-k would let it.

    Args:
        acceptance: `[num_reqs, depth]`, float, 0-1; NaN counts as 0.
        num_draft_tokens: `[num_reqs]`, int, 0..depth. Drafts each request offers.
        draft_budget: Known to the host; 0..sum of `num_draft_tokens`.
        weights: `[num_reqs]`, > 0, or None.

    Returns:
        `[num_reqs]`, dtype of `num_draft_tokens`. Admitted drafts per request, in all
        `draft_budget`.

    Source: `policies.decisions.select.compute_survival` and `select_drafts`.
    """
    num_reqs, depth = acceptance.shape
    scores = acceptance.nan_to_num(nan=0.0).clamp(0.0, 1.0).cumprod(dim=1)
    if weights is not None:
        scores = scores * weights[:, None]
    steps = torch.arange(depth, device=scores.device)
    # Absent drafts rank below every real one, whose scores are >= 0.
    scores = scores.masked_fill(steps >= num_draft_tokens[:, None], -1.0)
    by_position = scores.t().reshape(-1)
    order = torch.sort(by_position, descending=True, stable=True).indices
    admitted = torch.zeros_like(by_position, dtype=num_draft_tokens.dtype)
    admitted.index_fill_(0, order[:draft_budget], 1)
    return admitted.view(depth, num_reqs).sum(dim=0, dtype=num_draft_tokens.dtype)
