"""The autoscaling policy inside Serve's own machinery, on made-up reports."""

import time
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from policies.decisions.scaling import ReplicaPace
from serving.autoscaler import TokenTimeScaling
from serving.replica.pace_stats import paces_of, stats_of
from serving.replica.token_channel import ReplicaState

STATE = ReplicaState(base_ms=10.0, request_ms=1.0, tokens_per_step=2.0)


def reports(*states: ReplicaState) -> dict[str, dict[str, float]]:
    """As Serve sorts what replicas report."""
    told = {f"r{n}": stats_of(state, 64) for n, state in enumerate(states)}
    return {
        name: {replica: stats[name] for replica, stats in told.items()}
        for name in stats_of(STATE, 64)
    }


def decide(load: float, metrics: Any) -> Any:
    """Let Serve build the policy from its import path, and ask it."""
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=5,
        policy={
            "policy_function": "serving.autoscaler:TokenTimeScaling",
            "policy_kwargs": {"target_token_ms": 15.0, "usual_capacity": 16.0},
        },
    )
    context = AutoscalingContext(
        deployment_id=None,
        deployment_name="engines",
        app_name="app",
        current_num_replicas=1,
        total_num_requests=load,
        total_queued_requests=0.0,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=time.time(),
        config=config,
        target_num_replicas=1,
        running_replicas=["r0"],
        aggregated_metrics=metrics,
        policy_state={},
    )
    # As its controller does.
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert isinstance(policy, TokenTimeScaling)
    return policy(context)


def test_serve_builds_the_policy_and_is_told_how_many_replicas_there_are_to_be():
    wanted, told = decide(50.0, reports(STATE))
    # 20 requests a replica: a token every 15 ms is a step every 30.
    assert wanted == 3
    assert told["tetris_forecast_requests"] == pytest.approx(50.0)
    # Where none reports its pace, requests are counted.
    assert decide(50.0, None)[0] == 4


def test_who_knows_nothing_or_reports_half_is_left_out():
    told = reports(STATE, ReplicaState())
    assert paces_of(told) == [ReplicaPace(10.0, 1.0, 2.0, 64)]
    del told["tetris_num_seats"]["r0"]
    assert paces_of(told) == paces_of({}) == []
