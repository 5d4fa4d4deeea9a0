"""What audits find out, how sure they are, and what they hold back."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from policies.audit.audited import MIN_RUN, AuditedPlanner
from policies.audit.block import BlockResult, SeenStep
from policies.audit.gain import MIN_BLOCKS, estimate_gain
from policies.audit.holding import Trial
from policies.audit.ledger import Ledger, LoadSums, bucket_of
from policies.audit.schedule import BLOCK_STEPS, STEPS_TOUCHED, AuditSchedule
from policies.planner import Planner
from policies.registry import build_planner
from policies.testing import check_planner
from policies.types import (
    DraftBatch,
    DraftSelection,
    PolicySpec,
    StepTiming,
    VerificationOutcome,
)

DEPTH, FIXED = 4, 2
NUM_REQS = 4
PROMPT_EVERY = 10
"""Steps, on average."""


class Everything(Planner):
    """Drafts to one depth, verifies all, and believes in another fixed length."""

    def __init__(self):
        self.outcomes = []

    def select(self, batch):
        admitted = batch.num_draft_tokens
        return DraftSelection(admitted, int(admitted.sum()))

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return DEPTH

    def observe(self, outcome):
        self.outcomes.append(int(outcome.num_verified.sum()))

    def best_fixed(self, num_reqs):
        return FIXED


@dataclass
class Clockwork:
    """A made-up engine whose costs are known, and whose speed drifts and jumps.

    If it `has_one_depth` it drafts to that, whatever it is told.
    """

    acceptance: float = 0.7
    draft_ms: float = 3.0
    seed: int = 0
    noise: float = 0.3
    has_one_depth: bool = False
    depths: list[int] = field(default_factory=list)

    def run(self, planner, num_steps, *loads):
        """Run steps of `NUM_REQS` requests, or of as many as `loads` say in turn."""
        rng = np.random.default_rng(self.seed + len(self.depths))
        num_drafts = num_missed = 0
        wander = 0.0
        for step in range(num_steps):
            num_reqs = loads[step % len(loads)] if loads else NUM_REQS
            wander = 0.95 * wander + 0.1 * self.noise * rng.normal()
            speed = math.exp(wander + self.noise * math.sin(step / 3000))
            offered = np.full(num_reqs, num_drafts)
            verified = np.zeros(num_reqs, np.int64)
            if num_drafts:
                verified = planner.select(DraftBatch(offered, None)).num_admitted
            depth = planner.choose_depth(num_reqs)
            lucky = rng.geometric(1.0 - self.acceptance, num_reqs) - 1
            accepted = np.minimum(lucky, verified)
            planner.observe(VerificationOutcome(verified, accepted))
            num_prompt = 100 if rng.random() * PROMPT_EVERY < 1 else 0
            num_verified = int(verified.sum())
            if self.has_one_depth:
                depth = DEPTH
            first_ms = (self.draft_ms + 0.02 * num_prompt) if depth else 0.0
            next_ms = max(0, depth - 1) * self.draft_ms
            backlog_ms = 2.0 if depth and num_missed else 0.0
            num_missed = 0 if depth else num_missed + 1
            target_ms = 20.0 + 0.5 * (num_reqs + num_verified) + 0.1 * num_prompt
            parts_ms = target_ms, first_ms, next_ms, 0.5, backlog_ms
            load = num_reqs, num_reqs + num_verified, num_prompt, 100, depth
            own = [speed * ms for ms in parts_ms]
            planner.observe_timing(StepTiming(*load, *own, num_drafts=num_verified))
            self.depths.append(depth)
            num_drafts = depth

    def tokens(self, depth):
        return sum(self.acceptance**j for j in range(depth + 1))

    def step_ms(self, depth):
        verify_ms = 20.0 + 0.5 * NUM_REQS * (1 + depth)
        return verify_ms + depth * self.draft_ms + 0.5

    def gain(self, depth):
        """What drafting to `DEPTH` gains over another depth for the same work."""
        prompt_ms = 10.0 / PROMPT_EVERY
        of_arm = self.step_ms(depth) / self.tokens(depth) * self.tokens(DEPTH)
        own_prompt_ms = prompt_ms + 2.0 / PROMPT_EVERY
        return (of_arm + prompt_ms) / (self.step_ms(DEPTH) + own_prompt_ms)


def make_audited(inner, share=0.015, seed=1):
    return AuditedPlanner(inner, AuditSchedule(share, np.random.default_rng(seed)))


def test_the_gain_is_found_although_speed_drifts_prompts_join_and_the_drafter_lags():
    engine, audited = Clockwork(), make_audited(Everything(), share=0.1)
    engine.run(audited, 20_000)
    report = audited.report()
    # As good as exact: a per cent and a half of these blocks is noise.
    for arm, depth, rel in (("none", 0, 0.015), ("best_fixed", FIXED, 0.03)):
        name = f"speculation_gain_{arm}"
        assert report[name] == pytest.approx(engine.gain(depth), rel=rel)
        assert report[f"{name}_lower"] < report[name] < report[f"{name}_upper"]
        assert report[f"{name}_upper"] - report[f"{name}_lower"] < 0.06
    # Where each of a block's three measured steps carried a prompt.
    assert audited.num_unmatched < 0.01 * len(audited.ledger.blocks)


def test_a_trial_ends_although_the_drafter_drafts_to_one_depth_in_every_step():
    """As `suffix` does: a block drops its drafts, and its passes are not counted."""
    engine, audited = Clockwork(has_one_depth=True), make_audited(Everything())
    engine.run(audited, 5_000)
    report = audited.report()
    assert report["num_audited_none"] > MIN_BLOCKS
    assert report["speculation_gain_none"] == pytest.approx(engine.gain(0), rel=0.05)
    trial = audited.holding.at(NUM_REQS)
    assert not trial.is_open
    assert (trial.num_ended, trial.num_held) == (1, 0)


def test_a_pause_settles_every_block_and_leaves_no_neighbours_behind():
    engine, audited = Clockwork(), make_audited(Everything(), share=0.1)
    num_begun = 0
    for _ in range(60):
        engine.run(audited, 37)
        is_block = np.array(engine.depths[-37:]) != DEPTH
        assert not is_block[:MIN_RUN].any()
        num_begun += int((np.diff(is_block.astype(int)) == 1).sum())
        audited.pause()
        assert num_begun == len(audited.ledger.blocks) + audited.num_unmatched
    assert len(audited.ledger.blocks) > MIN_BLOCKS


def test_blocks_find_steps_to_compare_with_while_requests_come_and_go():
    engine, audited = Clockwork(), make_audited(Everything(), share=0.1)
    # Every other step has a request more or less; each load as often as the others.
    wandering = [*range(12, 20), *range(20, 12, -1)]
    engine.run(audited, 20_000, *wandering)
    report = audited.report()
    assert audited.num_unmatched < 0.02 * len(audited.ledger.blocks)
    fixed_ms, per_req_ms = 20.5 + DEPTH * engine.draft_ms, 0.5 * (1 + DEPTH)
    loads = np.array(wandering, dtype=float)
    own_ms = float((fixed_ms + per_req_ms * loads).mean()) + 1.2
    plain_ms = float((20.5 + 0.5 * loads).mean())
    gain = (plain_ms * engine.tokens(DEPTH) + 1.0) / own_ms
    assert report["speculation_gain_none"] == pytest.approx(gain, rel=0.015)


def test_blocks_take_the_share_that_was_asked_for_and_are_not_the_policys_to_learn():
    inner = Everything()
    engine, audited = Clockwork(), make_audited(inner, share=0.02)
    engine.run(audited, 20_000)
    depths = np.array(engine.depths)
    assert set(depths.tolist()) == {0, DEPTH, FIXED}
    share = float((depths != DEPTH).mean()) * STEPS_TOUCHED / BLOCK_STEPS
    assert share == pytest.approx(audited.report()["audited_step_share"], rel=0.01)
    # The trial at the beginning asks more often.
    assert 0.015 < share < 0.025
    assert set(inner.outcomes) <= {0, DEPTH * NUM_REQS}
    assert 0.0 < audited.report()["audit_cost_share"] < 0.01


def test_what_the_last_step_before_a_sleep_emitted_survives_the_engines_empty_step():
    """It takes one when the last request ends, to tell the worker of that."""
    audited = make_audited(Everything())
    verified = VerificationOutcome(np.array([DEPTH]), np.array([3]))
    nothing = VerificationOutcome(np.empty(0, np.int64), np.empty(0, np.int64))
    timing = StepTiming(1, 1 + DEPTH, 0, 100, DEPTH, 20.0, 1.0, 3.0, 0.5)
    for _ in range(10):
        audited.choose_depth(1)
        audited.observe(verified)
        audited.observe_timing(timing)
    before = audited.ledger.total()[1].tokens
    audited.choose_depth(1)
    audited.observe(verified)
    audited.choose_depth(0)
    audited.observe(nothing)
    audited.choose_depth(1)
    assert audited.ledger.total()[1].tokens - before == pytest.approx(4.0)


def test_which_steps_are_audited_hangs_on_no_clock_nor_content():
    depths = []
    for seed, noise in ((0, 0.1), (5, 0.6)):
        engine = Clockwork(seed=seed, noise=noise)
        engine.run(make_audited(Everything()), 5_000)
        depths.append(engine.depths)
    assert depths[0] == depths[1]


# Six blocks, 50 steps apart by the mean.
TRIAL_STEPS = 800


def test_a_drafter_that_never_hits_is_held_back_within_a_trial_and_tried_again():
    engine, audited = Clockwork(acceptance=0.02), make_audited(Everything())
    engine.run(audited, 60_000)
    depths = np.array(engine.depths)
    first_held = int(np.argmax(np.convolve(depths == 0, np.ones(100), "valid") == 100))
    assert 0 < first_held < TRIAL_STEPS
    # Apart from that beginning it is as good as never to have drafted.
    ideal_ms = engine.step_ms(0) / engine.step_ms(DEPTH)
    later = depths[first_held:]
    lost = float((later > 0).mean()) * (1.0 / ideal_ms - 1.0)
    assert 0.0 < lost < 0.01
    runs = np.diff(np.flatnonzero(np.diff((depths == 0).astype(int))))
    holds = runs[runs > 1000]
    assert len(holds) >= 2
    assert (np.diff(holds[:2]) > 0).all()
    trial = audited.holding.at(NUM_REQS)
    assert len(holds) <= trial.num_ended <= len(holds) + 1
    # The rest are the steps of blocks.
    num_held = audited.holding.num_held
    assert num_held == trial.num_held == pytest.approx((depths == 0).sum(), rel=0.01)
    # All the time it rests, which is what no speculation does.
    assert audited.report()["speculation_held"] in (0.0, 1.0)


def test_what_loses_at_one_load_is_soon_held_at_loads_that_come_and_go():
    engine, audited = Clockwork(acceptance=0.02), make_audited(Everything())
    passing = []
    for _ in range(150):
        engine.run(audited, 60)
        engine.run(audited, 20, 1)
        passing += engine.depths[-20:]
    # By what is seen at such loads alone twice as many would draft.
    assert np.mean(np.array(passing[:1000]) > 0) < 0.3
    assert not any(passing[1000:])


def test_a_long_window_decides_where_the_short_one_has_no_block_of_some_load():
    trial = Trial()
    for number in range(300):
        # Half of the time at each of two loads; of one there are blocks at first only.
        num_steps = 10.0 * (number + 1)
        sums = LoadSums(num_steps, 10 * num_steps, TOKENS * num_steps)
        sums.target_ms = 10 * num_steps
        loads = {bucket_of(n): replace(sums) for n in (16, 24)}
        is_early = number < 24
        ms = 30.0 * ((0.4, 0.8)[number % 2] if is_early else 0.02)
        num_reqs = 24 if number < 10 and number % 3 else 16
        block = BlockResult(number, "none", num_reqs, 3, ms, 3.0, 0, 10.0, 0.0)
        trial.note_block(block, loads, loses_elsewhere=False)
        assert not (is_early and trial.hold_steps)
        if trial.hold_steps:
            break
    assert trial.hold_steps >= 1024


def test_a_drafter_that_comes_back_is_drafted_with_again():
    audited = make_audited(Everything())
    Clockwork(acceptance=0.02).run(audited, 3_000)
    assert audited.report()["speculation_held"] == 1.0
    engine = Clockwork(acceptance=0.7, seed=3)
    engine.run(audited, 20_000)
    assert np.mean(engine.depths[-2000:]) > 0.9 * DEPTH


@pytest.mark.parametrize(
    ("acceptance", "draft_ms"), [(0.3, 2.0), (0.36, 1.5), (0.38, 1.4)]
)
def test_whatever_drafts_lose_hardly_any_of_it_is_lost(acceptance, draft_ms):
    """By 17, 5 and 1 %; the last is too little to be found for sure."""
    engine = Clockwork(acceptance=acceptance, draft_ms=draft_ms)
    assert engine.gain(0) < 1.0
    engine.run(make_audited(Everything()), 30_000)
    share = float(np.mean(np.array(engine.depths[TRIAL_STEPS:]) > 0))
    assert share * (1.0 / engine.gain(0) - 1.0) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_a_policy_that_gains_a_little_is_hardly_ever_held_back(seed):
    # Gains three per cent.
    engine = Clockwork(acceptance=0.42, draft_ms=1.0, seed=seed)
    assert 1.0 < engine.gain(0) < 1.2
    audited = make_audited(Everything(), seed=seed)
    engine.run(audited, 4_000)
    assert np.mean(np.array(engine.depths) == 0) < 0.05


@pytest.mark.parametrize("policy", ["fixed", "tetris", "dynamic", "goodput"])
def test_an_audited_policy_keeps_the_contract(policy):
    spec = PolicySpec(policy, 4 if policy == "fixed" else 2, max_draft_tokens=4)

    def build(limits):
        return make_audited(build_planner(spec, limits), share=0.2)

    check_planner(build, max_depth=4, num_steps=600)


def test_what_only_the_policy_has_is_found_behind_the_audit():
    audited = make_audited(build_planner(PolicySpec("goodput", max_draft_tokens=4)))
    assert 1 <= audited.best_fixed(3) <= 4
    assert audited.plan is audited.inner.plan
    with pytest.raises(AttributeError):
        audited.nobody_has_this  # noqa: B018 - asked for, to be refused


def test_a_ledger_forgets_what_is_older_than_an_hour_of_work():
    ledger = Ledger()
    for step in range(1000):
        ledger.add_policy(SeenStep(NUM_REQS, 10_000.0, 2.0, 0, 9_000.0, 4), 100.0)
        if step % 10 == 0:
            (block,) = simulate(np.random.default_rng(step), 1, 1)[0]
            ledger.blocks.append(block._replace(at_s=ledger.now_s))
    # Ten seconds each; a minute or so more or less.
    sums = ledger.total()[NUM_REQS]
    assert 350 <= sums.num <= 375
    assert sums.ms == pytest.approx(10_000.0 * sums.num)
    assert 35 <= len(ledger.blocks) <= 38


# The interval.

NUM_SIMULATIONS = 800
TRUE_RATIO = 1.4
TOKENS = 2.0


def simulate(rng, num_simulations=1, num_blocks=120):
    """Blocks of three steps in a series that wanders and drifts, and their neighbours.

    Times of a step are lognormal, with an autoregression of .9 from step to step,
    another of .6 from block to block that meets a block but not its neighbours, and a
    drift by which the engine gets slower by a half.
    """
    shape = num_simulations, num_blocks
    value, between = 0.2 * rng.normal(size=shape), np.zeros(num_simulations)
    steps = np.zeros((35, *shape))
    for step in range(35):
        value = 0.9 * value + 0.087 * rng.normal(size=shape)
        steps[step] = value
    level = np.exp(0.4 * np.arange(num_blocks) / num_blocks)
    times = level * np.exp(steps)
    around = 0.5 * (times[:16].mean(axis=0) + times[19:].mean(axis=0))
    own = TRUE_RATIO / TOKENS * times[16:19].sum(axis=0)
    for number in range(num_blocks):
        between = 0.6 * between + 0.05 * rng.normal(size=num_simulations)
        own[:, number] *= np.exp(between)

    def describe(at_s, ms, near_ms):
        return BlockResult(at_s, "none", NUM_REQS, 3, ms, 3.0, 0, near_ms, 0.0)

    return [
        [describe(at_s, *block) for at_s, block in enumerate(zip(*one, strict=True))]
        for one in zip(own.tolist(), around.tolist(), strict=True)
    ]


def make_loads():
    """A thousand steps that decode alone."""
    sums = LoadSums(num=1e3, ms=1e3, tokens=TOKENS * 1e3, target_ms=1e3)
    return {NUM_REQS: sums}


def naive_interval(blocks):
    """The control: every measured step is taken for one drawn by itself."""
    ratios = np.repeat([b.ms / b.num_steps / b.near_target_ms for b in blocks], 3)
    half = 1.96 * ratios.std() / math.sqrt(ratios.size)
    return TOKENS * (ratios.mean() - half), TOKENS * (ratios.mean() + half)


@pytest.mark.parametrize("num_blocks", [MIN_BLOCKS, 100])
def test_95_of_100_intervals_hold_the_gain_and_naive_ones_do_not(num_blocks):
    """Of 800 simulations, so that chance moves the share by .8 % either way."""
    rng = np.random.default_rng(num_blocks)
    simulated = simulate(rng, NUM_SIMULATIONS, num_blocks)
    every = [block for blocks in simulated for block in blocks]
    # The expectation of what was simulated: the same ratio of sums, of all of them.
    near_ms = sum(3.0 * one.near_target_ms for one in every)
    truth = sum(one.ms for one in every) / near_ms
    held = naive = 0
    for blocks in simulated:
        gain = estimate_gain(make_loads(), blocks)
        held += gain.lower <= TOKENS * truth <= gain.upper
        lower, upper = naive_interval(blocks)
        naive += lower <= TOKENS * truth <= upper
    assert 0.92 <= held / NUM_SIMULATIONS <= 0.98
    assert naive / NUM_SIMULATIONS < 0.85


def test_too_few_blocks_or_loads_without_any_tell_nothing():
    (blocks,), loads = simulate(np.random.default_rng(0)), make_loads()
    assert estimate_gain(loads, blocks[: MIN_BLOCKS - 1]) is None
    elsewhere = {1: LoadSums(num=500.0, ms=500.0, tokens=900.0, target_ms=500.0)}
    assert estimate_gain(loads | elsewhere, blocks) is None


def test_steps_that_rest_count_as_no_speculation():
    (blocks,), loads = simulate(np.random.default_rng(0)), make_loads()
    working = estimate_gain(loads, blocks)
    loads[NUM_REQS].rest_ms = 3000.0
    resting = estimate_gain(loads, blocks)
    # A quarter of the time is spent as before.
    assert resting.ratio == pytest.approx(0.75 + 0.25 * working.ratio)
