"""Above temperature 0 every token of the V2 runner follows the target's law.

As `tests.engine.law.test_law`, with the same requests, laws and bets. The interpreter
leaves room for one case of each policy, each judged by itself, and for one control of
all four together; `make law` runs all cases.
"""

from functools import partial

import pytest
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.engine.law import campaign
from tests.engine.law.bias import draw_from_draft
from tests.engine.law.cases import PLAYS_ALL, SEED, combine_all, pair_up_policies
from tests.engine.law.evidence import NUM_TESTS_OF_V2, Evidence, is_alarming
from tests.engine.made_up import make_up_costs
from tests.gpu_adapter.interpreted.engines import run_interpreted

DRAFTER = "confused"
"""A draft that is wrong so often that few tokens, which are slow here, show a bias."""

CASES = combine_all([DRAFTER]) if PLAYS_ALL else pair_up_policies(DRAFTER)

# For batches of about ten requests.
run_case = partial(campaign.run_case, num_each=1, few_blocks=8, prepare=make_up_costs)


def draw_some_from_draft(_):
    """Bias the rejection sampler of the V2 runner."""
    return draw_from_draft(rejection_sampler, campaign.SHARE, seed=1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the cases brought, and what their controls did, all on one engine."""
    with campaign.run_law_engine(
        run_interpreted,
        *campaign.write_models(tmp_path_factory.mktemp("law"), DRAFTER),
        speculative=campaign.SAMPLED,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    ) as engine:
        honest = {case: run_case(engine, case, SEED) for case in CASES}
        bias = draw_some_from_draft
        biased = {case: run_case(engine, case, SEED, bias=bias) for case in CASES}
    return honest, biased


def add_up(outcomes):
    total = Evidence()
    for outcome in outcomes.values():
        total.add(outcome.verdict.total)
    return total


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_follows_its_law(case, outcomes):
    outcome = outcomes[0][case]
    counters, cut = outcome.counters, outcome.counters["num_cut_tokens"]
    assert counters["num_fallbacks"] == {}
    assert counters["num_accepted_tokens"] > 0
    assert outcome.num_one_hot == 0
    if case.policy in ("tetris", "goodput"):
        assert cut["budget"] > 0
    if case.gaps:
        assert cut["depth"] > 0
    if case.tight and case.policy != "goodput":
        assert outcome.num_preempted > 0
    assert not is_alarming(outcome.verdict.total)


def test_all_together_follow_their_laws_and_a_twentieth_from_the_draft_does_not(
    outcomes,
):
    honest, biased = map(add_up, outcomes)
    assert not is_alarming(honest)
    assert biased.num_impossible == 0
    assert is_alarming(biased)
    assert len(CASES) + 1 <= NUM_TESTS_OF_V2
