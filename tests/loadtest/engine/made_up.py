"""Fake measurements, in the form in which they are kept."""

from dataclasses import asdict
from typing import Any

from loadtest.engine.plan import Cell

CELL = Cell("mixed", 0.0, 4)
MODEL = {"name": "model", "parameters": 1e8, "digest": "0123456789abcdef"}
ENVIRONMENT = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "models": {"target": MODEL, "draft": MODEL},
    "versions": {"vllm": "0.32.0", "ray": "2.60.0"},
    "pieces": [{"started": "2026-11-21T03:00:00+00:00", "commit": "0f0f0f0f0f0f"}],
}
CONDITIONS = {
    "policies": ["none", "tetris:2+2"],
    "max_tokens": 96,
    "dtype": "bfloat16",
    "cpu_threads": 2,
}
_COUNTERS = {
    "num_steps": 10,
    "num_verified_tokens": 80,
    "num_accepted_tokens": 40,
    "planning_seconds_total": 0.001,
    "num_fallbacks": {},
}


def measured(
    policy: str, number: int, speed: float, *, cell: Cell = CELL, **more: Any
) -> dict[str, Any]:
    speculates = policy != "none"
    return {
        "policy": policy,
        "round": number,
        "block": 0,
        "engine_start": f"{number}.1",
        **asdict(cell),
        "window_s": 3.0,
        "num_steps": 10,
        "num_tokens": 3.0 * speed,
        "acceptance_length": 1.5 if speculates else 1.0,
        "itl_p50_ms": 10.0,
        "itl_p99_ms": 20.0,
        "time_per_token_p50_ms": 8.0,
        "phases": None,
        "counters": _COUNTERS if speculates else None,
        "step_time_error": 0.05 if speculates else None,
        "calibration_error": 0.02 if speculates else None,
        "other_cpu_share": 0.01,
        "num_requests": 12,
        "num_output_tokens": 300,
        "num_differing_requests": 0,
        **more,
    }
