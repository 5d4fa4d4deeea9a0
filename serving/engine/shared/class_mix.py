"""Which classes of requests run, on the average of recent steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.decisions.batch_value import ClassLoad

if TYPE_CHECKING:
    from collections import Counter

    from serving.engine.shared.request_classes import RequestClass

MIX_RATE = 1 / 128
"""Weight of a step in the means, later on. None of a class with short replies runs now
and then; whoever is let in at such a moment is there when the next of them comes."""

LEAST_RUNNING = 0.01
"""A class of which fewer run, on average, is forgotten."""


@dataclass(slots=True)
class ClassMix:
    """Mean numbers of running requests by class.

    Waiting ones do not count: those whom the others' priority keeps waiting would
    outvote them, and a backlog let all of itself in.
    """

    _means: dict[RequestClass, float] = field(default_factory=dict)
    _num_steps: int = 0

    def note(self, running: Counter[RequestClass]) -> tuple[ClassLoad, ...]:
        """Take in who runs in a step that is planned.

        Returns:
            The classes of recent steps, with means; empty where none has a target.
        """
        if running:
            self._num_steps += 1
            rate = max(MIX_RATE, 1.0 / self._num_steps)
            for one in {**self._means, **running}:
                mean = self._means.get(one, 0.0)
                self._means[one] = mean + rate * (running[one] - mean)
            for one in [k for k, n in self._means.items() if n < LEAST_RUNNING]:
                del self._means[one]
        if not any(one.latency_target_ms for one in self._means):
            return ()
        return tuple(
            ClassLoad(one.latency_target_ms or math.inf, one.weight, mean)
            for one, mean in self._means.items()
        )
