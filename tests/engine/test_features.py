"""Speculation beside everything else a request can ask for.

Correct means: at temperature 0 in float32, the same tokens, text, logprobs, stop and
finish reasons as from the target alone, with drafts really verified and accepted.
"""

import json
import re

import pytest

from tests.engine.checks import (
    check_logprobs,
    draw_prompt,
    draw_prompts,
    greedy,
    summarize_all,
)
from tests.engine.conftest import BLOCK

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = draw_prompts(6)


@pytest.fixture
def compare(plain, tetris):
    """Complete prompts on both, and expect the same with drafts accepted."""

    def compare_on_both(prompts, params):
        num_accepted = tetris.counters.num_accepted_tokens
        expected = plain.complete(prompts, params)
        with tetris.watch():
            outputs = tetris.complete(prompts, params)
        assert summarize_all(outputs) == summarize_all(expected)
        assert tetris.counters.num_accepted_tokens > num_accepted
        tetris.check_counters()
        tetris.check_idle()
        return expected, outputs

    return compare_on_both


def test_logprobs_are_the_targets_own(compare):
    params = greedy(logprobs=5, prompt_logprobs=3)
    expected, outputs = compare(PROMPTS, params)
    for output, reference in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], reference.outputs[0]
        total = pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        assert ours.cumulative_logprob == total
        check_logprobs(ours.logprobs, theirs.logprobs)
        # A prompt's first token has no logprob.
        check_logprobs(output.prompt_logprobs[1:], reference.prompt_logprobs[1:])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_inside_a_block_ends_the_text_there(include, plain, compare):
    wholes = plain.answer(PROMPTS, greedy(24, detokenize=True))
    texts = [text for [(_, text, *_)] in wholes]
    # Ends of stop strings fall on different positions of a block.
    stops = [text[5 + i : 8 + i] for i, text in enumerate(texts)]
    more = {"detokenize": True, "include_stop_str_in_output": include}
    params = [greedy(24, stop=[stop], **more) for stop in stops]
    _, outputs = compare(PROMPTS, params)
    answers = summarize_all(outputs)
    for text, stop, [(_, *how)] in zip(texts, stops, answers, strict=True):
        end = text.index(stop) + (len(stop) if include else 0)
        assert how == [text[:end], "stop", stop]


def test_top_k_alone_survives_steps_without_drafts(tetris):
    """Upstream ends the engine: it looks for the largest k among no rows at all.

    The check of upstream fails once that is repaired; then drop `mask_rows`.
    """
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    answers = tetris.answer(PROMPTS, greedy(temperature=1.0, top_k=4))
    assert all(len(tokens) == 24 for [(tokens, *_)] in answers)
    with pytest.raises(RuntimeError, match=r"max\(\)"):
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)


def test_a_seed_gives_the_same_tokens_however_the_prompt_is_cut(tetris, monkeypatch):
    params = greedy(24, temperature=1.0, seed=7)
    # vLLM cuts the prompts of those who are not alone.
    prompts = [draw_prompt(seed, 2 * BLOCK) for seed in (70, 71)]
    whole = tetris.answer(prompts, params)
    tetris.llm.reset_prefix_cache()
    config = tetris.scheduler.scheduler_config
    monkeypatch.setattr(config, "long_prefill_token_threshold", BLOCK // 2)
    with tetris.watch() as steps:
        assert tetris.answer(prompts, params) == whole
    num_scheduled = [sum(step.num_scheduled.values()) for step in steps]
    assert num_scheduled[:4] == [BLOCK] * 4
    tetris.check_idle()


def test_acceptance_is_reported_request_by_request(tetris, compare):
    """Their sums are the scheduler's counters, and vLLM's own metrics."""
    counters = tetris.counters
    before = read_metrics(tetris)
    opted_out = greedy(extra_args={"speculative_decoding": "off"})
    _, outputs = compare(PROMPTS, [*[greedy()] * 5, opted_out])
    after = read_metrics(tetris)
    assert counters.num_cut_tokens["opt_out"] > 0
    reports = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert [report.num_draft_tokens > 0 for report in reports] == [True] * 5 + [False]
    for report, output in zip(reports, outputs, strict=True):
        assert len(report.per_step_accepted) == sum(report.histogram)
        assert sum(report.per_step_drafted) == report.num_draft_tokens
        # One token comes from the prompt, one from each step, the rest are drafts;
        # steps without drafts are not in the report.
        num_tokens = len(output.outputs[0].token_ids)
        assert sum(n + 1 for n in report.per_step_accepted) <= num_tokens - 1
    totals = {
        "drafts": sum(sum(report.histogram) for report in reports),
        "draft_tokens": sum(report.num_draft_tokens for report in reports),
        "accepted_tokens": sum(sum(report.per_step_accepted) for report in reports),
    }
    assert totals == {name: after[name] - before[name] for name in totals}
    assert totals["drafts"] == counters.num_drafts
    assert totals["draft_tokens"] == counters.num_verified_tokens
    assert totals["accepted_tokens"] == counters.num_accepted_tokens


def read_metrics(engine):
    """VLLM's own counters of speculation."""
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name.startswith(prefix) and hasattr(metric, "value")
    }


SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tag": {"enum": ["a", "bc", "def"]}},
    "required": ["id", "tag"],
}

LIST_OF_CODES = "[a-h]{2}[0-5]{3}(,[a-h]{2}[0-5]{3}){3}"


@pytest.mark.parametrize(
    "constraint",
    [{"regex": LIST_OF_CODES}, {"json": SCHEMA}, {"choice": ["abc", "abde", "fg"]}],
    ids=["regex", "json", "choice"],
)
def test_structured_outputs_follow_their_grammar(constraint, tetris, compare):
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(**constraint)
    more = {"ignore_eos": False, "detokenize": True, "structured_outputs": grammar}
    params = [greedy(48, **more) if i % 2 else greedy(24) for i in range(len(PROMPTS))]
    counters = tetris.counters
    num_cut = counters.num_cut_tokens["grammar"]
    _, outputs = compare(PROMPTS, params)
    assert counters.num_cut_tokens["grammar"] > num_cut
    for output in outputs[1::2]:
        completion = output.outputs[0]
        if "regex" in constraint:
            assert re.fullmatch(LIST_OF_CODES, completion.text)
        elif "choice" in constraint:
            assert completion.text in constraint["choice"]
        elif completion.finish_reason == "stop":
            assert json.loads(completion.text)["tag"] in ("a", "bc", "def")
    if "regex" in constraint:
        # 23 characters, of which drafts supplied some.
        reports = [output.outputs[0].spec_decode_metrics for output in outputs[1::2]]
        assert sum(sum(report.per_step_accepted) for report in reports) > 0
