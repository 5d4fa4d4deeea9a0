"""An EAGLE head that was left out drafts afterwards as if it never had been."""

from itertools import cycle
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.checks import draw_prompts, greedy, summarize_all
from tests.engine.conftest import BLOCK, run_engine
from tests.engine.tiny_models import write_heads

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEPTH = 2


def make_attentive(head):
    """Let every row that attention sees matter, and the target's states as well."""
    file = head / "model.safetensors"
    weights, rng = load_file(file), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "self_attn" in name or name == "fc.weight":
            weights[name] = 0.4 * torch.randn(weight.shape, generator=rng)
    save_file(weights, file)


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def engine(request, tmp_path_factory):
    method = request.param
    target, head = write_heads(tmp_path_factory.mktemp(method))[method]
    make_attentive(head)
    sizes = {"draft_tokens": DEPTH, "block_size": BLOCK}
    with run_engine(target, head, policy="fixed", method=method, **sizes) as engine:
        yield engine


def draft(engine, depths, prompts, *, keep_cache=False):
    """Draft as deep as an iterator says; at depth 0 no pass is made.

    Returns:
        The outputs, and by prompt and length the confidence in the first draft
        token: a function of all that the head has read.
    """
    if not keep_cache:
        engine.llm.reset_prefix_cache()
    engine.set_policy("fixed", draft_tokens=DEPTH)
    timings = engine.draft_at(depths)
    scheduler, seen = engine.scheduler, {}
    take = scheduler.update_draft_token_ids

    def note(drafts):
        if drafts.confidence is not None:
            for req_id, row in zip(drafts.req_ids, drafts.confidence, strict=True):
                if (request := scheduler.requests.get(req_id)) is not None:
                    seen[tuple(request.all_token_ids)] = float(row[0])
        take(drafts)

    with patch.object(scheduler, "update_draft_token_ids", note):
        outputs = engine.complete(prompts, greedy(60))
    assert not any(one.draft_first_ms for one in timings if one.depth == 0)
    return outputs, seen


def worst_difference(expected, seen):
    common = expected.keys() & seen.keys()
    assert len(common) > 20
    return max(abs(expected[key] - seen[key]) for key in common)


def skip_most():
    return cycle([0] * 9 + [DEPTH])


def test_it_catches_up_from_the_states_that_were_kept(engine, monkeypatch):
    prompts = draw_prompts(5)
    plain, expected = draft(engine, cycle([DEPTH]), prompts)
    outputs, seen = draft(engine, skip_most(), prompts)
    assert summarize_all(outputs) == summarize_all(plain)
    assert worst_difference(expected, seen) < 1e-4

    # The control: from other states it drafts otherwise.
    states = engine.runner._cold._states
    read = states.read
    monkeypatch.setattr(states, "read", lambda slots: 0 * read(slots))
    _, without = draft(engine, skip_most(), prompts)
    assert worst_difference(expected, without) > 1e-3


def test_whoever_finds_a_prefix_it_left_out_catches_up_too(engine):
    prompts = [prompt * (1 + 2 * BLOCK // len(prompt)) for prompt in draw_prompts(4)]
    first, _ = draft(engine, cycle([0]), prompts)
    longer = [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, first, strict=True)
    ]
    outputs, seen = draft(engine, cycle([DEPTH]), longer, keep_cache=True)
    assert min(output.num_cached_tokens for output in outputs) >= 2 * BLOCK
    _, expected = draft(engine, cycle([DEPTH]), longer)
    assert worst_difference(expected, seen) < 1e-4
