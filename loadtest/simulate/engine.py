"""Engines as data: what their steps cost, and which drafts they accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .drawn import KINDS
from .load import Load
from .state import ALL, Costs, Drafts, Floats

MODELS = {
    path.stem: path for path in sorted(Path(__file__).parent.glob("models/*.json"))
}
"""Data files that come with the simulator, by name."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and what it drafts."""

    name: str  # of the data file
    costs: Costs  # of a step
    drafts: Drafts  # by kind of request

    @property
    def tokens_per_step(self) -> Floats:
        """Tokens a step of a request, if it verifies all, `[num_kinds]`."""
        return self._tokens_at(self.costs.num_drafts)

    def _tokens_at(self, depth: int) -> Floats:
        drafts = self.drafts
        tokens = 1.0 + np.where(
            drafts.num_accepted < 0,
            drafts.survival[:, :depth].sum(axis=1),
            np.minimum(drafts.num_accepted, depth),
        )
        return np.array([part.mean() for part in np.split(tokens, drafts.first[1:-1])])

    def capacity_per_s(self, load: Load) -> float:
        """Estimate the requests a replica finishes a second with its batch full.

        Means alone: a request takes its tokens over the mean tokens a step, its prompt
        is computed in one step of its own, and it attends to its prompt and to half of
        its reply, longer replies being there longer. Of sessions nothing is cached.
        Where drafts are selected, the depth at which it finishes most counts.
        """
        most = self.costs.num_drafts
        depths = [most] if self.costs.rule == ALL else range(most + 1)
        return max(self._capacity_at(depth, load) for depth in depths)

    def _capacity_at(self, depth: int, load: Load) -> float:
        costs, output, prompt = self.costs, load.output, load.mean_prompt
        per_request = (output.mean - 1) / self._tokens_at(depth)
        decode_steps = float(np.dot(load.kind_shares, per_request))
        num_steps = 1.0 + max(decode_steps, 0.0)
        decoding = costs.max_num_seqs * decode_steps / num_steps
        prompt_tokens = costs.max_num_seqs * prompt / num_steps
        context = prompt + output.mean * (1 + output.cv**2) / 2
        tokens = decoding * (1 + depth) + prompt_tokens
        step_ms = (
            costs.base_ms
            + depth * costs.draft_pass_ms
            + (costs.request_ms + depth * costs.draft_token_ms) * decoding
            + max(costs.floor_ms, costs.token_ms * tokens)
            + costs.kv_token_ms * costs.max_num_seqs * context
        )
        return 1000.0 * costs.max_num_seqs / (num_steps * step_ms)


def load_engine(
    model: str | Path,
    num_drafts: int,
    max_num_seqs: int | None = None,
    rule: int = ALL,
    recorded: Drafts | None = None,
) -> Engine:
    """Read an engine.

    Args:
        model: Name of one of `MODELS`, or a data file like theirs.
        num_drafts: Drafts of a request in a step, at most; 0 for none.
        max_num_seqs: Requests in a step at most; by default what the file says.
        rule: Which drafts are verified.
        recorded: Drafts of easy and of hard requests, in place of the file's chances.

    Raises:
        ValueError: If the file is no model, naming what is wrong with it.
    """
    path = MODELS.get(str(model), Path(model))
    if not path.is_file():
        names = ", ".join(MODELS)
        raise ValueError(f"{model!r} is no engine model: {names}, or a file")
    try:
        data = json.loads(path.read_text("utf-8"))
        terms = _roofline(data) if data["form"] == "roofline" else _linear(data)
        limits = data["limits"]
        chances = [float(data["acceptance"][kind]) for kind in KINDS]
        costs = Costs(
            **terms,
            num_drafts=num_drafts,
            max_num_seqs=max_num_seqs or int(limits["max_num_seqs"]),
            max_num_batched_tokens=int(limits["max_num_batched_tokens"]),
            pad_multiple=int(limits.get("pad_multiple", 1)),
            pad_limit=int(limits.get("pad_limit", 0)),
            draft_slots=min(num_drafts, 1),
            max_kv_tokens=int(limits.get("max_kv_tokens", 1 << 40)),
            rule=rule,
        )
    except KeyError as error:
        raise ValueError(f"engine model {path}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"engine model {path}: {error}") from error
    if min(costs[:7]) < 0 or costs.base_ms + costs.floor_ms <= 0:
        raise ValueError(
            f"engine model {path}: costs must be >= 0, and a step take time"
        )
    if costs.max_num_seqs < 1:
        raise ValueError(f"engine model {path}: max_num_seqs must be 1 or more")
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"engine model {path}: acceptance must be 0 to 1")
    if costs.max_num_seqs * (2 + num_drafts) >= costs.max_num_batched_tokens:
        raise ValueError(
            f"{costs.max_num_seqs} requests of 1 + {num_drafts} tokens leave nothing "
            f"of {costs.max_num_batched_tokens} tokens a step for prompts; take a "
            "smaller --batch or --drafts"
        )
    if recorded is None:
        positions = np.arange(1, num_drafts + 1)
        survival = [chance**positions for chance in chances]
        return Engine(path.stem, costs, make_drafts(np.array(survival, np.float64)))
    longest = recorded.survival.shape[1]
    if longest < num_drafts:
        raise ValueError(f"--drafts {num_drafts}: recorded ones are {longest} long")
    drafts = recorded._replace(
        survival=recorded.survival[:, :num_drafts].copy(),
        confidence=recorded.confidence[:, :num_drafts].copy(),
        num_offered=np.minimum(recorded.num_offered, num_drafts),
        num_accepted=np.minimum(recorded.num_accepted, num_drafts),
    )
    return Engine(path.stem, costs, drafts)


def make_drafts(survival: Floats) -> Drafts:
    """Return drafts that are accepted by chance, `[num_kinds, num_drafts]`, alone."""
    num_kinds, num_drafts = survival.shape
    before = np.ones((num_kinds, num_drafts))
    before[:, 1:] = survival[:, :-1]
    return Drafts(
        survival=survival,
        confidence=np.divide(survival, before, where=before > 0, out=0.0 * before),
        num_offered=np.full(num_kinds, num_drafts),
        num_accepted=np.full(num_kinds, -1),
        first=np.arange(num_kinds + 1),
    )


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
