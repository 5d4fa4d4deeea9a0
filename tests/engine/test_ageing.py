"""Requests that wait too long become as urgent as any, and few at a time."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from serving.engine.shared.ageing import MAX_WAIT_S, Ageing
from serving.engine.shared.counters import SpeculationCounters
from serving.engine.shared.request_classes import RequestClasses
from tests.engine.checks import greedy

CLASSES = {
    "chat": {"weight": 4.0, "priority": -1},
    "bulk": {"weight": 0.5, "priority": 10},
}


def make_request(name, priority, arrival_time=0.0):
    from vllm.v1.request import Request

    return Request(
        name, [1], greedy(1), None, arrival_time=arrival_time, priority=priority
    )


def make_scheduler(waiting, running):
    """Make what ageing looks at of a scheduler, with vLLM's own queue."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for request in waiting:
        queue.add_request(request)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(policy="priority", max_num_seqs=8),
        waiting=queue,
        running=running,
        requests={one.request_id: one for one in waiting + running},
    )


def make_ageing(scheduler):
    """Make it with a clock that reads what `look_at` says."""
    clock, counters = Mock(), SpeculationCounters("goodput", "draft_model", 4)
    classes = RequestClasses.from_section({"classes": CLASSES})
    return Ageing(scheduler, classes, counters, clock), clock, counters


def look_at(ageing, clock, *seconds):
    for now_s in seconds:
        clock.return_value = now_s
        ageing.look()


def names(scheduler):
    return [request.request_id for request in scheduler.waiting]


@pytest.fixture
def bulk():
    return make_request("bulk", 10, arrival_time=1.0)


@pytest.fixture
def chat():
    return make_request("chat", -1, arrival_time=2.0)


def test_a_request_that_waited_too_long_is_next(bulk, chat):
    chats = [make_request(f"chat{n}", -1, arrival_time=3.0 + n) for n in range(2)]
    # Those that run count as urgent too.
    for waiting in ([bulk, *chats], [bulk]):
        bulk.priority = 10
        scheduler = make_scheduler(waiting, [chat])
        ageing, clock, counters = make_ageing(scheduler)
        look_at(ageing, clock, 0, MAX_WAIT_S - 0.1)
        assert bulk.priority == 10
        assert names(scheduler)[-1] == "bulk"
        look_at(ageing, clock, MAX_WAIT_S + 1)
        assert names(scheduler)[0] == "bulk"
        assert bulk.priority == -1
        assert counters.snapshot()["num_aged_requests"] == 1
        # The class that a request of this priority would have is another.
        assert ageing._classes.of(bulk).weight == 0.5
    # Raised again when more urgent ones come.
    scheduler.waiting.add_request(make_request("alarm", -5, arrival_time=3))
    look_at(ageing, clock, MAX_WAIT_S + 2)
    assert names(scheduler)[0] == "bulk"
    assert bulk.priority == -5
    assert counters.num_aged_requests == 1


def test_a_fault_on_the_way_leaves_everybody_in_the_queue(bulk, chat, monkeypatch):
    scheduler = make_scheduler([bulk, make_request("bulk1", 10)], [chat])
    ageing, clock, _ = make_ageing(scheduler)
    look_at(ageing, clock, 0)
    of = RequestClasses.of

    def fail_at_the_second(classes, request):
        if request.request_id == "bulk1":
            raise RuntimeError("a bug")
        return of(classes, request)

    monkeypatch.setattr(RequestClasses, "of", fail_at_the_second)
    with pytest.raises(RuntimeError, match="a bug"):
        look_at(ageing, clock, MAX_WAIT_S)
    assert sorted(names(scheduler)) == ["bulk", "bulk1"]


def test_a_backlog_is_let_past_a_few_at_a_time_in_the_order_of_arrival():
    bulk = [make_request(f"bulk{n}", 10, arrival_time=n) for n in range(5)]
    chat = make_request("chat", -1, arrival_time=9)
    scheduler = make_scheduler([*bulk[::-1], chat], [])
    ageing, clock, counters = make_ageing(scheduler)
    look_at(ageing, clock, 0, MAX_WAIT_S, MAX_WAIT_S + 1)
    assert names(scheduler) == ["bulk0", "bulk1", "chat", "bulk2", "bulk3", "bulk4"]
    # One begins, which changes nothing; when it has ended, the next may pass.
    scheduler.waiting.pop_request()
    look_at(ageing, clock, MAX_WAIT_S + 2)
    assert names(scheduler) == ["bulk1", "chat", "bulk2", "bulk3", "bulk4"]
    del scheduler.requests["bulk0"]
    look_at(ageing, clock, MAX_WAIT_S + 3)
    assert names(scheduler) == ["bulk1", "bulk2", "chat", "bulk3", "bulk4"]
    assert counters.num_aged_requests == 3


def test_the_wait_of_a_preempted_request_begins_anew(bulk, chat):
    scheduler = make_scheduler([bulk], [chat])
    ageing, clock, counters = make_ageing(scheduler)
    look_at(ageing, clock, 0)
    scheduler.waiting.remove_request(bulk)
    look_at(ageing, clock, 5)
    scheduler.waiting.prepend_request(bulk)
    look_at(ageing, clock, 20, MAX_WAIT_S + 1)
    assert bulk.priority == 10
    look_at(ageing, clock, MAX_WAIT_S + 20)
    assert bulk.priority == -1
    assert counters.num_aged_requests == 1
