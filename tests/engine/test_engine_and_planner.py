"""What an engine tells its planner of requests and passes, and does as it says."""

from itertools import count
from types import SimpleNamespace

import pytest

from serving.engine.shared.ageing import Ageing
from tests.engine.checks import (
    check_counters,
    complete,
    draw_prompt,
    draw_prompts,
    greedy,
    summarize_all,
)
from tests.engine.conftest import run_engine
from tests.engine.made_up import Instead, make_up_costs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLASSES = {
    "interactive": {"weight": 4.0, "latency_target_ms": 30.0, "priority": -1},
    "batch": {"weight": 0.5, "priority": 10},
    "default": {"weight": 2.0},
}

DEPTH = 4


@pytest.fixture(scope="module")
def with_priorities(tiny_pair, plain):
    args = {"policy": "fixed", "draft_tokens": DEPTH, "scheduling_policy": "priority"}
    with run_engine(*tiny_pair, **args) as engine:
        yield engine


@pytest.fixture
def engine(with_priorities):
    """An engine with request classes, as if new."""
    with_priorities.set_policy("goodput", max_draft_tokens=DEPTH, classes=CLASSES)
    return with_priorities


def overhear(engine, **told):
    """Note in lists what methods of the planner are called with, first of all."""
    planner = engine.scheduler._planner

    def listen(method, notes):
        def call(*args):
            notes.append(args)
            return method(*args)

        return call

    engine.scheduler._planner = Instead(
        planner,
        **{name: listen(getattr(planner, name), notes) for name, notes in told.items()},
    )


def test_classes_reach_the_planner_by_name_and_by_priority(engine):
    batches, depths = [], []
    overhear(engine, select=batches, choose_depth=depths)
    named = {"extra_args": {"request_class": "interactive"}}
    engine.llm.generate(
        [{"prompt_token_ids": draw_prompt(i, 8)} for i in range(3)],
        [greedy(), greedy(**named), greedy()],
        priority=[0, 0, 10],
        use_tqdm=False,
    )
    assert engine.scheduler.counters.num_fallbacks == {}
    weights = [sorted(b.weights) for (b,) in batches if b.num_reqs == 3]
    assert weights
    assert all(one == [0.5, 2.0, 4.0] for one in weights)
    targets = [b.latency_targets_ms for (b,) in batches]
    assert {float(one.min()) for one in targets if one is not None} == {30.0}
    assert 30.0 in {target_ms for _, target_ms in depths}


def test_weights_and_latency_targets_leave_the_output_alone(engine, plain):
    prompts, names = draw_prompts(24), ("interactive", "batch", "default")
    params = [
        greedy(16 + 2 * n, extra_args={"request_class": names[n % 3]})
        for n in range(len(prompts))
    ]
    # A step takes 60 ms and more: within 30 ms a token only with its own drafts.
    make_up_costs(engine)
    loads = []
    overhear(engine, plan_batch=loads)
    outputs = complete(engine, prompts, params)
    counters = engine.scheduler.counters
    assert counters.num_fallbacks == {}
    assert 0 < counters.num_accepted_tokens < counters.num_verified_tokens
    assert 0 < counters.selection_seconds_total < counters.planning_seconds_total
    assert summarize_all(outputs) == summarize_all(complete(plain, prompts, params))
    # Per step, in which a request gets more than a token.
    targets_ms = {load.latency_target_ms for (load,) in loads} - {None}
    assert min(targets_ms) >= 30.0
    assert max(targets_ms) > 31.0


OTHERS_POLICY = """
import numpy as np
from policies.planner import Planner
from policies.types import DraftSelection


class EveryOther(Planner):
    def __init__(self, max_depth, limits, num_kept):
        self.max_depth, self.num_kept = max_depth, num_kept

    def select(self, batch):
        admitted = np.minimum(batch.num_draft_tokens, self.num_kept)
        admitted[::2] = 0
        return DraftSelection(admitted, int(admitted.sum()))

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return self.max_depth

    def observe(self, outcome):
        pass
"""


def test_a_planner_of_somebody_elses_package_is_built_and_obeyed(
    with_priorities, tmp_path, monkeypatch
):
    (tmp_path / "others_policy.py").write_text(OTHERS_POLICY, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    engine, name = with_priorities, "others_policy:EveryOther"
    engine.set_policy(name, max_draft_tokens=3, params={"num_kept": 2})
    complete(engine, draw_prompts(4), greedy(16))
    counters = engine.scheduler.counters
    assert counters.policy == name
    assert counters.num_fallbacks == {}
    assert counters.num_verified_tokens > 0
    # Of at most four requests two verify two of three drafts each.
    assert counters.num_verified_tokens <= counters.num_proposed_tokens / 3
    engine.set_policy("fixed", draft_tokens=DEPTH, params={})  # For its neighbours.


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_one_pass_of_the_drafter_is_priced_however_many_it_makes(
    in_one_pass, monkeypatch
):
    """A clock that passes alone move: 10 ms a target's, 2 ms a drafter's."""
    from serving.engine.compat_cpu import SpecDecodeBaseProposer
    from serving.engine.cpu import profile

    now_s = 0.0

    class Drafter(SpecDecodeBaseProposer):
        num_speculative_tokens = 4
        parallel_drafting = in_one_pass

        def __init__(self):
            """Load nothing."""

        def dummy_run(self, _):
            nonlocal now_s
            now_s += 0.002 * (1 if in_one_pass else 4)

    class Runner:
        max_num_tokens = 4
        drafter = Drafter()
        model = SimpleNamespace(compute_logits=lambda hidden_states: hidden_states)

        def _dummy_run(self, num_tokens):
            nonlocal now_s
            now_s += 0.01
            self.drafter.dummy_run(num_tokens)
            return [0] * num_tokens, None

    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now_s))
    timed = profile.profile_passes(Runner())
    assert timed is not None
    assert timed.target_ms == pytest.approx((10.0, 10.0, 10.0))
    assert timed.draft_ms == pytest.approx((2.0, 2.0, 2.0))
    assert timed.drafts_in_one_pass is in_one_pass


@pytest.mark.parametrize("is_ageing", [True, False])
def test_under_sustained_urgent_load_a_request_that_can_wait_gets_its_turn(
    is_ageing, with_priorities, monkeypatch
):
    if not is_ageing:
        monkeypatch.setattr(Ageing, "look", lambda _: None)
    engine = with_priorities
    # Without latency targets, which a busy machine would miss.
    classes = {"chat": {"priority": -1}, "bulk": {"priority": 10}}
    engine.set_policy(
        "goodput", max_draft_tokens=DEPTH, classes=classes, max_num_seqs=2
    )
    now_s, ended = 0.0, set()
    engine.scheduler._batch.ageing._clock = lambda: now_s
    llm_engine = engine.llm.llm_engine

    def add(name, priority):
        prompt = {"prompt_token_ids": draw_prompt(len(name), 8)}
        llm_engine.add_request(name, prompt, greedy(6), priority=priority)

    urgent = (f"urgent{n}" for n in count())
    add(next(urgent), -1)
    add(next(urgent), -1)
    llm_engine.step()
    add("bulk", 10)
    for _ in range(120):
        while len(engine.scheduler.waiting) < 4:
            add(next(urgent), -1)
        now_s += 1
        ended |= {one.request_id for one in llm_engine.step() if one.finished}
    counters = engine.scheduler.counters
    check_counters(counters)
    assert counters.num_aged_requests == is_ageing
    assert ("bulk" in ended) == is_ageing
    # The others go on.
    assert len(ended) > 20
    llm_engine.abort_request([*engine.scheduler.requests], internal=True)
