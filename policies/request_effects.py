"""How much easier or harder each request is than its confidences say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

PRIOR_TOKENS = 6.0
"""Strength of the pull of a request's own effect towards the batch: the information of
this many observed tokens (p = 1/2 carries 1/4 each)."""

MEMORY_TOKENS = 60.0
"""A request's own effect follows its last few dozen observed tokens: an answer changes
from easy to hard in mid-stream."""

_UNKNOWN = 0
"""Slot of requests that nothing is known about; stays 0."""


@dataclass(slots=True)
class RequestEffects:
    """Log-odds by request, `gradient / (information + prior)`, shrunk towards 0.

    Kept in arrays with a slot for each request, so that a batch is one look-up.

    Source: ours (one-parameter logistic regression per request).
    """

    _slot_of: dict[Hashable, int] = field(init=False, default_factory=dict)
    _free: list[int] = field(init=False, default_factory=list)
    _gradient: NDArray[np.float64] = field(init=False)
    _information: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Start without requests."""
        self._gradient = np.zeros(1)
        self._information = np.zeros(1)

    def __len__(self) -> int:
        """Return the number of requests known."""
        return len(self._slot_of)

    def log_odds(self, req_ids: Sequence[Hashable]) -> NDArray[np.float64]:
        """Return the effect of each request, `[num_reqs]`; 0 for unknown ones."""
        find = self._slot_of.get
        return self._effects()[[find(req_id, _UNKNOWN) for req_id in req_ids]]

    def learn(
        self,
        req_ids: Sequence[Hashable],
        row: NDArray[np.int64],
        residual: NDArray[np.float64],
        weight: NDArray[np.float64],
    ) -> None:
        """Learn from observed tokens.

        Args:
            req_ids: `[num_reqs]`; a request may occur more than once.
            row: `[num_tokens]`, which of them each token belongs to.
            residual: `[num_tokens]`, outcome minus predicted probability.
            weight: `[num_tokens]`, p (1 - p) of the prediction.
        """
        find = self._slot_of.get
        slots = np.array([find(req_id, _UNKNOWN) for req_id in req_ids])
        owner = slots[row]
        is_new = owner == _UNKNOWN
        if is_new.any():
            # Requests without an observed token need no slot.
            for newcomer in np.unique(row[is_new]).tolist():
                slots[newcomer] = self._slot(req_ids[newcomer])
            owner = slots[row]
        size = self._gradient.size
        information = np.bincount(owner, weight, size)
        # The residual is taken at the current effect; adding the information times
        # that effect turns it back into evidence for the effect itself.
        gradient = np.bincount(owner, residual, size) + information * self._effects()
        keep = np.exp(-np.bincount(owner, minlength=size) / MEMORY_TOKENS)
        self._gradient = keep * self._gradient + gradient
        self._information = keep * self._information + information

    def forget(self, req_id: Hashable) -> None:
        """Drop a finished request."""
        slot = self._slot_of.pop(req_id, None)
        if slot is not None:
            self._gradient[slot] = self._information[slot] = 0.0
            self._free.append(slot)

    def _effects(self) -> NDArray[np.float64]:
        """Return the effect of every slot."""
        effects: NDArray[np.float64] = self._gradient / (
            self._information + PRIOR_TOKENS / 4
        )
        return effects

    def _slot(self, req_id: Hashable) -> int:
        slot = self._slot_of.get(req_id)
        if slot is None:
            if not self._free:
                size = self._gradient.size
                self._gradient = np.concatenate((self._gradient, np.zeros(size)))
                self._information = np.concatenate((self._information, np.zeros(size)))
                self._free = list(range(size, 2 * size))
            slot = self._slot_of[req_id] = self._free.pop()
        return slot
