"""Requests that end inside a block, or outgrow the drafter, and those beside them.

Target and draft are the same model here, so that every draft is right by construction:
one rejected draft means a hole or a wrong position in the drafter's cache.
"""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest

from policies.baselines import FixedPlanner
from tests.engine.checks import (
    Arrival,
    check_counters,
    complete,
    draw_prompt,
    drive,
    greedy,
    summarize,
    summarize_all,
    watch,
)
from tests.engine.conftest import run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
"""The smallest KV block of vLLM's CPU attention."""

LIMIT = 3 * BLOCK
"""The drafter's context."""

DEPTH = 5


@pytest.fixture(scope="module")
def target(tiny_pair):
    """The target, which drafts for itself."""
    return tiny_pair[0]


@pytest.fixture(scope="module")
def short_draft(target, tmp_path_factory):
    """The same model, whose own configuration ends its context at `LIMIT`."""
    folder = tmp_path_factory.mktemp("short") / "draft"
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LIMIT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def count_drafts(steps, *names):
    """Verified and accepted drafts of some requests."""
    verified = sum(s.num_drafts.get(name, 0) for s in steps for name in names)
    accepted = sum(s.num_accepted.get(name, 0) for s in steps for name in names)
    return verified, accepted


def record_positions(engine, monkeypatch):
    """Record the largest position of every pass of the draft model.

    Its rotation table ends at its context; the kernel reads past the end unasked.
    """
    largest = []
    model = engine.runner.drafter.model
    forward = model.forward

    def spy_on_forward(*args, positions, **kwargs):
        largest.append(int(positions.max()))
        return forward(*args, positions=positions, **kwargs)

    monkeypatch.setattr(model, "forward", spy_on_forward)
    return largest


def make_neighbours(prefix, num_rounds):
    """Short requests that keep joining, and share their first KV block.

    They stay below 32 + 3 + 20 + 5 = 60 tokens, far from any limit here.
    """
    return [
        Arrival(
            f"neighbour{i}",
            prefix[:BLOCK] + draw_prompt(100 + i, 3),
            greedy(20),
            step=i,
        )
        for i in range(num_rounds)
    ]


@pytest.mark.parametrize("shortened_by", ["setting", "draft", "target"])
def test_outgrowing_the_drafter_costs_the_neighbours_nothing(
    shortened_by, target, short_draft, monkeypatch
):
    """One request crosses the drafter's limit while others come and go.

    Upstream stops drafting for the whole batch then. The request in question stops
    where its drafter's context does (or its own: `target`); for the others every
    draft keeps being verified and accepted, also for those who join afterwards and
    take over the KV blocks it shared with them.
    """
    max_model_len = LIMIT if shortened_by == "target" else 2 * LIMIT
    speculative = {"max_model_len": LIMIT} if shortened_by == "setting" else {}
    draft = short_draft if shortened_by == "draft" else target
    prefix = draw_prompt(0, LIMIT - 12)
    # From 84 tokens over the limit of 96 to 114, or to the end of the target's.
    outgrowing = Arrival("outgrowing", prefix, greedy(30), step=2)
    arrivals = [outgrowing, *make_neighbours(prefix, num_rounds=24)]
    names = [a.name for a in arrivals[1:]]

    common = {"block_size": BLOCK, "max_model_len": max_model_len}
    with run_engine(target, **common) as plain:
        expected = drive(plain, arrivals)
    with (
        run_engine(
            target,
            draft,
            policy="fixed",
            draft_tokens=DEPTH,
            speculative=speculative,
            **common,
        ) as engine,
        watch(engine) as steps,
    ):
        positions = record_positions(engine, monkeypatch)
        outputs = drive(engine, arrivals)
        assert max(positions) == LIMIT - 1
        check_counters(engine.scheduler.counters)

    for name, output in expected.items():
        assert summarize(outputs[name].outputs[0]) == summarize(output.outputs[0])
    num_tokens = len(prefix) + len(outputs["outgrowing"].outputs[0].token_ids)
    assert num_tokens == min(len(prefix) + 30, max_model_len)

    verified, accepted = count_drafts(steps, *names)
    assert accepted == verified > 0
    # Each neighbour gets its first token from the prompt and every further one in
    # blocks of DEPTH drafts and a bonus: 1 + 3 x 6 + 1.
    assert verified == len(names) * 3 * DEPTH
    verified, accepted = count_drafts(steps, "outgrowing")
    assert accepted == verified > 0


def test_the_last_draft_comes_from_the_last_position_of_the_context(target):
    """A drafter of context L reads positions 0..L-1 and predicts one more.

    A request of n tokens therefore gets min(k, L + 1 - n) drafts, all of them right.
    One more would come from a position the drafter has not, as the control shows.
    """
    arrivals = [
        Arrival(f"request{i}", draw_prompt(i, LIMIT - 12 - i), greedy(40))
        for i in range(DEPTH + 1)
    ]
    with run_engine(
        target,
        target,
        policy="fixed",
        draft_tokens=DEPTH,
        speculative={"max_model_len": LIMIT},
    ) as engine:
        with watch(engine) as steps:
            drive(engine, arrivals)
        last_drafts = set()
        for step in steps:
            for name, num_tokens in step.num_tokens.items():
                if step.num_scheduled[name] > 1 + DEPTH:
                    continue  # The prompt.
                num_drafts = step.num_drafts.get(name, 0)
                num_left = 40 - (num_tokens - len(arrivals[int(name[-1])].prompt))
                within = LIMIT + 1 - num_tokens
                assert num_drafts == max(0, min(DEPTH, num_left - 1, within))
                assert step.num_accepted.get(name, 0) == num_drafts
                if num_drafts == within:
                    last_drafts.add(num_tokens)
        # Blocks ended at the limit in more than one way.
        assert len(last_drafts) > 2

        engine.scheduler._drafts.rooms.drafter_limit += DEPTH
        with watch(engine) as steps:
            drive(engine, arrivals)
        verified, accepted = count_drafts(steps, *(a.name for a in arrivals))
        assert accepted < verified


def test_drafting_past_the_limit_leaves_the_cache_as_it_was(target):
    """The rows of a request past the limit still run, and must not write.

    vLLM maps a position past the limit to 0 and masks its slot, but counts on from
    there: the next passes of the same block would overwrite positions 1, 2, ... of
    the request, in KV blocks that prefix caching shares.
    """
    prefix = draw_prompt(0, LIMIT + 10)
    neighbour = prefix[:BLOCK] + draw_prompt(1, 3)
    with run_engine(
        target,
        target,
        policy="fixed",
        draft_tokens=DEPTH,
        speculative={"max_model_len": LIMIT},
        block_size=BLOCK,
    ) as engine:
        counters = engine.scheduler.counters
        complete(engine, [prefix], greedy(10))
        assert counters.num_verified_tokens == 0
        outputs = complete(engine, [neighbour], greedy(20))
        assert outputs[0].num_cached_tokens == BLOCK
        assert counters.num_accepted_tokens == counters.num_verified_tokens > 0


def test_a_skipped_drafter_catches_up_no_further_than_its_context(
    target, short_draft, monkeypatch
):
    """Two steps of three go without the drafter, then it fills in what it missed.

    A request that has outgrown it is missing positions the drafter has no rotation
    for; they must neither be computed nor keep the others from catching up.
    """
    depths = itertools.cycle([0, 0, DEPTH])
    monkeypatch.setattr(FixedPlanner, "choose_depth", lambda *_: next(depths))
    prefix = draw_prompt(0, LIMIT - 12)
    outgrowing = Arrival("outgrowing", prefix, greedy(40), step=2)
    arrivals = [outgrowing, *make_neighbours(prefix, num_rounds=24)]
    args = {"block_size": BLOCK, "max_model_len": 2 * LIMIT}
    with run_engine(target, **args) as plain:
        expected = drive(plain, arrivals)
    with (
        run_engine(
            target, short_draft, policy="fixed", draft_tokens=DEPTH, **args
        ) as engine,
        watch(engine) as steps,
    ):
        positions = record_positions(engine, monkeypatch)
        outputs = drive(engine, arrivals)
        assert max(positions) == LIMIT - 1
        counters = engine.scheduler.counters
        check_counters(counters)
        assert counters.num_accepted_tokens == counters.num_verified_tokens > 0
    for name, output in expected.items():
        assert summarize(outputs[name].outputs[0]) == summarize(output.outputs[0])
    verified, _ = count_drafts(steps, *(a.name for a in arrivals[1:]))
    assert verified > len(arrivals) * DEPTH


def test_a_token_limit_inside_a_block_wastes_no_draft(target):
    """A request that may emit r more tokens verifies at most r - 1 drafts.

    The last of the r is the bonus token, so that every emitted token but the first
    (from the prompt) is an accepted draft or a bonus token.
    """
    prompt = draw_prompt(0, 10)
    arrivals = [
        Arrival(f"request{n}", prompt, greedy(n)) for n in range(1, 2 * DEPTH + 4)
    ]
    with run_engine(target) as plain:
        expected = complete(plain, [prompt], greedy(2 * DEPTH + 3))
    whole = list(expected[0].outputs[0].token_ids)
    with (
        run_engine(target, target, policy="fixed", draft_tokens=DEPTH) as engine,
        watch(engine) as steps,
    ):
        outputs = drive(engine, arrivals)
        check_counters(engine.scheduler.counters)
        assert engine.scheduler.counters.num_cut_tokens["length"] > 0
    for arrival in arrivals:
        max_tokens = arrival.params.max_tokens
        assert max_tokens is not None
        completion = outputs[arrival.name].outputs[0]
        assert list(completion.token_ids) == whole[:max_tokens]
        assert completion.finish_reason == "length"
        num_steps = sum(arrival.name in s.num_scheduled for s in steps)
        verified, accepted = count_drafts(steps, arrival.name)
        assert accepted == verified == max_tokens - num_steps


@pytest.mark.parametrize("policy", ["fixed", "tetris"])
def test_the_end_of_the_targets_context_wastes_no_budget(policy, target):
    """Drafts that vLLM would drop at the end must not take a place in the budget."""
    prompts = [draw_prompt(i, LIMIT - 9 - i) for i in range(4)]
    with run_engine(target, max_model_len=LIMIT) as plain:
        expected = complete(plain, prompts, greedy(100))
    with run_engine(
        target, target, policy=policy, draft_tokens=3, max_model_len=LIMIT
    ) as engine:
        with watch(engine):
            outputs = complete(engine, prompts, greedy(100))
        counters = engine.scheduler.counters
        check_counters(counters)
        assert counters.num_cut_tokens["scheduler"] == 0
        assert counters.num_accepted_tokens == counters.num_verified_tokens > 0
    assert summarize_all(outputs) == summarize_all(expected)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(output.outputs[0].token_ids) == LIMIT
        assert output.outputs[0].finish_reason == "length"


def test_drafts_that_are_not_looked_at_would_have_been_kept_whole():
    """Far from every limit a request's drafts pass at once."""
    from vllm import SamplingParams

    from serving.engine.cpu.draft_room import DraftRooms

    num_passed = 0
    cases = itertools.product((0, 1, 9), (None, [7]), (12, 40), (16, 30, 64), (20, 64))
    for min_tokens, stops, max_tokens, drafter_limit, max_model_len in cases:
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops
        )
        rooms = DraftRooms(DEPTH, max_model_len, drafter_limit)
        for num_output in range(1, max_tokens):
            request = SimpleNamespace(
                request_id="it",
                sampling_params=params,
                num_prompt_tokens=10,
                max_tokens=max_tokens,
                num_output_tokens=num_output,
                num_tokens=10 + num_output,
                spec_token_ids=[5] * DEPTH,
            )
            room = rooms.of(request)
            num_usable, _ = rooms.limit(request, DEPTH)
            if request.num_tokens <= room.num_tokens:
                num_passed += 1
                assert num_usable == DEPTH
            elif min_tokens == 0:
                # One token more than fits, and it is looked at.
                assert num_usable < DEPTH
    assert num_passed > 50
