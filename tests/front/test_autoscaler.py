"""What the autoscaling policy reads; Serve itself asks it in helm/test_live."""

from policies.decisions.scaling import ReplicaPace
from serving.replica.pace_stats import paces_of, stats_of
from serving.replica.token_channel import ReplicaState

STATE = ReplicaState(base_ms=10.0, request_ms=1.0, tokens_per_step=2.0)


def test_a_replica_that_knows_nothing_or_reports_half_is_left_out():
    told = {"r0": stats_of(STATE, 64), "r1": stats_of(ReplicaState(), 64)}
    # As Serve sorts what replicas report.
    metrics = {
        name: {replica: stats[name] for replica, stats in told.items()}
        for name in told["r0"]
    }
    assert paces_of(metrics) == [ReplicaPace(10.0, 1.0, 2.0, 64)]
    del metrics["tetris_num_seats"]["r0"]
    assert paces_of(metrics) == paces_of({}) == []
