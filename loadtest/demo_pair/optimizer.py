"""Muon for the matrices and Adam for the rest, with float32 master weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.02
# Embeddings start small (0.02), and what tells tokens apart must not be lost in steps.
_ADAM_SHARE = 0.3

Tensors = dict[str, torch.Tensor]


class MasterOptimizer:
    """Updates bfloat16 parameters from float32 copies.

    All tensors lie in shared memory, so that forked processes can divide the work:
    each updates the parameters that :meth:`step` gives to its rank.

    Computing in bfloat16 throughout is 1.6 times as fast as autocast on two
    avx512_bf16 cores; the copies keep the updates that bfloat16 would round off.
    Hidden matrices follow Muon: momentum, orthogonalised by five Newton-Schulz
    steps and scaled to Adam's typical size, so that one learning rate serves all.

    Source: Muon, https://kellerjordan.github.io/posts/muon; its scale,
    arXiv 2502.16982, section 2.2.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the parameters; those named ``model.layers...`` with 2 axes get Muon."""
        self._parameters = dict(named_parameters)
        self._masters = {
            name: p.detach().float().clone().share_memory_()
            for name, p in self._parameters.items()
        }
        self._first = {
            name: torch.zeros_like(master).share_memory_()
            for name, master in self._masters.items()
        }
        self._second: dict[str, torch.Tensor] = {}
        self._groups: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in self._parameters.items():
            if parameter.ndim == 2 and ".layers." in name:
                self._groups[parameter.shape].append(name)
            else:
                zeros = torch.zeros_like(self._masters[name])
                self._second[name] = zeros.share_memory_()
        self._num_steps = 0

    @torch.no_grad()
    def step(
        self, lr: float, gradients: Sequence[Tensors], *, rank: int = 0, size: int = 1
    ) -> None:
        """Update this rank's share of the parameters.

        Args:
            lr: Learning rate of this step.
            gradients: Gradients by parameter name, to be summed.
            rank: Which share, from 0.
            size: Number of shares.
        """
        self._num_steps += 1
        for names in self._groups.values():
            if share := names[rank::size]:
                self._muon(share, gradients, lr)
        for name in list(self._second)[rank::size]:
            self._adam(name, gradients, _ADAM_SHARE * lr)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, weights included."""
        return {
            "masters": self._masters,
            "first": self._first,
            "second": self._second,
            "num_steps": self._num_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, and the parameters with it."""
        self._num_steps = state["num_steps"]
        for own, saved in (
            (self._masters, state["masters"]),
            (self._first, state["first"]),
            (self._second, state["second"]),
        ):
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])

    def _muon(self, names: list[str], gradients: Sequence[Tensors], lr: float) -> None:
        updates = []
        for name in names:
            gradient = _summed(gradients, name)
            momentum = self._first[name].lerp_(gradient, 1 - _MOMENTUM)
            updates.append(gradient.lerp(momentum, _MOMENTUM))
        directions = orthogonalised(torch.stack(updates))
        scale = 0.2 * max(directions.shape[1:]) ** 0.5
        for name, direction in zip(names, directions, strict=True):
            master = self._masters[name]
            master.mul_(1 - lr * _WEIGHT_DECAY).sub_(direction, alpha=lr * scale)
            self._parameters[name].copy_(master)

    def _adam(self, name: str, gradients: Sequence[Tensors], lr: float) -> None:
        gradient = _summed(gradients, name)
        first = self._first[name].lerp_(gradient, 1 - _BETAS[0])
        second = self._second[name].lerp_(gradient.square(), 1 - _BETAS[1])
        corrected = first / (1 - _BETAS[0] ** self._num_steps)
        spread = (second / (1 - _BETAS[1] ** self._num_steps)).sqrt_()
        master = self._masters[name].sub_(corrected / (spread + 1e-8), alpha=lr)
        self._parameters[name].copy_(master)


def _summed(gradients: Sequence[Tensors], name: str) -> torch.Tensor:
    return torch.stack([one[name].float() for one in gradients]).sum(0)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Push the singular values of each matrix towards one.

    Args:
        matrices: [num_matrices, num_rows, num_columns], float32.

    Returns:
        Tensor of the same shape, float32; singular values about 0.7 to 1.2.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).float()
