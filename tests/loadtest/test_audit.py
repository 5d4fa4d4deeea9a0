"""The benchmark that holds an audit against what is measured offline."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from loadtest.audit import cells
from loadtest.audit.__main__ import main
from loadtest.audit.cells import PLAIN
from loadtest.audit.engine import AUDITED, HELD, POLICY, AlternatingEngine
from loadtest.audit.show import render
from loadtest.bench_command import EXIT_FAILED, EXIT_INTERRUPTED
from loadtest.engine import worker
from loadtest.engine.loop import Delivery, LoopRecord
from loadtest.result_folder import ResultFolder
from policies.audit.audited import AuditedPlanner
from policies.registry import build_planner
from policies.types import EngineLimits, PolicySpec
from serving.engine.shared.planner_host import PlannerHost

REPORT = {
    "audit_cost_share": 0.004,
    "audited_step_share": 0.015,
    "speculation_gain_none": 1.53,
    "speculation_gain_none_lower": 1.51,
    "speculation_gain_none_upper": 1.55,
    "num_audited_best_fixed": 3.0,
}
PLACE = {"cell": "easy-t0-c8", "policy": "goodput:8", "draft": "demo"}
COUNTS = {"steps": 400, "tried": 100, "held": 300, "trials": 0}


def read_tables(*rows):
    """Return the cells of the first line of both tables, by their heads."""
    first, second, *_ = render([PLACE | row for row in rows]).split("\n\n")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in (first, second)
        for line in table.split("\n")
    ]
    heads, values = lines[0] + lines[3], lines[2] + lines[5]
    return dict(zip(heads, values, strict=True))


def made_up_round(number, speeds, start=1, **more):
    row = {"round": number, "engine_start": start, "tokens_per_s": speeds}
    return row | {"counts": COUNTS, "report": REPORT} | more


def test_a_table_holds_what_audits_say_against_pairs_of_rounds():
    speeds = (
        # Two turns of each round: 147 and 153.
        {AUDITED: [146.0, 148.0], POLICY: [150.0], HELD: [100.0], PLAIN: [101.0]},
        {AUDITED: [152.0, 154.0], POLICY: [156.0], HELD: [102.0], PLAIN: [103.02]},
    )
    told = read_tables(made_up_round(1, speeds[0]), made_up_round(2, speeds[1]))
    assert told["rounds, starts"] == "2, 1"
    assert told["audit says"] == "1.530 (1.510 to 1.550)"
    # sqrt(1.5 * 156 / 102) = 1.5147
    assert told["offline, same engine"].startswith("1.515 (")
    assert told["audit - offline"].startswith("+0.015 (")
    assert told["within .02"] == "not told"
    assert told["audited / held"].startswith("1.485 (")
    assert told["over best fixed"] == "cannot tell: 3 blocks"
    # Of one start of two engines nobody knows how far it is from others.
    assert told["engine without drafter / held"] == "1.010"
    # Each start has an audit of its own: half the variance.
    second = made_up_round(2, speeds[1], start=2, report=REPORT)
    told = read_tables(made_up_round(1, speeds[0]), second)
    assert told["audit says"] == "1.530 (1.516 to 1.544)"
    assert told["engine without drafter / held"] == "1.010 (1.010 to 1.010)"


@pytest.mark.parametrize(
    ("policy", "verdict"), [(153.0, "yes"), (150.5, "not told"), (148.0, "no")]
)
def test_an_audit_is_right_or_wrong_only_if_the_whole_interval_is(policy, verdict):
    # The audit's is 1.53, .01 wide on either side; what is offline is known exactly.
    report = REPORT | {
        "speculation_gain_none_lower": 1.52,
        "speculation_gain_none_upper": 1.54,
    }
    speeds = {AUDITED: [150.0], POLICY: [policy], HELD: [100.0]}
    rows = [made_up_round(number, speeds, report=report) for number in (1, 2, 3)]
    assert read_tables(*rows)["within .02"] == verdict


@pytest.mark.parametrize(
    ("audited", "counts", "verdict"),
    [
        ((99.5, 99.6, 99.4), {"trials": 1}, "yes"),
        ((99.5, 99.6, 99.4), {}, "only while held"),
        # A policy that rests by itself needs no trial.
        ((99.5, 99.6, 99.4), {"held": 0}, "yes"),
        ((99.5, 100.5, 97.5), {"trials": 1}, "not told"),
        ((98.0, 98.1, 97.9), {}, "no"),
    ],
)
def test_never_worse_is_said_of_the_lower_end_and_after_a_trial(
    audited, counts, verdict
):
    rows = [
        made_up_round(number, {AUDITED: [speed], HELD: [100.0]}, counts=COUNTS | counts)
        for number, speed in enumerate(audited, 1)
    ]
    told = read_tables(*rows)
    assert told["at least .99"] == verdict
    assert told["trials ended"] == ("3 (rounds 1, 2, 3)" if "trials" in counts else "0")
    if not counts:
        assert told["steps tried, held"] == "25.0%, 75.0%"


def test_rows_that_hold_all_rounds_of_a_cell_are_read_and_judge_nothing():
    speeds = {AUDITED: [99.0, 99.1, 99.2], POLICY: [], HELD: [99.0] * 3, PLAIN: []}
    told = read_tables({"rounds": 3, "tokens_per_s": speeds, "report": REPORT})
    assert told["rounds, starts"] == "3, 1"
    assert told["at least .99"] == "not told"
    assert told["steps tried, held"] == told["trials ended"] == "-"


class FakeEngine:
    """Has a planner to put somebody in front of, as `OfflineEngine`, and no engine."""

    def __init__(self, arguments):
        self.host = PlannerHost()
        spec = PolicySpec("fixed", 3, audit=0.1)
        self.host._limits, self.host._steps_overlap = EngineLimits(), False
        self.host._planner = self.host._build_planner(spec)
        self.wrap_planner = self.host.wrap_planner


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(worker, "OfflineEngine", FakeEngine)
    engine = AlternatingEngine({})
    engine.depths = []

    def answer(self, block, trace, on_mark):
        """Answer in three steps, of which the second alone is in the steady part."""
        host, steps = self._engine.host, []
        for number, mark in enumerate(("start", "end", "")):
            engine.depths.append(host._planner.choose_depth(4))
            engine.planners.append(host._planner)
            steps.append((float(number), [Delivery(0, [1, 2], finished=False)]))
            on_mark(mark)
        return LoopRecord(-1.0, steps, {"start": 0.0, "end": 1.0}), []

    engine.planners = []
    monkeypatch.setattr(AlternatingEngine, "_answer", answer)
    return engine


def test_one_engine_runs_under_three_planners_in_turn(engine):
    audited = engine._engine.host._planner
    assert isinstance(audited, AuditedPlanner)
    block = SimpleNamespace(concurrency=4)
    for way in (HELD, POLICY, AUDITED):
        found = engine.run_as(way, block)
        assert (found["seconds"], found["num_tokens"]) == (1.0, 2)
        assert ("report" in found) == (way == AUDITED)
    assert engine.depths == [0] * 3 + [3] * 6
    # An audit sees of its own block what is measured.
    assert [one is audited for one in engine.planners] == [False] * 7 + [True, False]
    assert found["counts"] == {"steps": 1, "tried": 0, "held": 0, "trials": 0}


def test_an_audit_that_begins_anew_goes_on_holding(engine):
    audited = engine._engine.host._planner
    audited.ledger.now_s, audited.holding.at(4).hold_steps = 5.0, 9
    engine.forget()
    engine.run_as(AUDITED, SimpleNamespace(concurrency=4))
    anew = engine.planners[1]
    assert anew is not audited
    assert anew.ledger.now_s == 0.0
    assert engine.depths == [3, 0, 3]


def test_an_engine_whose_steps_overlap_is_not_audited():
    host = PlannerHost()
    host._limits, host._steps_overlap = EngineLimits(), True
    spec = PolicySpec("fixed", 3, audit=0.1)
    assert isinstance(host._build_planner(spec), type(build_planner(spec)))


class FakeEngines:
    """Stand in for the processes; fail after so many answers."""

    def __init__(self):
        self.fails_after, self.num_starts, self.blocks = 10**6, 0, []

    @contextmanager
    def start(self, arms, *_):
        self.num_starts += 1
        yield {arm: SimpleNamespace(ask=self.ask) for arm in arms}

    def ask(self, name, *told):
        if name != "run_as":
            return None
        way, block = told
        if len(self.blocks) == self.fails_after:
            raise KeyboardInterrupt
        self.blocks.append((way, block.prompts))
        found = {"report": REPORT, "counts": COUNTS} if way == AUDITED else {}
        return found | {"num_tokens": 100, "seconds": 1.0}


def test_an_interrupt_costs_a_round_and_more_rounds_may_be_added(
    tmp_path, monkeypatch, capsys
):
    engines = FakeEngines()
    monkeypatch.setattr(cells, "start_engines", engines.start)

    def bench(*more):
        options = ("--workloads", "easy", "--ways", AUDITED, HELD, "--blocks", "1")
        small = ("--target-parameters", "0", "--warm-up-rounds", "0")
        place = ("--output", str(tmp_path), "--concurrency", "1", "2")
        return main([*place, *options, *small, *more])

    # Three to warm up; then all of the first round, and half of the second.
    engines.fails_after = 3 + 4 + 2
    assert bench("--rounds", "2") == EXIT_INTERRUPTED
    engines.fails_after = 10**6
    assert bench("--rounds", "2") == 0
    assert bench("--rounds", "3") == 0
    kept = [
        (row["cell"], row["round"], row["engine_start"])
        for row in ResultFolder(tmp_path).records()
    ]
    assert kept == [
        ("easy-t0-c1", 1, 1),
        # Where the least is measured comes first.
        *(("easy-t0-c2", 1, 2), ("easy-t0-c2", 2, 2), ("easy-t0-c1", 2, 2)),
        *(("easy-t0-c1", 3, 3), ("easy-t0-c2", 3, 3)),
    ]
    assert engines.num_starts == 5
    # The same requests for both ways; others on the way back, and in the next round.
    ways, prompts = zip(*engines.blocks[3:8], strict=True)
    assert ways[:2] == ways[3:1:-1]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert len(set(prompts)) == 3
    # As many as asked for are there: nothing starts.
    assert bench("--rounds", "2") == 0
    assert engines.num_starts == 5
    assert bench("--blocks", "2") == EXIT_FAILED
    assert "blocks: was 1, is 2" in capsys.readouterr().err
