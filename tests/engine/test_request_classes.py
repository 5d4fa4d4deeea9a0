"""Request classes: read from the configuration, found for requests, seen to matter."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from serving.engine.shared.request_classes import RequestClasses
from tests.engine.checks import complete, draw_prompt, draw_prompts, greedy
from tests.engine.conftest import run_engine
from tests.engine.made_up import make_up_costs

CLASSES = {
    "interactive": {"weight": 4.0, "latency_target_ms": 30.0, "priority": -1},
    "batch": {"weight": 0.5, "priority": 10},
    "default": {"weight": 2.0},
}


def read(classes):
    return RequestClasses.read(
        SimpleNamespace(additional_config={"tetris": {"classes": classes}})
    )


NEXT_ID = count()


def make_request(priority=0, **extra_args):
    return SimpleNamespace(
        request_id=str(next(NEXT_ID)),
        priority=priority,
        sampling_params=SimpleNamespace(extra_args=extra_args or None),
    )


def test_a_name_wins_over_a_priority_and_a_priority_over_the_default():
    classes = read(CLASSES)
    weights = [
        classes.of(make_request(10, request_class="interactive")).weight,
        classes.of(make_request(10)).weight,
        classes.of(make_request(3)).weight,
        classes.of(make_request(3, request_class=["no", "name"])).weight,
    ]
    assert weights == [4.0, 0.5, 2.0, 2.0]


def test_without_a_default_the_rest_weigh_one():
    classes = read({"batch": {"weight": 0.5, "priority": 10}})
    assert classes.of(make_request()).weight == 1.0
    assert classes.of(make_request()).latency_target_ms is None


def test_weights_and_targets_are_left_out_where_they_make_no_difference():
    plain = [make_request(), make_request()]
    assert read({}).weigh(plain) is None
    assert read({}).tightest_target_ms(plain) is None
    assert read(CLASSES).weigh(plain) is None
    assert read(CLASSES).targets_ms(plain) is None
    assert read(CLASSES).tightest_target_ms([]) is None


def test_requests_of_different_classes_are_told_apart():
    requests = [make_request(-1), make_request(), make_request(10)]
    classes = read(CLASSES)
    np.testing.assert_array_equal(classes.weigh(requests), [4.0, 2.0, 0.5])
    np.testing.assert_array_equal(classes.targets_ms(requests), [30.0, np.inf, np.inf])
    assert classes.tightest_target_ms(requests) == 30.0


def test_a_class_is_looked_up_once_and_forgotten_with_its_request():
    classes, request = read(CLASSES), make_request(10)
    assert classes.of(request).weight == 0.5
    request.priority = -1
    assert classes.of(request).weight == 0.5
    classes.forget(request.request_id)
    classes.forget("was never asked about")
    assert classes.of(request).weight == 4.0


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"a": {"wieght": 1}}, r"class 'a' has no wieght; it may hold weight, "),
        ({"a": {"weight": 0}}, r"class 'a': weight must be > 0, got 0"),
        ({"a": {"latency_target_ms": -5}}, r"latency_target_ms must be > 0, got -5"),
        (
            {"a": {"priority": 1}, "b": {"priority": 1}},
            r"class 'b': priority 1 belongs to another class",
        ),
    ],
)
def test_classes_that_make_no_sense_are_refused(classes, message):
    with pytest.raises(ValueError, match=message):
        read(classes)


@pytest.mark.vllm
@pytest.mark.slow
def test_classes_reach_the_planner_by_name_and_by_priority(tiny_pair):
    from vllm import SamplingParams

    with run_engine(
        *tiny_pair, policy="goodput", classes=CLASSES, scheduling_policy="priority"
    ) as engine:
        batches, targets = [], []
        planner = engine.scheduler._planner
        select, choose_depth = planner.select, planner.choose_depth

        class Spy:
            """The planner, overheard."""

            def __getattr__(self, name):
                return getattr(planner, name)

            def select(self, batch):
                batches.append(batch)
                return select(batch)

            def choose_depth(self, num_reqs, target_ms):
                targets.append(target_ms)
                return choose_depth(num_reqs, target_ms)

        engine.scheduler._planner = Spy()
        params = [
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more)
            for more in ({}, {"extra_args": {"request_class": "interactive"}}, {})
        ]
        engine.llm.generate(
            [{"prompt_token_ids": draw_prompt(i, 8)} for i in range(3)],
            params,
            priority=[0, 0, 10],
            use_tqdm=False,
        )
        assert engine.scheduler.counters.num_fallbacks == {}
    weights = {tuple(b.weights) for b in batches if b.num_reqs == 3}
    assert {tuple(sorted(one)) for one in weights} == {(0.5, 2.0, 4.0)}
    bound = [b for b in batches if b.latency_targets_ms is not None]
    assert {float(b.latency_targets_ms.min()) for b in bound} == {30.0}
    assert 30.0 in targets


@pytest.mark.vllm
@pytest.mark.slow
def test_weights_and_latency_targets_leave_the_output_alone(tiny_pair):
    prompts = draw_prompts(24)
    params = [
        greedy(
            16 + 2 * n,
            extra_args={"request_class": ("interactive", "batch", "default")[n % 3]},
        )
        for n in range(len(prompts))
    ]
    with run_engine(tiny_pair[0]) as plain:
        expected = [o.outputs[0].token_ids for o in complete(plain, prompts, params)]
    with run_engine(
        *tiny_pair, policy="goodput", draft_tokens=4, classes=CLASSES
    ) as engine:
        # A step takes 60 ms and more: within 30 ms a token only with its own drafts.
        make_up_costs(engine)
        planner = engine.scheduler._planner
        loads, select_batches = [], []

        class Spy:
            """The planner, overheard."""

            def __getattr__(self, name):
                return getattr(planner, name)

            def plan_batch(self, load):
                loads.append(load)
                return planner.plan_batch(load)

            def select(self, batch):
                select_batches.append(batch)
                return planner.select(batch)

        engine.scheduler._planner = Spy()
        outputs = [o.outputs[0].token_ids for o in complete(engine, prompts, params)]
        counters = engine.scheduler.counters
        assert counters.num_fallbacks == {}
        assert 0 < counters.num_accepted_tokens < counters.num_verified_tokens
    assert outputs == expected
    assert any(batch.weights is not None for batch in select_batches)
    assert any(batch.latency_targets_ms is not None for batch in select_batches)
    # Per step, in which a request gets more than a token.
    targets_ms = {load.latency_target_ms for load in loads} - {None}
    assert min(targets_ms) >= 30.0
    assert max(targets_ms) > 31.0
