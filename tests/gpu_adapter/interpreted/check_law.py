"""Above temperature 0 every token of the V2 runner follows the target's law.

As `tests.engine.law.test_law`, with the same requests, laws and bets. The interpreter
leaves room for one case of each policy, each judged by itself, and for one control of
all four together, with drafts of four tokens: hardly any behind the fourth of this
drafter's is reached. `make law` runs all cases, as deep as on the V1 runner, and
controls of each policy.
"""

import pytest

from tests.engine.law.cases import pair_up_policies
from tests.engine.law.evidence import NUM_TESTS_OF_V2, Evidence, is_alarming
from tests.engine.law.test_law import check_premises
from tests.gpu_adapter.interpreted.law import (
    DRAFTER,
    draw_some_from_draft,
    run_case,
    start,
)

SEED = 1

DEPTH = 4

CASES = pair_up_policies(DRAFTER)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the cases brought, and what their controls did, all on one engine."""
    with start(tmp_path_factory.mktemp("law"), depth=DEPTH) as engine:
        honest = {case: run_case(engine, case, SEED, num_each=1) for case in CASES}
        biased = {
            case: run_case(engine, case, SEED, bias=draw_some_from_draft, num_each=1)
            for case in CASES
        }
    return honest, biased


def add_up(outcomes):
    total = Evidence()
    for outcome in outcomes.values():
        total.add(outcome.verdict.total)
    return total


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_follows_its_law(case, outcomes):
    outcome = outcomes[0][case]
    check_premises(case, outcome)
    assert outcome.record.num_one_hot == 0
    if case.policy in ("tetris", "goodput"):
        assert outcome.counters["num_cut_tokens"]["budget"] > 0
    assert not is_alarming(outcome.verdict.total)


def test_all_together_follow_their_laws(outcomes):
    assert not is_alarming(add_up(outcomes[0]))


def test_a_twentieth_from_the_draft_is_rejected(outcomes):
    total = add_up(outcomes[1])
    assert total.num_impossible == 0
    assert is_alarming(total)


def test_the_family_has_room_for_all_tests():
    assert len(CASES) + 1 <= NUM_TESTS_OF_V2
