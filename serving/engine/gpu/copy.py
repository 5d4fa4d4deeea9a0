"""Copies from the device that nobody waits for until they are long done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from serving.engine.compat import async_copy_to_np, stream


@dataclass(slots=True)
class PendingCopy:
    """Arrays on their way to the host.

    Attributes:
        sources: Kept alive until the copy is done: their memory belongs to another
            stream than the one that reads it.
        arrays: Where they arrive.
        done: Recorded behind the copies; None if there was nothing to wait for.
    """

    sources: tuple[torch.Tensor, ...]
    arrays: tuple[Any, ...]
    done: Any = None

    def read(self) -> tuple[Any, ...]:
        """Return the arrays, waiting for the copy if it is still under way.

        Meant for the thread that waits for the step's sampled tokens anyway: those are
        made a whole forward pass after the copies here were queued.
        """
        if self.done is not None:
            self.done.synchronize()
        self.sources = ()
        return self.arrays


class DeviceReader:
    """Starts copies on a stream of its own, as vLLM copies sampled tokens."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream; tensors of the CPU (in tests) need none."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, *tensors: torch.Tensor) -> PendingCopy:
        """Queue copies behind what the current stream was given so far.

        Never blocks the host, nor the current stream.
        """
        if self._stream is None:
            return PendingCopy((), tuple(t.detach().clone().numpy() for t in tensors))
        current = torch.cuda.current_stream(self._device)
        # Blocking (sleeping) wait, so that the output thread does not spin.
        done = torch.cuda.Event(blocking=True)
        with stream(self._stream, current):
            self._stream.wait_stream(current)
            arrays = tuple(async_copy_to_np(tensor) for tensor in tensors)
            done.record(self._stream)
        return PendingCopy(tensors, arrays, done)
