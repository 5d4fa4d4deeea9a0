"""What a replica is told about its deployment besides its engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """As the settings have it; pickled on its way to the replica.

    Attributes:
        device: `cpu` or `gpu`.
        policy_name: The verification policy.
        max_depth: Draft tokens the engine is started with.
        has_snapshots: Whether our scheduler runs in the engine.
        planner_key: What another replica must agree in to share its planner's state.
        hang_timeout_s: Longest silence of an engine that works, seconds.
        load_timeout_s: Longest silence of one that loads, seconds.
        board_text: Whether the board may show draft tokens as text.
        build: As `Kin` has it.
    """

    device: str
    policy_name: str
    max_depth: int
    has_snapshots: bool
    planner_key: str
    hang_timeout_s: float
    load_timeout_s: float
    board_text: bool
    build: int
