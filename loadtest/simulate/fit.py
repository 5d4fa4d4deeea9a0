"""Fits the model of the CPU engine to the committed engine benchmark.

``python -m loadtest.simulate.fit`` prints the data file. The benchmark committed
means of measured windows, not steps, so what is fitted is the mean step of each window.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, nnls

RESULTS = Path(__file__).parents[1] / "results"
SOURCE = "engine-cpu/measurements.jsonl"
PROMPTS = "ablations/drafts/*/mixed-*-c1/*.npz"
TERMS = ("base_ms", "request_ms", "token_ms", "draft_pass_ms", "draft_token_ms")

Windows = list[Mapping[str, Any]]


def read_windows(*workloads: str) -> Windows:
    """Return what was measured without or at a fixed depth, at temperature 0."""
    lines = (RESULTS / SOURCE).read_text("utf-8").split("\n")
    windows = [window for line in lines if line.strip() for window in json.loads(line)]
    return [
        window
        for window in windows
        if window["workload"] in workloads
        and window["temperature"] == 0
        and window["policy"].partition(":")[0] in {"none", "fixed"}
    ]


def mean_prompt_tokens() -> float:
    """Return the mean prompt of that workload, from runs of one request at a time."""
    tokens = [
        np.load(path)["step_num_prefill_tokens"] for path in RESULTS.glob(PROMPTS)
    ]
    joined = np.concatenate(tokens)
    return float(joined[joined > 0].mean())


def weigh(windows: Windows, prompt: float) -> NDArray[np.float64]:
    """Return what each term is multiplied by in the measured time of a mean step.

    `[num_windows, len(TERMS)]`, over that time: predictions are products with terms.
    """
    rows = []
    for w in windows:
        depth, num_reqs = _depth(w), w["concurrency"]
        verified = (w["counters"] or {}).get("num_verified_tokens", 0)
        computed = (verified + prompt * w["num_requests"]) / w["num_steps"]
        rows.append([1.0, num_reqs, num_reqs + computed, depth, depth * num_reqs])
    step_ms = np.array([1e3 * w["window_s"] / w["num_steps"] for w in windows])
    shares: NDArray[np.float64] = np.array(rows, dtype=np.float64) / step_ms[:, None]
    return shares


def fit_acceptance(windows: Windows) -> float:
    """Return the chance of each draft that gives as many accepted drafts as counted."""
    counts = [(_depth(w), w["counters"]) for w in windows if w["policy"] != "none"]
    accepted = float(sum(c["num_accepted_tokens"] for _, c in counts))

    def excess(chance: float) -> float:
        return accepted - float(
            sum(
                c["num_drafts"] * (chance ** np.arange(1, depth + 1)).sum()
                for depth, c in counts
            )
        )

    return float(brentq(excess, 0.0, 1.0))


def _depth(window: Mapping[str, Any]) -> int:
    return int(window["policy"].partition(":")[2] or 0)


def main() -> int:
    """Print the data file: terms >= 0 by least squares of relative errors."""
    prompt = mean_prompt_tokens()
    shares = {
        "mixed, fitted": weigh(read_windows("mixed"), prompt),
        "easy and hard, not fitted": weigh(read_windows("easy", "hard"), prompt),
    }
    fitted = shares["mixed, fitted"]
    terms, _ = nnls(fitted, np.ones(len(fitted)))
    model = {
        "name": "The demo pair padded to 100 M parameters on two CPU cores",
        "form": "linear",
        "source": f"python -m loadtest.simulate.fit, from loadtest/results/{SOURCE}: "
        "mean step times of none and fixed:1 to fixed:6, temperature 0, 1 to 32 in "
        f"flight, prompts of {prompt:.0f} tokens (loadtest/results/{PROMPTS})",
        "relative_rms_error_of_step_time": {
            name: round(float(np.sqrt(np.mean((own @ terms - 1.0) ** 2))), 3)
            for name, own in shares.items()
        },
        "not_known": "kv_token_ms: contexts were about 60 tokens, too short to tell",
        "terms": {
            **dict(zip(TERMS, (round(float(term), 4) for term in terms), strict=True)),
            "kv_token_ms": 0.0,
        },
        "acceptance": {
            kind: round(fit_acceptance(read_windows(kind)), 3)
            for kind in ("easy", "hard")
        },
        "limits": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    }
    sys.stdout.write(json.dumps(model, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
