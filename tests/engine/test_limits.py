"""Requests that end inside a block, or outgrow the drafter, and those beside them.

Target and draft are the same model here, so that every draft is right by construction:
one rejected draft means a hole or a wrong position in the drafter's cache.
"""

import itertools
import json
import shutil

import pytest

from tests.engine.checks import Arrival, draw_prompt, greedy
from tests.engine.conftest import BLOCK, run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LIMIT = 3 * BLOCK
"""The drafter's context."""

CONTEXT = 512
"""The target's."""

DEPTH = 5


@pytest.fixture(scope="module")
def short(tiny_pair, plain, tmp_path_factory):
    """An engine whose drafter has a context of `LIMIT`.

    That a setting may shorten it as well: `test_drafters`.
    """
    target = tiny_pair[0]
    draft = tmp_path_factory.mktemp("short") / "draft"
    shutil.copytree(target, draft)
    config = json.loads((draft / "config.json").read_text())
    config["max_position_embeddings"] = LIMIT
    (draft / "config.json").write_text(json.dumps(config))
    options = {"policy": "fixed", "draft_tokens": DEPTH, "block_size": BLOCK}
    with run_engine(target, draft, **options) as engine:
        yield engine


@pytest.fixture
def engine(short):
    return short.start_over("fixed", draft_tokens=DEPTH)


def check_all_accepted(engine):
    """Assert that every verified draft was right."""
    engine.check_counters()
    counters = engine.counters
    assert counters.num_accepted_tokens == counters.num_verified_tokens > 0


def count_drafts(steps, *names):
    """Verified and accepted drafts of some requests."""
    verified = sum(s.num_drafts.get(name, 0) for s in steps for name in names)
    accepted = sum(s.num_accepted.get(name, 0) for s in steps for name in names)
    return verified, accepted


@pytest.fixture
def record_positions(monkeypatch):
    """Record the largest position of every pass of the draft model.

    Its rotation table ends at its context; the kernel reads past the end unasked.
    """

    def record(engine):
        largest = []
        model = engine.runner.drafter.model
        forward = model.forward

        def spy_on_forward(*args, positions, **kwargs):
            largest.append(int(positions.max()))
            return forward(*args, positions=positions, **kwargs)

        monkeypatch.setattr(model, "forward", spy_on_forward)
        return largest

    return record


def make_outgrowing(max_tokens):
    """One request that outgrows the drafter, and short ones that keep joining.

    They share its first KV block and stay below 32 + 3 + 20 + 5 = 60 tokens.
    """
    prefix = draw_prompt(0, LIMIT - 12)
    arrivals = [Arrival("outgrowing", prefix, greedy(max_tokens), step=2)]
    for i in range(24):
        prompt = prefix[:BLOCK] + draw_prompt(100 + i, 3)
        arrivals.append(Arrival(f"neighbour{i}", prompt, greedy(20), i))
    return arrivals


def test_outgrowing_the_drafter_costs_the_neighbours_nothing(
    plain, engine, record_positions
):
    """Upstream stops drafting for the whole batch then.

    Here every draft of the others keeps being verified and accepted, also of those who
    join afterwards and take over the KV blocks that the request shared with them.
    """
    # From 84 tokens over the limit of 96 to 114.
    arrivals = make_outgrowing(30)
    names = [a.name for a in arrivals[1:]]
    positions = record_positions(engine)
    with engine.watch() as steps:
        outputs = engine.drive(arrivals)
    assert max(positions) == LIMIT - 1
    engine.check_counters()
    assert outputs == plain.drive(arrivals)
    verified, accepted = count_drafts(steps, *names)
    # Each neighbour gets its first token from the prompt and every further one in
    # blocks of DEPTH drafts and a bonus: 1 + 3 x 6 + 1.
    assert accepted == verified == len(names) * 3 * DEPTH
    verified, accepted = count_drafts(steps, "outgrowing")
    assert accepted == verified > 0


def test_a_skipped_drafter_catches_up_no_further_than_its_context(
    plain, engine, record_positions
):
    """Two steps of three go without the drafter, then it fills in what it missed.

    A request that has outgrown it is missing positions the drafter has no rotation
    for; they must neither be computed nor keep the others from catching up.
    """
    arrivals = make_outgrowing(40)
    engine.draft_at(itertools.cycle([0, 0, DEPTH]))
    positions = record_positions(engine)
    with engine.watch() as steps:
        assert engine.drive(arrivals) == plain.drive(arrivals)
    assert max(positions) == LIMIT - 1
    check_all_accepted(engine)
    verified, _ = count_drafts(steps, *(a.name for a in arrivals[1:]))
    assert verified > len(arrivals) * DEPTH


def test_a_token_limit_inside_a_block_wastes_no_draft(plain, engine):
    """A request that may emit r more tokens verifies at most r - 1 drafts.

    The last of the r is the bonus token, so that every emitted token but the first
    (from the prompt) is an accepted draft or a bonus token.
    """
    prompt = draw_prompt(0, 10)
    lengths = {f"request{n}": n for n in range(1, 2 * DEPTH + 4)}
    arrivals = [Arrival(name, prompt, greedy(n)) for name, n in lengths.items()]
    with engine.watch() as steps:
        assert engine.drive(arrivals) == plain.drive(arrivals)
    engine.check_counters()
    assert engine.counters.num_cut_tokens["length"] > 0
    for name, max_tokens in lengths.items():
        num_steps = sum(name in s.num_scheduled for s in steps)
        verified, accepted = count_drafts(steps, name)
        assert accepted == verified == max_tokens - num_steps


def test_a_block_that_reaches_min_tokens_may_end_with_a_stop_token(plain, engine):
    """VLLM bars stop tokens from the bonus token by where its block starts."""
    [[(tokens, *_)]] = plain.answer([[5, 8, 13]], greedy(8))
    stop_at = next(i for i in range(3, 8) if tokens[i] not in tokens[:i])
    params = greedy(8, min_tokens=stop_at - 1, stop_token_ids=[tokens[stop_at]])
    engine.start_over("fixed", draft_tokens=min(stop_at, DEPTH))
    [[(stopped, *_)]] = engine.answer([[5, 8, 13]], params)
    assert stopped == tokens[: stop_at + 1]
    check_all_accepted(engine)
    assert engine.counters.num_cut_tokens["min_tokens"] > 0


def test_the_end_of_the_targets_context_wastes_no_budget(plain, own_draft):
    """Drafts that vLLM would drop at the end must not take a place in the budget."""
    prompts = [draw_prompt(i, CONTEXT - 9 - i) for i in range(4)]
    depths = {"draft_tokens": 3, "max_draft_tokens": DEPTH}
    engine = own_draft.start_over("tetris", **depths)
    with engine.watch():
        answers = engine.answer(prompts, greedy(100))
    check_all_accepted(engine)
    assert engine.counters.num_cut_tokens["scheduler"] == 0
    assert answers == plain.answer(prompts, greedy(100))
    for prompt, [(tokens, _, finish_reason, _)] in zip(prompts, answers, strict=True):
        assert len(prompt) + len(tokens) == CONTEXT
        assert finish_reason == "length"
