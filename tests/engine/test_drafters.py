"""Every drafter the product knows, on a real engine with the tetris policy.

EAGLE, EAGLE-3 and MTP heads are written by hand for a target whose next token hangs
mostly on the last one, so that their drafts are often right without any training.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.engine.checks import (
    check_counters,
    check_idle,
    complete,
    draw_prompt,
    draw_prompts,
    greedy,
    summarize_all,
    watch,
)
from tests.engine.conftest import run_engine
from tests.engine.tiny_models import (
    write_eagle3_head,
    write_eagle_head,
    write_markov_llama,
    write_mimo,
    write_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = draw_prompts(6)
PARAMS = greedy(32)
DEPTH = 4

BLOCK = 32
"""The smallest KV block of vLLM's CPU attention."""

Summaries = list[list[tuple[Any, ...]]]


@dataclass
class Models:
    """Paths of targets and heads, and what the targets answer by themselves."""

    target: dict[str, Path]
    draft: dict[str, Path | None]
    _expected: dict[Path, Summaries] = field(default_factory=dict)

    def expect(self, method):
        """Complete the prompts with a method's target alone, once."""
        target = self.target[method]
        if target not in self._expected:
            with run_engine(target) as plain:
                outputs = complete(plain, PROMPTS, PARAMS)
            self._expected[target] = summarize_all(outputs)
        return self._expected[target]


@pytest.fixture(scope="module")
def models(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    llama = write_markov_llama(folder / "target")
    write_tokenizer(llama)
    mimo = write_mimo(folder / "mimo")
    return Models(
        target={
            "draft_model": tiny_pair[0],
            "eagle": llama,
            "eagle3": llama,
            "mtp": mimo,
            "ngram": llama,
            "suffix": llama,
        },
        draft={
            "draft_model": tiny_pair[1],
            "eagle": write_eagle_head(folder / "eagle"),
            "eagle3": write_eagle3_head(folder / "eagle3", llama),
            # The head is part of the target's checkpoint.
            "mtp": None,
            "ngram": None,
            "suffix": None,
        },
    )


@dataclass
class Handover:
    """What the worker handed the scheduler after one step."""

    num_drafts: list[int]
    confidence: np.ndarray | None
    logits: list[torch.Tensor]


def record_handovers(engine):
    """Record drafts, confidences and, if there is a draft model, its logits."""
    handovers = []
    logits = []
    model = getattr(engine.runner.drafter, "model", None)
    if model is not None:
        compute_logits = model.compute_logits

        def spy_on_logits(hidden_states, *args):
            computed = compute_logits(hidden_states, *args)
            # Sampling divides them by the temperature in place.
            logits.append(computed.clone())
            return computed

        model.compute_logits = spy_on_logits
    scheduler = engine.scheduler
    receive = scheduler.update_draft_token_ids

    def spy_on_drafts(drafts):
        num_drafts = [len(ids) for ids in drafts.draft_token_ids]
        handovers.append(Handover(num_drafts, drafts.confidence, logits.copy()))
        logits.clear()
        receive(drafts)

    scheduler.update_draft_token_ids = spy_on_drafts
    return handovers


def check_confidence(handovers, scale):
    """Expect the largest probability at every position of every draft."""
    assert handovers
    for handover in handovers:
        assert handover.confidence is not None
        assert set(handover.num_drafts) == {DEPTH}
        assert handover.confidence.shape == (len(handover.num_drafts), DEPTH)
        largest = [scale(row).softmax(dim=-1).amax(dim=-1) for row in handover.logits]
        np.testing.assert_allclose(
            handover.confidence, torch.stack(largest, dim=1).numpy(), rtol=1e-4
        )


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafters_with_logits_are_selected_by_their_confidence(method, models):
    from serving.engine.cpu.drafter import ConfidenceDrafter

    expected = models.expect(method)
    with (
        run_engine(
            models.target[method], models.draft[method], policy="tetris", method=method
        ) as engine,
        watch(engine) as steps,
    ):
        assert isinstance(engine.runner.drafter, ConfidenceDrafter)
        handovers = record_handovers(engine)
        outputs = complete(engine, PROMPTS, PARAMS)
        counters = engine.scheduler.counters
        check_counters(counters)
        check_idle(engine)
        assert counters.method == method
        assert counters.num_cut_tokens["budget"] > 0
        # Hand-made as they are, a fifth of the verified drafts and more are right.
        assert counters.num_accepted_tokens > 0.2 * counters.num_verified_tokens
        assert counters.num_accepted_tokens_per_pos[1] > 0
    assert summarize_all(outputs) == expected
    check_confidence(handovers, scale=lambda logits: logits)
    # Some requests verify more than their equal share of two, others less.
    num_drafts = {n for step in steps for n in step.num_drafts.values()}
    assert {1, 3} <= num_drafts


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_sampled_drafts_report_the_distribution_they_are_drawn_from(method, models):
    """Flattened by the request's temperature; greedy neighbours keep their output."""
    temperature = 0.7
    expected = models.expect(method)
    with (
        run_engine(
            models.target[method],
            models.draft[method],
            policy="tetris",
            method=method,
            speculative={"draft_sample_method": "probabilistic"},
        ) as engine,
        watch(engine),
    ):
        handovers = record_handovers(engine)
        complete(engine, PROMPTS, greedy(24, temperature=temperature))
        check_confidence(handovers, scale=lambda logits: logits / temperature)

        handovers.clear()
        params = [
            greedy(32, temperature=temperature if i % 2 else 0.0)
            for i in range(len(PROMPTS))
        ]
        outputs = complete(engine, PROMPTS, params)
        assert summarize_all(outputs)[::2] == expected[::2]
        check_counters(engine.scheduler.counters)
        assert engine.scheduler.counters.num_cut_tokens["budget"] > 0


def test_a_grammar_makes_sampled_drafts_take_the_likeliest_token(models):
    """VLLM cuts a draft at the first token the grammar forbids.

    Cutting by the drawn token would bias the output; the likeliest token depends on
    the prefix alone.
    """
    from vllm.sampling_params import StructuredOutputsParams

    free = greedy(24, temperature=1.0)
    structured = greedy(
        24,
        temperature=1.0,
        structured_outputs=StructuredOutputsParams(regex="[a-h0-9]{20}"),
    )
    drawn = []
    with run_engine(
        models.target["eagle"],
        models.draft["eagle"],
        policy="tetris",
        method="eagle",
        speculative={"draft_sample_method": "probabilistic"},
        skip_tokenizer_init=False,
    ) as engine:
        drafter = engine.runner.drafter
        sample = drafter._sample_from_logits

        def spy_on_sample(logits, metadata):
            likeliest = logits.argmax(dim=-1)
            drafts, probs = sample(logits, metadata)
            rows = drafter._grammar_rows
            follows = torch.zeros_like(drafts, dtype=torch.bool)
            if rows is not None:
                follows[rows] = True
                # The sampler must know that nothing was left to chance.
                assert (probs[rows].amax(dim=-1) == 1.0).all()
            drawn.extend(
                zip(follows.tolist(), (drafts == likeliest).tolist(), strict=True)
            )
            return drafts, probs

        drafter._sample_from_logits = spy_on_sample
        params = [structured if i % 2 else free for i in range(len(PROMPTS))]
        complete(engine, PROMPTS, params)
        check_counters(engine.scheduler.counters)
    assert all(is_likeliest for follows, is_likeliest in drawn if follows)
    assert not all(is_likeliest for follows, is_likeliest in drawn if not follows)
    assert any(follows for follows, _ in drawn)


def check_learnt_acceptance(engine, expected):
    """Expect a drafter without logits to be ranked by what was learnt."""
    scheduler = engine.scheduler
    learner = scheduler._planner._positions
    prior = learner.estimate()
    with watch(engine):
        handovers = record_handovers(engine)
        outputs = complete(engine, PROMPTS, PARAMS)
        # Repeating an answer is the best there is for both.
        again = complete(engine, PROMPTS, PARAMS)
    assert summarize_all(outputs) == summarize_all(again) == expected
    counters = scheduler.counters
    check_counters(counters)
    check_idle(engine)
    assert all(handover.confidence is None for handover in handovers)
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] > 0
    # Of these drafts, most are right: position 0 stands above the prior of a half.
    assert learner.estimate()[0] > 0.55 > prior[0]


def test_ngram_drafts_are_selected_by_learnt_acceptance(models, monkeypatch):
    expected = models.expect("ngram")
    with run_engine(
        models.target["ngram"],
        policy="tetris",
        method="ngram",
        speculative={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    ) as engine:
        check_learnt_acceptance(engine, expected)

        # A depth that changes from step to step, down to none at all.
        scheduler = engine.scheduler
        depths = itertools.cycle(range(DEPTH + 1))
        monkeypatch.setattr(
            type(scheduler._planner), "choose_depth", lambda *_: next(depths)
        )
        assert summarize_all(complete(engine, PROMPTS, PARAMS)) == expected
        check_counters(scheduler.counters)


def test_steps_with_look_ups_are_timed_and_further_drafts_priced_at_nothing(models):
    from policies.estimators.step_cost import MIN_STEPS_TO_EXPORT

    with run_engine(
        models.target["ngram"],
        policy="goodput",
        draft_tokens=DEPTH,
        method="ngram",
        speculative={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    ) as engine:
        planner = engine.scheduler._planner
        cost = planner.cost
        assert planner.export_state() == {}
        for _ in range(20):
            complete(engine, PROMPTS, PARAMS)
        check_counters(engine.scheduler.counters)
        assert cost.num_steps >= MIN_STEPS_TO_EXPORT
        assert planner.export_state()
        report = planner.report()
        assert report["measured_step_ms"] > 0.0
        assert report["predicted_step_ms"] > 0.0
        assert cost.draft_first.at(len(PROMPTS)) < 0.5 * cost.target.at(len(PROMPTS))
        # By the priors, which nothing would correct, 7 ms.
        assert float(cost.draft_next_ms(len(PROMPTS), DEPTH)) < 0.01


def test_suffix_drafts_are_selected_by_learnt_acceptance(models, monkeypatch):
    pytest.importorskip(
        "arctic_inference",
        reason="suffix decoding needs arctic-inference, which comes as source only",
    )
    expected = models.expect("suffix")
    with run_engine(
        models.target["suffix"], policy="tetris", method="suffix"
    ) as engine:
        check_learnt_acceptance(engine, expected)

        # vLLM's suffix drafter insists on one depth; the policy's is not passed on.
        scheduler = engine.scheduler
        monkeypatch.setattr(type(scheduler._planner), "choose_depth", lambda *_: 1)
        assert summarize_all(complete(engine, PROMPTS, PARAMS)) == expected
        assert scheduler.counters.draft_depth == DEPTH
        check_counters(scheduler.counters)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_head_past_its_context_leaves_the_shared_cache_alone(method, models):
    """The neighbours' drafts are as often right after as before.

    A request of 106 tokens and more, past the head's context of 96, shares a KV block
    with them.
    """
    limit = 3 * BLOCK
    prefix = draw_prompt(0, limit + 10)
    neighbours = [prefix[:BLOCK] + draw_prompt(i, 3) for i in range(4)]
    with run_engine(
        models.target[method],
        models.draft[method],
        policy="fixed",
        draft_tokens=DEPTH,
        method=method,
        speculative={"max_model_len": limit},
        block_size=BLOCK,
    ) as engine:
        counters = engine.scheduler.counters

        def count_accepted():
            before = counters.num_verified_tokens, counters.num_accepted_tokens
            outputs = complete(engine, neighbours, PARAMS)
            # EAGLE-like drafters recompute the last block of a cached prefix.
            assert all(output.num_cached_tokens is not None for output in outputs)
            return (
                counters.num_verified_tokens - before[0],
                counters.num_accepted_tokens - before[1],
            )

        complete(engine, neighbours, PARAMS)
        before = count_accepted()
        num_verified = counters.num_verified_tokens
        complete(engine, [prefix], PARAMS)
        assert counters.num_verified_tokens == num_verified
        assert count_accepted() == before
        assert before[1] > 0
        check_counters(counters)
