"""Above temperature 0 every token follows the target's law, whatever is verified.

Every emitted token is judged by its exact conditional law: what the target, in float64,
gives after the very tokens before it, under all that the request asked for. `evidence`
says how. Requests of all kinds share batches in a real engine, and the cases of `cases`
bring together, two by two, all that a deployment may: drafters, policies, prompts in
chunks, preemption, cold drafters, request classes. Seeds are fixed; that any test here
fails by chance has a probability of at most 1e-4.

A test that cannot fail proves nothing: in every case, for every kind of request and at
every draft position the same code must reject an engine that draws 5 % of the tokens at
verified positions from the draft instead, and whatever breaks one rule of selection.

Power, by simulation (`python -m tests.engine.law.power`, 100 trials; least and most of
the cases, the kinds of request and the draft positions, each judged by itself):

    5 % of the tokens at verified positions from the draft    at least .98
    3 %                                                       at least .88
    2 %                                                       .46 to .94
    a temperature 10 % too high or too low                    all 100, judged together
"""

from functools import cache

import pytest

from tests.engine.law.campaign import (
    DEPTH,
    draw_some_from_draft,
    ignore_grammars,
    run_case,
    score_by_drawn_token,
    start,
)
from tests.engine.law.cases import Case, pair_up
from tests.engine.law.evidence import FAMILY, NUM_TESTS_OF_V2, Evidence, is_alarming
from tests.engine.law.judge import FOLLOWING
from tests.engine.law.traffic import FEATURES
from tests.engine.made_up import make_up_beliefs
from tests.engine.tiny_models import FEW

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.patient]

SEED = 1

CASES = pair_up()

PERFECT = [Case("perfect", policy) for policy in ("tetris", "goodput")]
"""The draft is the target: it is never rejected, and all that can go wrong is that the
choice of drafts depends on what was drawn."""

DEEP = Case("draft_model", "fixed", classes=True)
"""Many requests that mostly agree with their drafts, so that the last are reached."""

HEAD = Case(FEW, "tetris")
"""It draws from fewer tokens than the target has, and hands over a law over all."""

GRAMMAR = Case("noisy", "tetris")
"""Many requests that follow one; drafts that are wrong among the tokens allowed."""

SPECIAL = {
    DEEP: {"num_each": 500, "features": ("plain", "cool", "seeded")},
    GRAMMAR: {"num_each": 600, "features": ("structured",)},
}

CONTROLS = {GRAMMAR: ignore_grammars, **dict.fromkeys(PERFECT, score_by_drawn_token)}
"""What breaks the rule in these cases; in all others `draw_some_from_draft` does."""

POSITIONS = [f"draft {depth}" for depth in range(1, DEPTH + 1)]

BETTABLE = [name for name in FEATURES if name != "greedy"]

ALL = [*CASES, DEEP, *PERFECT, HEAD, GRAMMAR]

MIXED = [*CASES, DEEP]
"""Whose evidence adds up for each kind of request and each position."""

NUM_TESTS_OF_V1 = len(ALL) + len(FEATURES) + len(POSITIONS) + 1


def add_up(outcomes, part):
    """Return the evidence of several cases about a kind of request or a position."""
    total = Evidence()
    for outcome in outcomes:
        verdict = outcome.verdict
        total.add((verdict.by_feature | verdict.by_position).get(part, Evidence()))
    return total


def believe_in_drafts(engine):
    """Make passes cheap, and keep the belief in the drafter where it started."""
    make_up_beliefs(engine, (0.02, 0.1))


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Run a case and its control, and with them all others of the same drafter."""

    @cache
    def play_all_of(drafter):
        outcomes = {}
        with start(tmp_path_factory.mktemp(drafter), drafter) as engine:
            for case in (case for case in ALL if case.drafter == drafter):
                args = SPECIAL.get(case, {})
                if case in PERFECT:
                    args = {"prepare": believe_in_drafts}
                bias = CONTROLS.get(case, draw_some_from_draft)
                honest = run_case(engine, case, SEED, **args)
                biased = run_case(engine, case, SEED, bias=bias, **args)
                outcomes[case] = honest, biased
        return outcomes

    return lambda case: play_all_of(case.drafter)[case]


def check_premises(case, outcome):
    """Assert that a case was what its name says: else it would prove nothing."""
    counters, cut = outcome.counters, outcome.counters["num_cut_tokens"]
    assert counters["num_fallbacks"] == {}
    assert counters["num_accepted_tokens"] > 0
    # A draft without its law turns its step to one-hot verification, where any rule of
    # selection is exact; one that was passed over for a step has lost it.
    share = outcome.record.num_one_hot / counters["num_verified_tokens"]
    assert share > 0.9 if case.drafter == "argmax" else share < 0.05
    if case.policy in ("tetris", "goodput") and not case.gaps:
        assert cut["budget"] + cut.get("latency", 0) > 0
    if case.gaps:
        assert cut["depth"] > 0
    # `goodput` does not let so many run that blocks are short.
    if case.tight and case.policy != "goodput":
        assert outcome.record.num_preempted > 0


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_token_follows_its_law(case, play):
    outcome, _ = play(case)
    check_premises(case, outcome)
    assert not is_alarming(outcome.verdict.total)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_what_breaks_the_rule_is_rejected(case, play):
    _, outcome = play(case)
    total = outcome.verdict.total
    assert total.num_impossible == 0
    assert is_alarming(total)


@pytest.mark.parametrize("part", [*FEATURES, *POSITIONS, FOLLOWING])
def test_every_kind_and_position_follows_its_law(part, play):
    assert not is_alarming(add_up((play(case)[0] for case in MIXED), part))


@pytest.mark.parametrize("part", [*BETTABLE, *POSITIONS])
def test_a_twentieth_from_the_draft_is_rejected_of_every_kind_and_position(part, play):
    evidence = add_up((play(case)[1] for case in MIXED), part)
    assert evidence.num_impossible == 0
    assert is_alarming(evidence)


def test_the_family_has_room_for_all_tests():
    assert NUM_TESTS_OF_V1 <= FAMILY - NUM_TESTS_OF_V2
