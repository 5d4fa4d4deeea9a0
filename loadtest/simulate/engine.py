"""Engines as data: what their steps cost, and which drafts they accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .load import KINDS, Load
from .state import Costs

MODELS = Path(__file__).parent / "models"
"""Data files that come with the simulator, by name."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine at one draft length.

    Attributes:
        name: Of the data file.
        costs: Of a step.
        survival: `[num_kinds, num_drafts]`, chance that a draft and all before it are
            accepted.
    """

    name: str
    costs: Costs
    survival: NDArray[np.float64]

    def capacity_per_s(self, load: Load) -> float:
        """Estimate the requests a replica finishes a second with its batch full.

        Means alone: a request takes its tokens over the mean tokens a step, its prompt
        is computed in one step of its own, and it attends to its prompt and to half of
        its reply, longer replies being there longer.
        """
        costs, output = self.costs, load.output
        per_step = 1.0 + self.survival.sum(axis=1)
        decode_steps = float(np.dot(load.kind_shares, (output.mean - 1) / per_step))
        num_steps = 1.0 + max(decode_steps, 0.0)
        decoding = costs.max_num_seqs * decode_steps / num_steps
        prompt_tokens = costs.max_num_seqs * load.prompt.mean / num_steps
        context = load.prompt.mean + output.mean * (1 + output.cv**2) / 2
        tokens = decoding * (1 + costs.num_drafts) + prompt_tokens
        step_ms = (
            costs.base_ms
            + costs.request_ms * decoding
            + max(costs.floor_ms, costs.token_ms * tokens)
            + costs.kv_token_ms * costs.max_num_seqs * context
        )
        return 1000.0 * costs.max_num_seqs / (num_steps * step_ms)


def find_model(name: str) -> Path:
    """Return the file of a model that is given by name or by path.

    Raises:
        ValueError: If there is none.
    """
    known = {path.stem: path for path in sorted(MODELS.glob("*.json"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        raise ValueError(f"{name!r} is no engine model: {', '.join(known)}, or a file")
    return path


def load_engine(
    path: Path,
    num_drafts: int,
    max_num_seqs: int | None = None,
    selects: bool = False,
) -> Engine:
    """Read an engine at one draft length.

    Args:
        path: Its data file.
        num_drafts: Drafts that each request verifies in each step; 0 for none.
        max_num_seqs: Requests in a step at most; by default what the file says.
        selects: Whether steps verify only the drafts that are worth their time.

    Raises:
        ValueError: If the file is no model, naming what is wrong with it.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        terms = _roofline(data) if data["form"] == "roofline" else _linear(data)
        limits = data["limits"]
        chances = [float(data["acceptance"][kind]) for kind in KINDS]
        costs = Costs(
            base_ms=terms["base_ms"] + num_drafts * terms["draft_pass_ms"],
            request_ms=terms["request_ms"] + num_drafts * terms["draft_token_ms"],
            token_ms=terms["token_ms"],
            floor_ms=terms["floor_ms"],
            kv_token_ms=terms["kv_token_ms"],
            pad_multiple=int(limits.get("pad_multiple", 1)),
            pad_limit=int(limits.get("pad_limit", 0)),
            num_drafts=num_drafts,
            max_num_seqs=max_num_seqs or int(limits["max_num_seqs"]),
            max_num_batched_tokens=int(limits["max_num_batched_tokens"]),
            max_kv_tokens=int(limits.get("max_kv_tokens", 1 << 40)),
            selects=selects,
        )
    except KeyError as error:
        raise ValueError(f"engine model {path}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"engine model {path}: {error}") from error
    if min(costs[:5]) < 0 or costs.base_ms + costs.floor_ms <= 0:
        raise ValueError(
            f"engine model {path}: costs must be >= 0, and a step take time"
        )
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"engine model {path}: acceptance must be 0 to 1")
    if costs.max_num_seqs * (1 + num_drafts) >= costs.max_num_batched_tokens:
        raise ValueError(
            f"{costs.max_num_seqs} requests of 1 + {num_drafts} tokens leave nothing "
            f"of {costs.max_num_batched_tokens} tokens a step for prompts; take a "
            "smaller --batch or --drafts"
        )
    positions = np.arange(1, num_drafts + 1)
    survival = np.array([chance**positions for chance in chances], dtype=np.float64)
    return Engine(path.stem, costs, survival)


def _linear(data: Mapping[str, Any]) -> dict[str, float]:
    """Read terms that were fitted."""
    names = ("base", "request", "token", "kv_token", "draft_pass", "draft_token")
    terms = {f"{name}_ms": float(data["terms"][f"{name}_ms"]) for name in names}
    return terms | {"floor_ms": 0.0}


def _roofline(data: Mapping[str, Any]) -> dict[str, float]:
    """Compute terms from bytes and operations.

    Weights are read once a step, or its tokens are computed, whichever takes longer;
    the drafter reads its own for each pass; each KV token is read.
    """
    device, target, draft = data["device"], data["target"], data["draft"]
    bytes_per_ms = device["bytes_per_s"] * device["memory_efficiency"] / 1e3
    operations_per_ms = device["flops"] * device["compute_efficiency"] / 1e3
    kv_bytes = 2 * target["layers"] * target["kv_heads"] * target["head_dim"]
    return {
        "base_ms": float(device["host_ms"]),
        "request_ms": float(device["host_request_ms"]),
        "token_ms": 2 * target["parameters"] / operations_per_ms,
        "floor_ms": target["parameters"] * target["bytes_per_weight"] / bytes_per_ms,
        "kv_token_ms": kv_bytes * target["bytes_per_kv"] / bytes_per_ms,
        "draft_pass_ms": draft["parameters"] * draft["bytes_per_weight"] / bytes_per_ms
        + device["host_pass_ms"],
        "draft_token_ms": 2 * draft["parameters"] / operations_per_ms,
    }
