"""What a replica reports of its pace to Serve's controller, and how that is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from policies.decisions.scaling import ReplicaPace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.replica.token_channel import ReplicaState

_PREFIX: Final = "tetris_"
_FIELDS: Final = ("base_ms", "request_ms", "tokens_per_step", "num_seats")


def stats_of(state: ReplicaState, num_seats: int) -> dict[str, float]:
    """Return what a replica reports of its pace, beside its requests."""
    values = {"num_seats": num_seats} | {
        name: getattr(state, name) for name in _FIELDS[:-1]
    }
    return {_PREFIX + name: float(value) for name, value in values.items()}


def paces_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaPace]:
    """Read replicas' reports; those that know nothing of their steps are left out.

    Args:
        metrics: As Serve's context has them: by name, then by replica.
    """
    columns = [metrics.get(_PREFIX + name, {}) for name in _FIELDS]
    rows = [
        [column[replica] for column in columns]
        for replica in columns[0]
        if all(replica in column for column in columns)
    ]
    return [
        ReplicaPace(base_ms, request_ms, max(1.0, tokens), max(1, round(seats)))
        for base_ms, request_ms, tokens, seats in rows
        if base_ms > 0.0
    ]
