"""What audits find out, and what they hold back."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from policies.audit.audited import MIN_RUN, AuditedPlanner
from policies.audit.gain import MIN_BLOCKS
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


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_loads_that_pass_by_draft_nothing_while_it_is_held(num_steps):
    """No block fits in there, so that nothing would ever be found out."""
    engine, audited = Clockwork(acceptance=0.02), make_audited(Everything())
    passing = []
    for _ in range(150):
        engine.run(audited, 60 - num_steps)
        engine.run(audited, num_steps, 1)
        passing += engine.depths[-num_steps:]
    # In the first trial nothing is held yet.
    assert not any(passing[num_steps * TRIAL_STEPS // 60 :])


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
