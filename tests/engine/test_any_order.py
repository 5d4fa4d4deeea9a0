"""Whatever happens in whatever order, each answer is the target's own.

A state machine drives one real engine: requests arrive, go on from elsewhere, are
aborted; KV blocks run short, so that some lose theirs; policies and limits change under
way. After each step the books must balance, and in the end everybody is answered.
"""

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serving.engine.shared.replay import EMITTED_TOKEN_IDS
from tests.engine.checks import MAX_STEPS, draw_prompts, greedy
from tests.engine.conftest import MAX_NUM_SEQS, Engine, run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_TOKENS = 24
DEPTH = 4
PROMPTS = draw_prompts(8)
PARAMS = greedy(NUM_TOKENS)
POLICIES = (
    {"policy": "fixed", "draft_tokens": 3, "max_draft_tokens": 3},
    {"policy": "tetris", "draft_tokens": 2, "max_draft_tokens": DEPTH},
    {"policy": "dynamic", "max_draft_tokens": DEPTH},
    {"policy": "goodput", "max_draft_tokens": DEPTH},
)


class AnyOrder(RuleBasedStateMachine):
    """One life of an engine between two times at which it is idle."""

    engine: ClassVar[Engine]
    expected: ClassVar[list[tuple[int, ...]]]

    def __init__(self):
        super().__init__()
        self.asked, self.seen, self.held = {}, {}, None
        self.pool = self.engine.scheduler.kv_cache_manager.block_pool
        config = self.engine.core.vllm_config.scheduler_config
        self.most_tokens = config.max_num_batched_tokens
        self.num_free = self.pool.get_num_free_blocks()

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), cut=st.sampled_from([0, 0, 1, 9]))
    def arrive(self, prompt, cut):
        """Let a request come, or go on behind tokens that came out elsewhere."""
        name, params = f"{id(self)}-{len(self.seen)}", PARAMS
        if cut:
            emitted = list(self.expected[prompt][:cut])
            params = greedy(NUM_TOKENS, extra_args={EMITTED_TOKEN_IDS: emitted})
        tokens = {"prompt_token_ids": PROMPTS[prompt]}
        self.engine.llm.llm_engine.add_request(name, tokens, params)
        self.asked[name] = prompt, cut
        self.seen[name] = []

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def abort(self, data):
        """End a request, which may have ended: when it does depends on the clock."""
        name = data.draw(st.sampled_from(list(self.seen)))
        self.engine.llm.llm_engine.abort_request([name])
        self.asked.pop(name, None)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def abort_within_a_step(self, data):
        """End a request, which may have ended, while the model runs."""
        name = data.draw(st.sampled_from(list(self.seen)))
        gone = self.engine.llm.llm_engine.output_processor.abort_requests(
            [name], internal=False
        )
        self.engine.core.aborts_queue.put_nowait(gone)
        self.asked.pop(name, None)
        self.step(1)

    @precondition(lambda self: self.held is None)
    @rule(num_left=st.integers(0, 6))
    def take_blocks(self, num_left):
        num_taken = max(0, self.pool.get_num_free_blocks() - num_left)
        self.held = self.pool.get_new_blocks(num_taken)

    @precondition(lambda self: self.held is not None)
    @rule()
    def give_back_blocks(self):
        self.pool.free_blocks(self.held)
        self.held = None

    @rule(
        policy=st.sampled_from(POLICIES),
        max_num_seqs=st.sampled_from([0, 1, 3]),
        max_num_batched_tokens=st.sampled_from([0, 40]),
    )
    def change_policy(self, policy, max_num_seqs, max_num_batched_tokens):
        """Put another planner in charge of what runs, with other limits."""
        scheduler = self.engine.scheduler
        scheduler._batch.limits.lift()
        scheduler.max_num_active_reqs = max_num_seqs or MAX_NUM_SEQS
        scheduler.max_num_scheduled_tokens = max_num_batched_tokens or self.most_tokens
        scheduler.change_policy(policy)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps):
        for _ in range(num_steps):
            for output in self.engine.llm.llm_engine.step():
                (answer,) = output.outputs
                name = output.request_id
                self.seen[name] = list(answer.token_ids)
                if output.finished and name in self.asked:
                    self.check(name)
                    del self.asked[name]

    def check(self, name):
        """Compare a whole answer with what the target alone says."""
        prompt, cut = self.asked[name]
        assert tuple(self.seen[name]) == self.expected[prompt][cut:]

    @invariant()
    def what_came_so_far_is_the_target_s(self):
        """Tokens come in their order, and none is taken back."""
        for name, (prompt, cut) in self.asked.items():
            ids = self.seen[name]
            assert tuple(ids) == self.expected[prompt][cut : cut + len(ids)]

    @invariant()
    def the_books_balance(self):
        """Nobody is in two places, and no more is accepted than was drafted."""
        scheduler = self.engine.scheduler
        running = {request.request_id for request in scheduler.running}
        waiting = {request.request_id for request in scheduler.waiting}
        assert not running & waiting
        assert running | waiting <= set(scheduler.requests)
        counters = scheduler.counters
        assert counters.num_accepted_tokens <= counters.num_verified_tokens
        assert counters.num_verified_tokens <= counters.num_proposed_tokens
        assert not counters.num_fallbacks

    def teardown(self):
        """Nobody starves, and nothing is left behind."""
        if self.held:
            self.give_back_blocks()
        self.change_policy(POLICIES[-1], 0, 0)
        for _ in range(MAX_STEPS):
            if not self.asked:
                break
            self.step(1)
        assert not self.asked, "some requests are never answered"
        assert not self.engine.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.num_free


def test_in_any_order_of_events_answers_stay_the_targets(tiny_pair, plain):
    """With KV blocks so short that a request takes a few of them."""
    outputs = plain.complete(PROMPTS, PARAMS)
    AnyOrder.expected = [tuple(one.outputs[0].token_ids) for one in outputs]
    how = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    args = {"draft_tokens": DEPTH, "block_size": 32, "enable_prefix_caching": False}
    with run_engine(*tiny_pair, policy="goodput", **args) as engine:
        AnyOrder.engine = engine
        run_state_machine_as_test(AnyOrder, settings=how)
