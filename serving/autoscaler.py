"""Serve's autoscaling policy for engine replicas: by the time between two tokens.

For `serve deploy` it is an import path, `serving.autoscaler:TokenTimeScaling`; Serve
applies bounds and delays to what it returns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ray.util.metrics import Gauge

from policies.decisions.scaling import Scaling
from serving.replica.pace_stats import paces_of

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class TokenTimeScaling:
    """The fewest replicas that keep a request's mean time between tokens."""

    def __init__(self, target_token_ms: float, usual_capacity: float) -> None:
        """Know no replica yet.

        Args:
            target_token_ms: Longest mean time between two tokens of a request.
            usual_capacity: Requests a replica takes while nobody's pace is known.
        """
        self._scaling = Scaling(target_token_ms, usual_capacity)
        # Of the process that decides: Serve's controller.
        self._forecast = Gauge(
            "tetris_forecast_requests",
            "Requests in engines or waiting, as expected one replica's start from now.",
        )
        self._start = Gauge(
            "tetris_replica_start_seconds",
            "How long a replica takes to start, as seen.",
        )

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there are to be, and what to tell people of it."""
        wanted = self._scaling.decide(
            time.monotonic(),
            context.total_num_requests,
            paces_of(context.aggregated_metrics or {}),
            len(context.running_replicas),
            context.target_num_replicas,
        )
        start_s = self._scaling.start_s
        forecast = self._scaling.forecast.ahead(start_s)
        self._forecast.set(forecast)
        self._start.set(start_s)
        return wanted, {"tetris_forecast_requests": forecast, "tetris_start_s": start_s}
