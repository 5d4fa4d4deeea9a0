"""Prometheus metrics of one front; those of engines are recorded by their replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve import metrics

from serving.front.request_class import DEFAULT_CLASS

if TYPE_CHECKING:
    from serving.front.fleet_client import FleetClient


class FrontMetrics:
    """Ray metrics of one front.

    Must be made in the front's process: the labels come from its Serve context.
    """

    def __init__(self) -> None:
        """Register the metrics."""
        self._replays = metrics.Counter(
            "tetris_replays_total",
            "Times that a request went on in another engine, by what was lost.",
            ("reason",),
        )
        self._tokens = metrics.Counter(
            "tetris_replayed_tokens_total",
            "Tokens that other engines had computed before, prompts included.",
        )
        self._choices = metrics.Counter(
            "tetris_routed_total",
            "Leases by why their replica was chosen.",
            ("reason",),
        )
        self._refusals = metrics.Counter(
            "tetris_refused_total",
            "Requests that were not served for lack of places or time, by why.",
            ("reason",),
        )
        self._waiting = metrics.Gauge(
            "tetris_waiting_requests",
            "Requests that wait in a front for a seat, by class.",
            ("request_class",),
        )
        # Told from the beginning: who waits seldom shall see that nobody does.
        self._seen_waiting = {DEFAULT_CLASS}
        self._unplaced = metrics.Gauge(
            "tetris_unplaced_requests", "Requests that wait for a replica."
        )
        self._links = metrics.Gauge(
            "tetris_connected_replicas", "Replicas whose tokens can reach this front."
        )

    def count_replay(self, reason: str, num_tokens: int) -> None:
        """Count one replay, of so many tokens."""
        self._replays.inc(1, {"reason": reason})
        self._tokens.inc(num_tokens)

    def count_choice(self, reason: str) -> None:
        """Count one decision where a lease should go."""
        self._choices.inc(1, {"reason": reason})

    def count_refusal(self, reason: str) -> None:
        """Count one request that was refused."""
        self._refusals.inc(1, {"reason": reason})

    def record(self, client: FleetClient) -> None:
        """Set the gauges."""
        self._unplaced.set(client.num_unplaced)
        self._links.set(client.num_links)
        waiting = client.count_waiting()
        self._seen_waiting |= waiting.keys()
        for name in self._seen_waiting:
            self._waiting.set(waiting.get(name, 0), {"request_class": name})


class RateMetrics:
    """Ray metrics of how one front counts the rates of keys; made there as well."""

    def __init__(self) -> None:
        """Register the metric."""
        self._alone = metrics.Counter(
            "tetris_rates_counted_alone_total",
            "Counts of keys' rates that a front kept by itself, for Redis was away.",
            ("kind",),
        )

    def count_alone(self, kind: str) -> None:
        """Count one count of `requests` or `tokens`."""
        self._alone.inc(1, {"kind": kind})
