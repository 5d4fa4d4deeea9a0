"""A state that cannot be true is refused, and the planner goes on as it was."""

import copy
import json

import numpy as np
import pytest

from policies.registry import build_planner
from policies.types import DraftBatch, PolicySpec
from tests.policies.made_up import LIMITS, MAX_DEPTH, MadeUpEngine


def make_planner(name, num_reqs=0):
    """Return a planner; one that has learnt, if it ever saw requests."""
    planner = build_planner(PolicySpec(name, max_draft_tokens=MAX_DEPTH), LIMITS)
    if num_reqs:
        MadeUpEngine(num_reqs).run(planner, 200)
    return planner


@pytest.fixture(scope="module", params=["goodput", "dynamic"])
def exported(request):
    """Return a policy and what an engine's planner of it has learnt."""
    return request.param, make_planner(request.param, 8).export_state()


def places(state):
    """Yield the path to every value of a state."""
    for name, value in state.items():
        rest = places(value) if isinstance(value, dict) else [()]
        yield from ((name, *path) for path in rest)


def spoil(value):
    """Yield what a part of a state must not be."""
    yield from (None, "1.0", True, {}, [], [[1.0]], float("nan"), -1e300, 10**400)
    if isinstance(value, list):
        yield value[:-1]
        yield [*value, value[-1]]
        for bad in (float("nan"), float("inf"), -float("inf"), -1e9, 1e300, None, "1"):
            yield [*value[:-1], bad]


def at(state, path):
    return at(state[path[0]], path[1:]) if path else state


def replaced(state, path, value):
    changed = copy.deepcopy(state)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def decide(planner):
    """Return what a planner answers, without the planner's noticing."""
    asked = copy.deepcopy(planner)
    confidence = np.full((4, MAX_DEPTH), 0.7)
    batch = DraftBatch(np.full(4, MAX_DEPTH), confidence, tuple("abcd"), 4)
    selection = asked.select(batch)
    return selection.num_admitted.tolist(), asked.choose_depth(4), asked.report()


@pytest.mark.faults
def test_a_state_that_cannot_be_true_is_refused_and_nothing_has_changed(exported):
    name, state = exported
    planner = make_planner(name, 3)
    before = json.dumps(planner.export_state()), decide(planner)

    def check_refused(path, value, match="state"):
        with pytest.raises(ValueError, match=match):
            planner.import_state(replaced(state, path, value))

    for nonsense in (True, 1.5, "cost", [state], {"cost": state["cost"]}):
        with pytest.raises(ValueError, match="state"):
            planner.import_state(nonsense)
    for path in places(state):
        for no_part in ({}, [], None, "cost", {"cost": {}}):
            check_refused(path[:1], no_part)
        for bad in spoil(at(state, path)):
            check_refused(path, bad)
    for falling in ("knots", "value_ms"):
        path = ("cost", "host", falling)
        check_refused(path, at(state, path)[::-1], falling)
    if name == "goodput":
        # Moments that no outcomes have.
        check_refused(("calibration", "info_cross"), [1e5] * MAX_DEPTH, "moments")
    assert (json.dumps(planner.export_state()), decide(planner)) == before


def test_a_state_is_taken_over_as_it_travels(exported):
    name, state = exported
    planner = make_planner(name)
    # One that says nothing changes nothing.
    planner.import_state({})
    planner.import_state(json.loads(json.dumps(state)))
    assert decide(planner) != decide(make_planner(name))
    MadeUpEngine(8).run(planner, 20)
