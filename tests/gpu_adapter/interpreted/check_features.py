"""What else a request can ask for, and what happens where drafts cannot be left out."""

import re

import pytest

from policies.goodput import GoodputPlanner
from tests.engine.checks import (
    check_counters,
    complete,
    draw_prompts,
    greedy,
    summarize_all,
)
from tests.engine.tiny_models import write_llama_pair, write_tokenizer
from tests.gpu_adapter.interpreted import graphs, plugin
from tests.gpu_adapter.interpreted.engines import run_interpreted

PROMPTS = draw_prompts(6)

PATTERN = r"([a-e]{2}[0-9]){3,}"


@pytest.fixture(scope="module")
def pair_with_text(tmp_path_factory):
    """A pair whose tokens are characters; grammars need some."""
    target, draft = write_llama_pair(tmp_path_factory.mktemp("text"), noise=0.05)
    write_tokenizer(target)
    return target, draft


@pytest.fixture(scope="module")
def engines(pair_with_text):
    """VLLM's V2 runner without drafts, and ours."""
    target, draft = pair_with_text
    args = {"skip_tokenizer_init": False}
    with (
        run_interpreted(target, **args) as plain,
        run_interpreted(target, draft, policy="tetris", **args) as ours,
    ):
        yield plain, ours


def test_logprobs_are_the_targets_own(engines):
    params = greedy(16, logprobs=3)
    plain, ours = (complete(engine, PROMPTS, params) for engine in engines)
    assert summarize_all(ours) == summarize_all(plain)
    for output, reference in zip(ours, plain, strict=True):
        positions = output.outputs[0].logprobs
        expected = reference.outputs[0].logprobs
        assert len(positions) == len(expected) == 16
        for position, other in zip(positions, expected, strict=True):
            assert position.keys() == other.keys()
            for token, logprob in position.items():
                assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_structured_outputs_follow_their_grammar(engines):
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=PATTERN)
    structured = greedy(
        18, structured_outputs=grammar, ignore_eos=False, detokenize=True
    )
    # Free requests share the batch.
    params = [structured, greedy(18, detokenize=True)] * (len(PROMPTS) // 2)
    counters = engines[1].scheduler.counters
    num_before = counters.num_accepted_tokens
    plain, ours = (complete(engine, PROMPTS, params) for engine in engines)
    assert summarize_all(ours) == summarize_all(plain)
    for output in ours[::2]:
        assert re.fullmatch(r"([a-e]{2}[0-9])*[a-e]{0,2}", output.outputs[0].text)
    assert counters.num_accepted_tokens > num_before
    check_counters(counters)


def test_other_settings_change_no_token(engines):
    params = [
        greedy(16),
        greedy(16, extra_args={"speculative_decoding": "off"}),
        greedy(16, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(16, min_tokens=5, stop_token_ids=list(range(3, 20)), ignore_eos=False),
        greedy(16, allowed_token_ids=list(range(10, 40))),
        greedy(1),
    ]
    plain, ours = (complete(engine, PROMPTS, params) for engine in engines)
    assert summarize_all(ours) == summarize_all(plain)
    counters = engines[1].scheduler.counters
    assert counters.num_cut_tokens["opt_out"] > 0
    assert counters.num_cut_tokens["length"] > 0


@pytest.mark.parametrize("reason", ["attention_backend", "eager"])
def test_what_stands_in_the_way_leads_to_plain_verification(reason, pair, monkeypatch):
    """Not to a refusal to start, as vLLM's own adaptive verification does."""
    if reason == "attention_backend":
        # The CPU's has no graphs, left as it is.
        builder = graphs.CPUAttentionMetadataBuilder
        never = graphs.AttentionCGSupport.NEVER
        monkeypatch.setattr(builder, "_cudagraph_support", never)
    else:
        monkeypatch.setattr(plugin, "graphs_wanted", graphs.CUDAGraphMode.NONE)
    params = greedy(16)
    with run_interpreted(pair[0]) as plain:
        expected = summarize_all(complete(plain, PROMPTS, params))
    with run_interpreted(*pair, policy="tetris") as engine:
        assert engine.runner.adaptive_verification is None
        outputs = summarize_all(complete(engine, PROMPTS, params))
        counters = engine.scheduler.counters

    assert outputs == expected
    assert counters.num_fallbacks[f"plain_{reason}"] > 0
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] == 0


def test_times_and_profile_reach_the_planner(pair, monkeypatch):
    profiles = []
    fit = GoodputPlanner.fit_profile

    def spy(planner, profile):
        profiles.append(profile)
        fit(planner, profile)

    monkeypatch.setattr(GoodputPlanner, "fit_profile", spy)
    with run_interpreted(*pair, policy="goodput", draft_tokens=4) as engine:
        profiles.clear()  # Of the planner's rehearsal.
        cost = engine.scheduler._planner.cost
        complete(engine, PROMPTS, greedy(32))
        report = engine.scheduler.snapshot()["planner"]

    assert len(profiles) == 1
    # Every captured size, and some beyond.
    assert set(graphs.CAPTURED_TOKENS) < set(profiles[0].num_tokens)
    assert cost.num_steps > 10
    assert report["calibration_error"] >= 0
