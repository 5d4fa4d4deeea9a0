"""How much easier or harder each request is than its confidences say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

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

    Attributes:
        gradient: `[num_slots]`, evidence for each effect.
        information: `[num_slots]`, how much of it there is.
        effect: `[num_slots]`.

    Source: ours (one-parameter logistic regression per request).
    """

    gradient: NDArray[np.float64] = field(init=False)
    information: NDArray[np.float64] = field(init=False)
    effect: NDArray[np.float64] = field(init=False)
    _slot_of: dict[Hashable, int] = field(init=False, default_factory=dict)
    _free: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Start without requests."""
        self.gradient = np.zeros(1)
        self.information = np.zeros(1)
        self.effect = np.zeros(1)

    def __len__(self) -> int:
        """Return the number of requests known."""
        return len(self._slot_of)

    def log_odds(self, req_ids: Sequence[Hashable]) -> NDArray[np.float64]:
        """Return the effect of each request, `[num_reqs]`; 0 for unknown ones."""
        find = self._slot_of.get
        return self.effect.take([find(req_id, _UNKNOWN) for req_id in req_ids])

    def assign_slots(
        self, req_ids: Sequence[Hashable], is_observed: Sequence[bool]
    ) -> NDArray[np.int64]:
        """Return each request's place in the arrays, a new one for a newcomer.

        Args:
            req_ids: `[num_reqs]`; a request may occur more than once.
            is_observed: `[num_reqs]`. Requests of which nothing was observed need no
                place.
        """
        find = self._slot_of.get
        slots = [find(req_id, _UNKNOWN) for req_id in req_ids]
        for row, slot in enumerate(slots):
            if slot == _UNKNOWN and is_observed[row]:
                slots[row] = self._slot(req_ids[row])
        return np.array(slots, dtype=np.int64)

    def forget(self, req_id: Hashable) -> None:
        """Drop a finished request."""
        slot = self._slot_of.pop(req_id, None)
        if slot is not None:
            self.gradient[slot] = self.information[slot] = self.effect[slot] = 0.0
            self._free.append(slot)

    def _slot(self, req_id: Hashable) -> int:
        slot = self._slot_of.get(req_id)
        if slot is None:
            if not self._free:
                size = self.gradient.size
                more = np.zeros(size)
                self.gradient = np.concatenate((self.gradient, more))
                self.information = np.concatenate((self.information, more))
                self.effect = np.concatenate((self.effect, more))
                self._free = list(range(size, 2 * size))
            slot = self._slot_of[req_id] = self._free.pop()
        return slot


@compiled
def learn_effects(
    slots: NDArray[np.int64],
    residual: NDArray[np.float64],
    weight: NDArray[np.float64],
    gradient: NDArray[np.float64],
    information: NDArray[np.float64],
    effect: NDArray[np.float64],
) -> None:
    """Learn the effects of requests from observed tokens, in place.

    Args:
        slots: `[num_tokens]`, whose each token is.
        residual: `[num_tokens]`, outcome minus predicted probability.
        weight: `[num_tokens]`, p (1 - p) of the prediction.
        gradient: `[num_slots]`, as all that follow.
        information: As `RequestEffects.information`.
        effect: As `RequestEffects.effect`.
    """
    num_slots = gradient.size
    num_tokens = np.zeros(num_slots)
    evidence = np.zeros(num_slots)
    learnt = np.zeros(num_slots)
    for token in range(slots.size):
        slot = slots[token]
        num_tokens[slot] += 1.0
        evidence[slot] += residual[token]
        learnt[slot] += weight[token]
    for slot in range(num_slots):
        if num_tokens[slot] == 0.0:
            continue
        keep = math.exp(-num_tokens[slot] / MEMORY_TOKENS)
        # The residual is taken at the current effect; adding the information times
        # that effect turns it back into evidence for the effect itself.
        evidence[slot] += learnt[slot] * effect[slot]
        gradient[slot] = keep * gradient[slot] + evidence[slot]
        information[slot] = keep * information[slot] + learnt[slot]
        effect[slot] = gradient[slot] / (information[slot] + PRIOR_TOKENS / 4)
