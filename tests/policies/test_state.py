"""A state that cannot be true is refused, and the planner goes on as it was."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.planner import Planner
from policies.registry import build_planner
from policies.types import DraftBatch, PolicySpec
from tests.policies.made_up import LIMITS, MAX_DEPTH, MadeUpEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = {
    "goodput": [
        ("version",),
        ("calibration", "intercept"),
        ("calibration", "slope"),
        ("calibration", "info_intercept"),
        ("calibration", "info_cross"),
        ("calibration", "info_slope"),
        ("positions", "accepted"),
        ("positions", "observed"),
        ("cost", "target", "knots"),
        ("cost", "draft_first", "value_ms"),
        ("cost", "host", "slope_ms"),
    ],
    "dynamic": [("version",), ("acceptance_rate",), ("cost", "draft_next", "value_ms")],
}


def make_planner(name: str) -> Planner:
    return build_planner(
        PolicySpec(name, MAX_DEPTH, max_draft_tokens=MAX_DEPTH), LIMITS
    )


@pytest.fixture(scope="module", params=["goodput", "dynamic"])
def exported(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return a policy and what an engine's planner of it has learnt."""
    teacher = make_planner(request.param)
    MadeUpEngine(8).run(teacher, 200)
    return request.param, teacher.export_state()


def spoil(value: Any) -> Iterator[Any]:
    """Yield what a part of a state must not be."""
    yield from (None, "1.0", True, {}, [], [[1.0]], float("nan"), -1e300, 10**400)
    if isinstance(value, list):
        yield value[:-1]
        yield [*value, value[-1]]
        for bad in (float("nan"), float("inf"), -float("inf"), -1e9, 1e300, None, "1"):
            yield [*value[:-1], bad]


def replaced(state: dict[str, Any], path: tuple[str, ...], value: Any) -> Any:
    changed = copy.deepcopy(state)
    part = changed
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return changed


def decide(planner: Planner) -> tuple[Any, ...]:
    """Return what a planner answers, without the planner's noticing."""
    asked = copy.deepcopy(planner)
    batch = DraftBatch(
        np.full(4, MAX_DEPTH), np.full((4, MAX_DEPTH), 0.7), tuple("abcd"), 4
    )
    selection = asked.select(batch)
    depth = asked.choose_depth(4)
    return (selection.num_admitted.tolist(), depth, asked.report())


def test_a_state_that_cannot_be_true_is_refused_and_nothing_has_changed(
    exported: tuple[str, dict[str, Any]],
):
    name, state = exported
    planner = make_planner(name)
    MadeUpEngine(3).run(planner, 120)
    before = json.dumps(planner.export_state()), decide(planner)
    for path in PATHS[name]:
        value = state
        for step in path:
            value = value[step]
        for bad in spoil(value):
            with pytest.raises(ValueError, match="state"):
                planner.import_state(replaced(state, path, bad))
    for path in PATHS[name]:
        with pytest.raises(ValueError, match="state"):
            planner.import_state(replaced(state, path[:1], {}))
    for falling in ("knots", "value_ms"):
        table = state["cost"]["host"]
        path = ("cost", "host", falling)
        with pytest.raises(ValueError, match=falling):
            planner.import_state(replaced(state, path, table[falling][::-1]))
    assert (json.dumps(planner.export_state()), decide(planner)) == before


def test_a_state_is_taken_over_as_it_travels(exported: tuple[str, dict[str, Any]]):
    name, state = exported
    planner = make_planner(name)
    planner.import_state(json.loads(json.dumps(state)))
    assert decide(planner) != decide(make_planner(name))
    MadeUpEngine(8).run(planner, 20)


def test_moments_that_no_outcomes_have_are_refused():
    planner = make_planner("goodput")
    MadeUpEngine(8).run(planner, 200)
    state = planner.export_state()
    path = ("calibration", "info_cross")
    with pytest.raises(ValueError, match="moments"):
        planner.import_state(replaced(state, path, [1e5] * MAX_DEPTH))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["version", "calibration", "positions", "cost"]), inner
            )
        ),
        max_leaves=8,
    )
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_nonsense_is_refused_whatever_its_form(nonsense: Any):
    planner = make_planner("goodput")
    if not nonsense:
        planner.import_state(nonsense)
        return
    with pytest.raises(ValueError, match="state"):
        planner.import_state(nonsense)
