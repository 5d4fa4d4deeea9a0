"""The optimizer of both trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MasterOptimizer:
    """Muon for hidden matrices and Adam for the rest, on float32 copies of the weights.

    Computing in bfloat16 throughout is 1.6 times as fast as autocast on two avx512_bf16
    cores; the copies keep the updates that bfloat16 would round off. Muon's steps are
    scaled to Adam's typical size, so that one learning rate serves both.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        is_hidden: Callable[[str], bool],
        *,
        weight_decay: float,
        adam_share: float,
        adam_betas: tuple[float, float],
    ) -> None:
        """Copy the weights of a bfloat16 model, whose hidden matrices are Muon's.

        `adam_share` is Adam's learning rate over Muon's.
        """
        self._adam_share = adam_share
        named = [(name, p, p.detach().float()) for name, p in model.named_parameters()]
        self._copied = [(weight, master) for _, weight, master in named]
        hidden = [m for name, p, m in named if p.ndim == 2 and is_hidden(name)]
        others = [m for name, p, m in named if p.ndim != 2 or not is_hidden(name)]
        self._muon = torch.optim.Muon(
            hidden, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adam = torch.optim.Adam(others, betas=adam_betas)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights by their gradients, and drop those."""
        for weight, master in self._copied:
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        for optimizer, share in ((self._muon, 1.0), (self._adam, self._adam_share)):
            optimizer.param_groups[0]["lr"] = share * lr
            optimizer.step()
        self._copy_back()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, weights included."""
        return {
            "masters": [master for _, master in self._copied],
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, and the weights with it."""
        for (_, master), saved in zip(self._copied, state["masters"], strict=True):
            master.copy_(saved)
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self._copy_back()

    def _copy_back(self) -> None:
        for weight, master in self._copied:
            weight.copy_(master)
