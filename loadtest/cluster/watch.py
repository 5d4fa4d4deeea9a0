"""Follows what a fleet has and wants, second by second."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from loadtest.compare.deployment import Deployment
from loadtest.compare.scrape import read_samples

PERIOD_S: Final = 1.0

_WANTED: Final = "serve_autoscaling_target_replicas"
_SERIES: Final = {
    _WANTED: "wanted",
    "tetris_forecast_requests": "forecast",
    "tetris_unplaced_requests": "waiting",
    "tetris_replica_start_seconds": "start_s",
}
_BEGUN: Final = "tetris_begun_requests_total"


@dataclass
class Watch:
    """A fleet over time.

    Attributes:
        points: One a second at most: `at_s` since the begin, and what the page told of
            replicas wanted and running, requests waiting and forecast.
    """

    deployment: Deployment
    points: list[dict[str, float]] = field(default_factory=list)
    began_s: float = field(default_factory=time.time)

    def look(self) -> None:
        """Add a point."""
        found = read_series(self.deployment)
        # Not off the page, from which a gauge is dropped that is set seldom.
        running = self.deployment.endpoint.count_replicas()
        if running is not None:
            found["running"] = running
        if found:
            self.points.append({"at_s": round(self.since(time.time()), 1)} | found)

    def since(self, epoch_s: float) -> float:
        """Return a time of the wall clock as seconds since the begin."""
        return epoch_s - self.began_s


def read_series(deployment: Deployment) -> dict[str, float]:
    """Return what the pages tell now; sums over replicas and fronts."""
    found: dict[str, float] = {}
    for name, labels, value in _read(deployment):
        # Fronts are scaled too.
        is_engine = labels.get("deployment", "").startswith("TetrisEngine")
        if name in _SERIES and (name != _WANTED or is_engine):
            key = _SERIES[name]
            found[key] = found.get(key, 0.0) + value
    return found


def count_begun(deployment: Deployment) -> dict[str, float]:
    """Return how many requests each engine replica has begun."""
    return {
        labels["replica"]: value
        for name, labels, value in _read(deployment)
        if name == _BEGUN
    }


def _read(deployment: Deployment) -> Iterator[tuple[str, dict[str, str], float]]:
    for page in deployment.metrics_urls:
        text = deployment.endpoint.fetch(page) or ""
        yield from read_samples(text, lambda name: name in {*_SERIES, _BEGUN})
