"""What planners decide, the contract they keep, and which cannot be built."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import policies
from policies.baselines import TetrisPlanner
from policies.registry import POLICY_NAMES, build_planner
from policies.testing import check_planner
from policies.types import DraftBatch, DraftSelection, PolicySpec, VerificationOutcome

FALLING = [0.9, 0.8, 0.7, 0.6]


def make_planner(name, draft_tokens=2, most=4):
    return build_planner(PolicySpec(name, draft_tokens, max_draft_tokens=most))


@pytest.mark.parametrize(
    ("name", "lengths", "confidence", "admitted"),
    [
        ("fixed", [2, 0, 1], None, [2, 0, 1]),
        # Survival: .9 .81 .729 .656 | .1 .09 .081 .073 | .5 .25 .125 .0625; six places.
        ("tetris", [4, 4, 4], [[0.9] * 4, [0.1, 0.9, 0.9, 0.9], [0.5] * 4], [4, 0, 2]),
        # Requests without drafts add nothing to the budget.
        ("tetris", [4, 0, 0], [FALLING, [0.0] * 4, [0.0] * 4], [2, 0, 0]),
        # An ngram request that found one match frees its second place.
        ("tetris", [1, 4], None, [1, 3]),
        # Without confidence shallow positions come first.
        ("tetris", [4, 4, 4], None, [2, 2, 2]),
    ],
)
def test_tetris_spends_what_fixed_would_where_survival_is_largest(
    name, lengths, confidence, admitted
):
    given = None if confidence is None else np.array(confidence)
    planner = make_planner(name)
    for _ in range(2):
        selection = planner.select(DraftBatch(np.array(lengths), given))
        assert selection.num_admitted.tolist() == admitted
        assert selection.draft_budget == sum(admitted)
        # What was learnt does not stand over a draft's own confidence.
        planner.observe(VerificationOutcome(np.array([2]), np.array([0])))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec("fixed", 0), "draft_tokens must be >= 1, got 0"),
        (PolicySpec("goodput"), "max_draft_tokens must be >= 1, got 0"),
        (PolicySpec("tetris", 2, max_draft_tokens=1), "tokens must be >= 2, got 1"),
        (
            PolicySpec("oracle", max_draft_tokens=2),
            r"'oracle' has no planner; .*'fixed', .*'tetris'",
        ),
        (PolicySpec("none", max_draft_tokens=2), "'none' has no planner"),
        (PolicySpec("fixed", 4, params={"cut": 1}), "takes no params"),
        (PolicySpec("my_policies", max_draft_tokens=4), "name a class as module:Class"),
    ],
)
def test_unknown_names_and_numbers_are_refused_by_value(spec, message):
    with pytest.raises(ValueError, match=message):
        build_planner(spec)


DEPTH = 4
README = Path(policies.__file__).with_name("README.md")
NAME = "my_policies.threshold:Threshold"
MOST_LINES = 30


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize("policy", [*sorted(set(POLICY_NAMES) - {"none"}), NAME])
def test_our_own_planners_and_the_one_in_the_readme_keep_the_contract(policy):
    params = {"survival": 0.3} if policy == NAME else {}
    spec = PolicySpec(policy, DEPTH, max_draft_tokens=DEPTH, params=params)
    check_planner(lambda limits: build_planner(spec, limits), DEPTH)


class Faulty(TetrisPlanner):
    """A planner that gives away something else than it has selected."""

    def __init__(self, fault):
        super().__init__(draft_tokens=2, max_draft_tokens=DEPTH)
        self.fault = fault

    def select(self, batch):
        return self.fault(batch, super().select(batch))


def look_ahead(batch, selection):
    if batch.confidence is None or not batch.num_reqs:
        return selection
    is_sure = np.nan_to_num(batch.confidence).mean(axis=1) > 0.5
    admitted = np.where(is_sure, batch.num_draft_tokens, 0)
    return DraftSelection(admitted, int(admitted.sum()))


def change_the_batch(batch, selection):
    batch.num_draft_tokens[:] = selection.num_admitted
    return selection


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (look_ahead, "depends on its confidences after it"),
        (change_the_batch, "select changed the batch"),
        (
            lambda _, one: replace(one, num_admitted=one.num_admitted + 9),
            "admitted .* dr",
        ),
        (lambda _, one: replace(one, draft_budget=0), "draft_budget 0 is below"),
    ],
)
def test_each_broken_rule_is_named(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_planner(lambda limits: Faulty(fault), DEPTH)


def find_python():
    return re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_the_selector_alone_answers_as_the_readme_says(capsys):
    code = find_python()[2]
    exec(compile(code, "README.md", "exec"), {})
    assert code.splitlines()[-1].endswith(f"# {capsys.readouterr().out.strip()}")


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """Install the README's policy as a package outside the repository."""
    code = find_python()[0]
    assert len(code.splitlines()) <= MOST_LINES
    package = tmp_path / "my_policies"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "threshold.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_policies", "my_policies.threshold"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (NAME, "cannot be built from .*'cut'"),
        ("my_policies.none:Threshold", "cannot be imported: .*install"),
        ("my_policies.threshold:Thresh", "cannot be imported"),
        ("my_policies.threshold:np", "is no subclass of policies"),
    ],
)
def test_a_planner_that_cannot_be_had_is_named_with_the_fix(name, message):
    with pytest.raises(ValueError, match=message):
        build_planner(PolicySpec(name, max_draft_tokens=DEPTH, params={"cut": 1}))
