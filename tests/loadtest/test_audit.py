"""The benchmark that holds an audit against what is measured offline."""

import pytest

from loadtest.audit.cells import PLAIN
from loadtest.audit.engine import AUDITED, HELD, POLICY, AlternatingEngine
from loadtest.audit.show import render
from loadtest.engine import worker
from policies.audit.audited import AuditedPlanner
from policies.registry import build_planner
from policies.types import EngineLimits, PolicySpec
from serving.engine.shared.planner_host import PlannerHost

REPORT = {
    "audit_cost_share": 0.004,
    "audited_step_share": 0.015,
    "speculation_gain_none": 1.53,
    "speculation_gain_none_lower": 1.5,
    "speculation_gain_none_upper": 1.56,
    "num_audited_best_fixed": 3.0,
}


def test_a_table_holds_what_the_audit_says_against_pairs_of_rounds():
    speeds = {
        # Two turns of each round: 147 and 153.
        AUDITED: [146.0, 148.0, 152.0, 154.0],
        POLICY: [150.0, 156.0],
        HELD: [100.0, 102.0],
        PLAIN: [101.0, 103.02],
    }
    row = {"cell": "easy-t0-c8", "policy": "goodput:8", "draft": "demo", "rounds": 2}
    (_, _, line, *_) = render([row | {"tokens_per_s": speeds, "report": REPORT}]).split(
        "\n"
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == "1.530 (1.500 to 1.560)"
    # sqrt(1.5 * 156 / 102) = 1.5147
    assert cells[3].startswith("1.515 (")
    assert cells[4] == "1.010"
    assert cells[5] == "1.010 (1.010 to 1.010)"
    assert cells[6].startswith("1.485 (")
    assert cells[-1] == "cannot tell: 3 blocks"


class FakeEngine:
    """Has a planner to put somebody in front of, as `OfflineEngine`, and no engine."""

    def __init__(self, arguments):
        self.host = PlannerHost()
        spec = PolicySpec("fixed", 3, audit=0.1)
        self.host._limits, self.host._steps_overlap = EngineLimits(), False
        self.host._planner = self.host._build_planner(spec)
        self.wrap_planner = self.host.wrap_planner

    def snapshot(self):
        return {"planner": self.host._planner.report()}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(worker, "OfflineEngine", FakeEngine)
    answer = {"seconds": 1.0, "num_tokens": [1, 2]}
    monkeypatch.setattr(AlternatingEngine, "answer", lambda *_: answer)
    return AlternatingEngine({})


def test_one_engine_runs_under_three_planners_in_turn(engine):
    host = engine._engine.host
    audited = host._planner
    assert isinstance(audited, AuditedPlanner)
    depths = {}
    for way in (HELD, POLICY, AUDITED, HELD):
        assert engine.run_as(way, None)["num_tokens"] == 3
        depths[way] = host._planner.choose_depth(4)
        assert (host._planner is audited) == (way == AUDITED)
    assert depths == {HELD: 0, POLICY: 3, AUDITED: 3}
    audited.ledger.now_s = 5.0
    engine.forget()
    assert audited.ledger.now_s == 0.0


def test_an_engine_whose_steps_overlap_is_not_audited():
    host = PlannerHost()
    host._limits, host._steps_overlap = EngineLimits(), True
    spec = PolicySpec("fixed", 3, audit=0.1)
    assert isinstance(host._build_planner(spec), type(build_planner(spec)))
