"""Follows what a fleet has and wants, second by second."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from loadtest.compare.deployment import Deployment

_PERIOD_S: Final = 1.0

_SERIES: Final = {
    "ray_serve_autoscaling_target_replicas": "wanted",
    "ray_tetris_forecast_requests": "forecast",
    "ray_tetris_unplaced_requests": "waiting",
    "ray_tetris_replica_start_seconds": "start_s",
}
_OF_ENGINES: Final = ("wanted",)
"""Series that fronts have too."""


class Watch:
    """Reads a deployment's metrics page in a thread while a block runs.

    Attributes:
        points: One a second at most: `at_s` since the begin, and what the page told of
            replicas wanted and running, requests waiting and forecast.
    """

    def __init__(self, deployment: Deployment) -> None:
        """Read nothing yet."""
        self.points: list[dict[str, float]] = []
        self._deployment = deployment
        self._began_s = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Read no more."""
        self._stop.set()
        self._thread.join()

    def since(self, epoch_s: float) -> float:
        """Return a time of the wall clock as seconds since the begin."""
        return epoch_s - self._began_s

    def wait_for(self, name: str, value: float, limit_s: float) -> bool:
        """Wait until a series has had a value twice in a row; False if it has not."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            latest = [point.get(name) for point in self.points[-2:]]
            if latest == [value, value]:
                return True
            time.sleep(_PERIOD_S)
        return False

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            found = read_series(self._deployment)
            # Not off the page, from which a gauge is dropped that is set seldom.
            running = self._deployment.endpoint.count_replicas()
            if running is not None:
                found["running"] = running
            if found:
                at_s = round(self.since(time.time()), 1)
                self.points.append({"at_s": at_s} | found)


def read_series(deployment: Deployment) -> dict[str, float]:
    """Return what the pages tell now; sums over replicas and fronts."""
    found: dict[str, float] = {}
    for labels, name, value in _samples(deployment):
        key = _SERIES.get(name)
        is_engines = labels.get("deployment", "").startswith("TetrisEngine")
        if key is None or (key in _OF_ENGINES and not is_engines):
            continue
        found[key] = found.get(key, 0.0) + value
    return found


def count_leases(deployment: Deployment) -> dict[str, float]:
    """Return how many requests each engine replica has begun."""
    return {
        labels["replica"]: value
        for labels, name, value in _samples(deployment)
        if name == "ray_serve_deployment_request_counter_total"
        and labels.get("deployment", "").startswith("TetrisEngine")
    }


def _samples(deployment: Deployment) -> list[tuple[dict[str, str], str, float]]:
    names = (*_SERIES, "ray_serve_deployment_request_counter_total")
    found: list[tuple[dict[str, str], str, Any]] = []
    for page in deployment.metrics_urls:
        text = deployment.endpoint.fetch(page) or ""
        # Ray's page is long, and parsing slow.
        lines = [line for line in text.splitlines(True) if line.startswith(names)]
        for family in text_string_to_metric_families("".join(lines)):
            found += [(dict(s.labels), s.name, s.value) for s in family.samples]
    return found
