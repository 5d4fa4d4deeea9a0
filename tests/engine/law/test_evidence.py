"""The judge itself: exact laws, bets that cannot be won by chance, pairs that meet."""

import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.law.cases import Case, combine_all, pair_up
from tests.engine.law.evidence import STAKES, Evidence, bet, is_alarming
from tests.engine.law.judge import Verdict
from tests.engine.law.laws import Sampling, shape_law, truncate
from tests.engine.law.ledger import Ledger
from tests.engine.law.recorder import Block
from tests.engine.law.rounds import Control, Game

VOCAB = 12


def draw_laws(num_tokens, seed):
    """Draw targets and drafts that disagree, `[num_tokens, VOCAB]` each."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(2, num_tokens, VOCAB, generator=rng).double()
    target, draft = logits.softmax(dim=-1)
    return target, 0.6 * target + 0.4 * draft


def emit(laws, seed):
    """Draw a token from every law."""
    rng = torch.Generator().manual_seed(seed)
    return torch.multinomial(laws, 1, generator=rng)[:, 0]


def judge_tokens(tokens, target, draft):
    """Bet on tokens of which a draft was verified at every second position."""
    is_verified = torch.arange(len(tokens)) % 2 == 0
    everywhere = torch.ones(len(tokens), dtype=torch.bool)
    raw = (target + 1 / VOCAB) / 2
    return bet(tokens, target, raw, draft, is_verified, everywhere)


def test_no_bet_is_won_on_average():
    """Summed over all outcomes, by their probability, money is what it was before."""
    target, draft = draw_laws(50, seed=0)
    target[:, :3] = 0.0
    target = target / target.sum(dim=-1, keepdim=True)
    money = torch.zeros(1)
    for token in range(3, VOCAB):
        tokens = torch.full((50,), token)
        won = torch.from_numpy(judge_tokens(tokens, target, draft).log_e).exp()
        money = money + target[:, token, None, None] * won
    torch.testing.assert_close(money, torch.ones_like(money))


def test_a_twentieth_is_noticed_and_chance_is_not():
    target, draft = draw_laws(20_000, seed=1)
    honest = judge_tokens(emit(target, seed=2), target, draft).collect()
    draft, biased_law = draft.roll(1, dims=-1), target.clone()
    biased_law[::2] = 0.95 * target[::2] + 0.05 * draft[::2]
    biased = judge_tokens(emit(biased_law, seed=2), target, draft).collect()
    assert honest.log_e_value < math.log(100)
    assert not is_alarming(honest)
    assert is_alarming(biased)
    assert biased.num_verified == 10_000
    # The gambler who bets on the very share that went wrong wins the most.
    assert biased.log_e[0].argmax() == STAKES.index(0.05)


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_a_temperature_wrong_by_a_tenth_is_noticed(temperature):
    target, _ = draw_laws(20_000, seed=1)
    wrong = (target.log() / temperature).softmax(dim=-1)
    evidence = judge_tokens(emit(wrong, seed=2), target, target).collect()
    assert is_alarming(evidence)


def test_a_token_that_the_law_rules_out_is_proof():
    target, draft = draw_laws(4, seed=0)
    target[2, 5] = 0.0
    winnings = judge_tokens(torch.full((4,), 5), target, draft)
    assert winnings.collect().num_impossible == 1
    assert is_alarming(winnings.collect())
    assert not is_alarming(winnings.collect(np.array([True, True, False, True])))


def test_evidence_of_parts_adds_up_to_that_of_the_whole():
    target, draft = draw_laws(100, seed=0)
    winnings = judge_tokens(emit(target, seed=0), target, draft)
    first = np.arange(100) < 30
    total = Evidence()
    total.add(winnings.collect(first))
    total.add(winnings.collect(~first))
    whole = winnings.collect()
    np.testing.assert_allclose(total.log_e, whole.log_e)
    assert (total.num_tokens, total.num_verified) == (100, 50)
    assert total.log_e_value == pytest.approx(whole.log_e_value)
    # All begin with equal parts of 1.
    assert Evidence().log_e_value == pytest.approx(0.0)
    assert not is_alarming(Evidence(), num_tests=1)


def shape(output, **sampling):
    """Return the laws of an output of a model that says the same before each token."""
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64).log()
    logits = logits.repeat(len(output), 1)
    return shape_law(logits, [2], output, Sampling(**sampling)).target.tolist()


def test_the_exact_law_truncates_as_sampling_does():
    assert shape([0])[0] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    squares = [16 / 30, 9 / 30, 4 / 30, 1 / 30]
    assert shape([0], temperature=0.5)[0] == pytest.approx(squares)
    assert shape([0], top_k=2)[0] == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    # .4 + .3 do not reach .75 but .4 + .3 + .2 do.
    assert shape([0], top_p=0.75)[0] == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0.0])
    assert shape([0], temperature=0.0)[0] == [1.0, 0.0, 0.0, 0.0]


def test_the_exact_law_knows_what_was_said_before():
    stopped = shape([3, 3, 0], min_tokens=2, stop_token_ids=(0,))
    barred, whole = [0.0, 3 / 6, 2 / 6, 1 / 6], [0.4, 0.3, 0.2, 0.1]
    np.testing.assert_allclose(stopped, [barred, barred, whole])
    # Halved for being there, once more for each time: after 0, after 0 and 0.
    penalty = math.log(2)
    halved = shape([0, 0, 0], presence_penalty=penalty, frequency_penalty=penalty)
    assert halved[1] == pytest.approx([1 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert halved[2] == pytest.approx([0.5 / 6.5, 3 / 6.5, 2 / 6.5, 1 / 6.5])
    # Squared away from 1: the prompt's token 2 from the start, then 0 too.
    repeated = shape([0, 0], repetition_penalty=2.0)
    assert repeated[0] == pytest.approx(np.array([4, 3, 2**0.5, 1]) / (8 + 2**0.5))
    assert repeated[1] == pytest.approx(np.array([2, 3, 2**0.5, 1]) / (6 + 2**0.5))
    ruled = shape([0, 1], allowed=lambda said: (1, 3) if len(said) % 2 else (0, 2))
    even_then_odd = [4 / 6, 0.0, 2 / 6, 0.0], [0.0, 3 / 4, 0.0, 1 / 4]
    np.testing.assert_allclose(ruled, even_then_odd)


def test_where_rounding_could_change_the_law_nothing_is_judged():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64).log()
    for sampling, is_certain in (
        (Sampling(), [True, True]),
        (Sampling(temperature=0.0), [True, False]),
        (Sampling(top_k=1), [True, False]),
        (Sampling(top_p=0.8), [False, False]),
        (Sampling(top_p=0.7), [True, True]),
    ):
        assert truncate(scores, sampling)[1].tolist() == is_certain


def test_a_block_is_judged_up_to_its_first_rejected_draft():
    block = Block(start=1, drafts=[7, 8, 9], laws=torch.zeros(3, VOCAB))
    assert block.count_reached([0, 7, 8, 9, 1]) == 3
    assert block.count_reached([0, 7, 5, 9]) == 2
    assert block.count_reached([0, 5]) == 1
    # The output ended inside the block.
    assert block.count_reached([0, 7]) == 1


def test_any_two_values_meet_in_the_cases_of_ci():
    names = [field.name for field in fields(Case)]

    def meetings(cases):
        return {
            (one, getattr(case, one), other, getattr(case, other))
            for case in cases
            for one, other in itertools.combinations(names, 2)
        }

    assert meetings(pair_up()) == meetings(combine_all())
    assert len(pair_up()) == 20


def test_a_round_that_was_broken_off_goes_on_where_it_stopped(tmp_path):
    """Its file then holds what one that was not would have written."""
    cases = [Case("eagle", "fixed"), Case("eagle", "tetris"), Case("mtp", "fixed")]
    target, draft = draw_laws(2000, seed=3)
    played = []

    def run_case(engine, case, seed, bias, num_each):
        if len(played) == num_before_break and is_breaking:
            raise KeyboardInterrupt
        played.append((case, seed, bias is not None))
        law = target if bias is None else draft
        won = judge_tokens(emit(law, seed=len(str(case))), target, draft).collect()
        return SimpleNamespace(verdict=Verdict(won, {"plain": won}, {}))

    controls = [Control(cases[0], lambda _: None, 1)]
    game = Game("v1", lambda *_: nullcontext(), run_case, cases, 1, controls)
    num_before_break, is_breaking = 2, True
    with pytest.raises(KeyboardInterrupt):
        game.play(Ledger.read(tmp_path / "broken.json"), tmp_path)
    is_breaking = False
    assert game.play(Ledger.read(tmp_path / "broken.json"), tmp_path)
    assert len(played) == 4
    assert game.play(Ledger.read(tmp_path / "whole.json"), tmp_path)
    assert played[:4] == played[4:]
    files = (tmp_path / "broken.json", tmp_path / "whole.json")
    broken, whole = (json.loads(file.read_text()) for file in files)
    assert broken["rounds"] == whole["rounds"]
    assert [one["num_tokens"] for one in whole["rounds"]] == [6000]
    assert broken["evidence"].keys() == whole["evidence"].keys()
    for name, part in broken["evidence"].items():
        other = whole["evidence"][name]
        np.testing.assert_allclose(part.pop("log_e"), other.pop("log_e"), atol=1e-5)
        assert part == other
    # The next one has another seed.
    assert Ledger.read(tmp_path / "whole.json").take_up("v1")["seed"] == 2
