"""Every drafter the product knows, on a real engine.

EAGLE, EAGLE-3 and MTP heads are written by hand for a target whose next token hangs
mostly on the last one, so that their drafts are often right without any training.
"""

import time
from contextlib import ExitStack, nullcontext
from functools import cache
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies.estimators.step_cost import MIN_STEPS_TO_EXPORT
from tests.engine.checks import draw_prompt, draw_prompts, greedy
from tests.engine.conftest import BLOCK, run_engine
from tests.engine.tiny_models import FEW, write_heads

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = draw_prompts(6)
PARAMS = greedy(32)
DEPTH = 4

LIMIT = 3 * BLOCK
"""Context of the drafters, which only one test reaches."""

SAMPLED = {"draft_sample_method": "probabilistic", "max_model_len": LIMIT}

LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def expect(plain, tiny_pair, models):
    """What the target of a method answers to the prompts."""

    @cache
    def expect_of(target):
        own = target == tiny_pair[0]
        with nullcontext(plain) if own else run_engine(target) as alone:
            return alone.answer(PROMPTS, PARAMS)

    return lambda method: expect_of(models[method][0])


@pytest.fixture(scope="module")
def models(tiny_pair, tmp_path_factory):
    """Target and draft of every method; some have none, or it is in the target's."""
    folder = tmp_path_factory.mktemp("heads")
    heads = write_heads(folder) | {"draft_model": tiny_pair}
    llama, _ = heads["eagle"]
    return heads | dict.fromkeys(["ngram", "suffix"], (llama, None))


@pytest.fixture(scope="module")
def start_over(models, expect):
    """The engine of a method, once started, as if new, or as it is with policy None."""
    speculative = {"ngram": LOOK_UP, "suffix": {}}
    with ExitStack() as stack:

        @cache
        def start(method):
            expect(method)  # Before, for the sake of our kernels.
            own = {"method": method.split()[0], "block_size": BLOCK}
            own["speculative"] = speculative.get(method, SAMPLED)
            own |= {"policy": "goodput", "draft_tokens": DEPTH}
            return stack.enter_context(run_engine(*models[method], **own))

        def start_over(method, policy="tetris", draft_tokens=2):
            depths = {"draft_tokens": draft_tokens, "max_draft_tokens": DEPTH}
            engine = start(method)
            return engine if policy is None else engine.start_over(policy, **depths)

        yield start_over


@pytest.fixture
def check_confidence(monkeypatch):
    """Check what is handed over after each step: the largest probabilities.

    Returns:
        A function that listens to an engine; `scale` turns a draft model's logits into
        those it draws from. It returns a list of the confidences.
    """

    def listen(engine, scale=lambda logits: logits):
        handed_over, logits = [], []
        scheduler, model = engine.scheduler, engine.runner.drafter.model
        receive = scheduler.update_draft_token_ids
        compute_logits = model.compute_logits

        def spy_on_logits(hidden_states, *args):
            computed = compute_logits(hidden_states, *args)
            # Sampling divides them by the temperature in place.
            logits.append(computed.clone())
            return computed

        def spy_on_drafts(drafts):
            if not logits:
                # Everybody ends with the next token.
                assert not any(drafts.draft_token_ids)
                return
            largest = [scale(row).softmax(dim=-1).amax(dim=-1) for row in logits]
            logits.clear()
            assert {len(ids) for ids in drafts.draft_token_ids} == {DEPTH}
            largest = torch.stack(largest, dim=1).numpy()
            np.testing.assert_allclose(drafts.confidence, largest, rtol=1e-4)
            handed_over.append(drafts.confidence)
            receive(drafts)

        monkeypatch.setattr(model, "compute_logits", spy_on_logits)
        monkeypatch.setattr(scheduler, "update_draft_token_ids", spy_on_drafts)
        return handed_over

    return listen


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafters_with_logits_are_selected_by_their_confidence(
    method, start_over, expect, check_confidence
):
    engine = start_over(method)
    handed_over = check_confidence(engine)
    with engine.watch() as steps:
        assert engine.answer(PROMPTS, PARAMS) == expect(method)
    engine.check_counters()
    engine.check_idle()
    counters = engine.counters
    assert counters.method == method
    assert counters.num_cut_tokens["budget"] > 0
    # Hand-made as they are, a fifth of the verified drafts and more are right.
    assert counters.num_accepted_tokens > 0.2 * counters.num_verified_tokens
    assert counters.num_accepted_tokens_per_pos[1] > 0
    assert handed_over
    # Some requests verify more than their equal share of two, others less.
    num_drafts = {n for step in steps for n in step.num_drafts.values()}
    assert {1, 3} <= num_drafts


def test_a_head_of_few_tokens_drafts_as_over_the_whole_vocabulary(start_over, expect):
    """Token and confidence are those of vLLM's own logits, which it spreads out."""
    engine = start_over(FEW)
    assert engine.answer(PROMPTS, PARAMS) == expect(FEW)
    assert engine.counters.num_accepted_tokens > 0
    drafter = engine.runner.drafter
    hidden = torch.randn(50, drafter.model.config.hidden_size)
    with torch.inference_mode():
        spread = drafter.model.compute_logits(hidden)
        drafts = drafter._greedy_sample(hidden)
    assert spread.isinf().any()
    assert torch.equal(drafts, spread.argmax(dim=-1))
    assert len(set(drafts.tolist())) > 5
    largest = spread.softmax(dim=-1).amax(dim=-1)
    np.testing.assert_allclose(drafter.take_confidence()[:, 0], largest, rtol=1e-5)


def test_a_head_of_few_tokens_draws_as_over_the_whole_vocabulary(
    start_over, monkeypatch
):
    """From vLLM's own distribution of each request, which it does not spread out."""
    drafter = start_over(FEW).runner.drafter
    states = torch.randn(2, drafter.model.config.hidden_size)
    hidden = states.repeat_interleave(2000, dim=0)
    # The greedy one's distribution is not asked for.
    temperatures = torch.tensor([0.7, 0.0]).repeat_interleave(2000)
    sampling = SimpleNamespace(
        all_greedy=False, all_random=False, temperature=temperatures
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        spread = drafter.model.compute_logits(states)
        monkeypatch.setattr(drafter.model, "compute_logits", None)
        drafts, laws = drafter._sample_draft_tokens(hidden, sampling)
    expected = (spread[0] / 0.7).softmax(dim=-1)
    assert laws.shape == (4000, len(expected))
    torch.testing.assert_close(laws[:2000], expected.expand(2000, -1))
    drawn = torch.bincount(drafts[:2000], minlength=len(expected)) / 2000
    assert 0.5 * (drawn - expected).abs().sum() < 0.1
    assert set(drafts[2000:].tolist()) == {int(spread[1].argmax())}
    largest = [float(expected.max()), float(spread[1].softmax(dim=-1).max())]
    confidence = drafter.take_confidence()[[0, -1], 0]
    np.testing.assert_allclose(confidence, largest, rtol=1e-4)


def test_drawing_a_first_draft_is_priced_with_the_first_pass(start_over, monkeypatch):
    """Else a depth of 1 would cost less than it does, and all others more."""
    from serving.engine.compat_cpu import SpecDecodeBaseProposer

    engine = start_over("eagle")
    receive = engine.scheduler.update_draft_token_ids
    draw, times, drawn = SpecDecodeBaseProposer._sample_from_logits, [], []

    def draw_slowly(*args):
        # A second passes on the drafter's clock alone.
        drawn.append(1.0)
        return draw(*args)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(drawn))
    monkeypatch.setattr("serving.engine.cpu.drafter.time", clock)

    def note(drafts):
        times.append(drafts.times)
        receive(drafts)

    monkeypatch.setattr(SpecDecodeBaseProposer, "_sample_from_logits", draw_slowly)
    monkeypatch.setattr(engine.scheduler, "update_draft_token_ids", note)
    engine.draft_at(cycle([1, 2]))
    engine.complete(PROMPTS[:2], greedy(24, temperature=0.7))
    for depth, num_next in ((1, 0), (2, 1)):
        own = [one for one in times if one is not None and one.depth == depth]
        assert len(own) > 3
        first_ms = np.median([one.draft_first_ms for one in own])
        next_ms = np.median([one.draft_next_ms for one in own])
        assert 1000 <= first_ms < 1500
        assert 1000 * num_next <= next_ms < 1000 * num_next + 500


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_sampled_drafts_report_the_distribution_they_are_drawn_from(
    method, start_over, expect, check_confidence, monkeypatch
):
    """Flattened by the request's temperature; greedy neighbours keep their output."""
    hot = greedy(24, temperature=0.7)
    engine = start_over(method)
    handed_over = check_confidence(engine, scale=lambda logits: logits / 0.7)
    engine.complete(PROMPTS, hot)
    assert handed_over
    monkeypatch.undo()
    answers = engine.answer(PROMPTS, [PARAMS, hot] * 3)
    assert answers[::2] == expect(method)[::2]
    engine.check_counters()
    assert engine.counters.num_cut_tokens["budget"] > 0


def test_drafts_bind_a_selection_only_where_they_are_drawn(start_over, monkeypatch):
    """What a greedy request drafts follows from its text, however others draft."""
    engine, seen = start_over("draft_model"), set()
    planner = type(engine.scheduler._planner)
    select = planner.select

    def note(self, batch):
        seen.add(batch.drafts_are_sampled)
        return select(self, batch)

    monkeypatch.setattr(planner, "select", note)
    hot = greedy(24, temperature=0.7)
    for params, expected in ((PARAMS, {False}), (hot, {True})):
        seen.clear()
        engine.complete(PROMPTS[:2], params)
        assert seen == expected
    engine.complete(PROMPTS[:2], [PARAMS, hot])
    assert True in seen


def test_look_ups_are_timed_and_further_drafts_priced_at_nothing(start_over):
    """First of all: what was timed at start-up comes with its first drafts.

    And only then.
    """
    engine = start_over("ngram", policy=None)
    planner = engine.scheduler._planner
    assert planner.export_state() == {}
    for _ in range(20):
        engine.complete(PROMPTS, PARAMS)
    engine.check_counters()
    cost = planner.cost
    assert cost.num_steps >= MIN_STEPS_TO_EXPORT
    assert planner.export_state()
    report = planner.report()
    assert report["measured_step_ms"] > 0.0
    assert report["predicted_step_ms"] > 0.0
    assert cost.draft_first.at(len(PROMPTS)) < 0.5 * cost.target.at(len(PROMPTS))
    # By the priors, which nothing would correct, 7 ms.
    assert float(cost.draft_next_ms(len(PROMPTS), DEPTH)) < 0.01


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_logits_go_by_learnt_acceptance(method, start_over, expect):
    if method == "suffix":
        pytest.importorskip("arctic_inference", reason="it comes as source only")
    engine = start_over(method)
    counters, learner = engine.counters, engine.scheduler._planner._positions
    prior = learner.estimate()
    with engine.watch():
        # Repeating an answer is the best there is for both.
        for _ in range(2):
            assert engine.answer(PROMPTS, PARAMS) == expect(method)
    engine.check_counters()
    engine.check_idle()
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] > 0
    # Of these drafts, most are right: position 0 stands above the prior of a half.
    assert learner.estimate()[0] > 0.55 > prior[0]

    # A depth that changes from step to step, down to none at all.
    engine.draft_at(cycle(range(DEPTH + 1)))
    assert engine.answer(PROMPTS, PARAMS) == expect(method)
    engine.check_counters()
    if method == "suffix":
        # vLLM's insists on one depth; the policy's is not passed on.
        assert counters.draft_depth == DEPTH


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_head_past_its_context_leaves_the_shared_cache_alone(method, start_over):
    """The neighbours' drafts are as often right after as before.

    A request of 106 tokens and more, past the head's context of 96, shares a KV block
    with them.
    """
    prefix = draw_prompt(0, LIMIT + 10)
    neighbours = [prefix[:BLOCK] + draw_prompt(i, 3) for i in range(4)]
    engine = start_over(method, "fixed", DEPTH)
    counters = engine.counters

    def count_drafts(prompts):
        before = np.array([counters.num_verified_tokens, counters.num_accepted_tokens])
        engine.complete(prompts, PARAMS)
        after = [counters.num_verified_tokens, counters.num_accepted_tokens]
        return (after - before).tolist()

    # EAGLE-like drafters recompute the last block of a cached prefix.
    count_drafts(neighbours)
    before = count_drafts(neighbours)
    assert min(before) > 0
    assert count_drafts([prefix]) == [0, 0]
    assert count_drafts(neighbours) == before
    engine.check_counters()
