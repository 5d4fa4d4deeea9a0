"""Times a drafter on the device's clock, whoever the engine belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _make_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


class DraftTimes:
    """Marks where drafting begins and ends; wraps a method of an engine's drafter.

    Nothing waits for the device: times are read when a run is over.
    """

    def __init__(
        self, speculator: Any, make_event: Callable[[], Any] = _make_event
    ) -> None:
        """Begin to mark.

        Args:
            speculator: The runner's; None if it has none.
            make_event: Where events come from; tests bring their own.
        """
        self._marks: list[tuple[Any, Any]] = []
        if speculator is None:
            return
        propose = speculator.propose

        def marked(*args: Any, **kwargs: Any) -> Any:
            start, end = make_event(), make_event()
            start.record()
            drafts = propose(*args, **kwargs)
            end.record()
            self._marks.append((start, end))
            return drafts

        speculator.propose = marked

    def take_mean_ms(self) -> float | None:
        """Return the mean time of a step's draft since the last call."""
        marks, self._marks = self._marks, []
        times = [start.elapsed_time(end) for start, end in marks if end.query()]
        return sum(times) / len(times) if times else None
