"""A replica dies under load: nothing is lost, and what comes out is in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadtest.simulate.engine import load_engine
from loadtest.simulate.storm import _DEATH_S, ARMS, Storm, render_storm


@pytest.mark.parametrize("arm", ARMS)
def test_every_stream_of_a_dead_replica_goes_on(arm: str) -> None:
    made = load_engine("h100-qwen3-1.7b", 1, 384)
    costs = made.costs._replace(base_ms=20.0, max_kv_tokens=220_000)
    storm = Storm(replace(made, costs=costs), 3, arm, 0)
    found, requests = storm.run(), storm._requests
    assert (requests.num_finishes == 1).all()
    lost = storm._lost
    assert lost.any() == (arm != "nobody dies")
    assert (requests.first_token_s[lost] <= _DEATH_S + 1e-9).all()
    assert (requests.resumed_s[lost] > _DEATH_S).all()
    assert (requests.resumed_s[lost] <= requests.finish_s[lost]).all()
    # Another replica has each, and the dead one nothing that came later.
    later = requests.arrival_s > _DEATH_S
    assert set(requests.replica[lost | later]) == ({0, 1} if lost.any() else {0, 1, 2})
    assert np.isfinite(list(found.values())).all()
    cell = {"num_replicas": 3, "kv_taken": 0.6, "arm": arm, "runs": [found]}
    lines = render_storm([cell]).strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
