"""Requests that wait too long become as urgent as any, and few at a time."""

from types import SimpleNamespace

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

    more = {"arrival_time": arrival_time, "priority": priority}
    return Request(name, [1], greedy(1), None, **more)


class Waiting:
    """Ageing, with what it looks at of a scheduler, vLLM's own queue, and a clock."""

    def __init__(self, waiting, running=()):
        from vllm.v1.core.sched import request_queue

        priority = request_queue.SchedulingPolicy.PRIORITY
        self.queue = request_queue.create_request_queue(priority)
        for request in waiting:
            self.queue.add_request(request)
        self.requests = {one.request_id: one for one in [*waiting, *running]}
        scheduler = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="priority", max_num_seqs=8),
            waiting=self.queue,
            running=list(running),
            requests=self.requests,
        )
        self.counters = SpeculationCounters("goodput", "draft_model", 4)
        self.classes = RequestClasses.from_section({"classes": CLASSES})
        self.now_s = 0.0
        judges = self.classes, self.counters, lambda: self.now_s
        self._ageing = Ageing(scheduler, *judges)

    def look_at(self, *seconds):
        """Look at these times; return who waits then, in order."""
        for now_s in seconds:
            self.now_s = now_s
            self._ageing.look()
        return [request.request_id for request in self.queue]


@pytest.fixture
def bulk():
    return make_request("bulk", 10, arrival_time=1.0)


@pytest.fixture
def chat():
    return make_request("chat", -1, arrival_time=2.0)


def test_a_request_that_waited_too_long_is_next(bulk, chat):
    chats = [make_request(f"chat{n}", -1, arrival_time=3.0 + n) for n in range(2)]
    # Those that run count as urgent too.
    for requests in ([bulk, *chats], [bulk]):
        bulk.priority = 10
        waiting = Waiting(requests, [chat])
        assert waiting.look_at(0, MAX_WAIT_S - 0.1)[-1] == "bulk"
        assert bulk.priority == 10
        assert waiting.look_at(MAX_WAIT_S + 1)[0] == "bulk"
        assert bulk.priority == -1
        assert waiting.counters.snapshot()["num_aged_requests"] == 1
        # The class that a request of this priority would have is another.
        assert waiting.classes.of(bulk).weight == 0.5
    # Raised again when more urgent ones come.
    waiting.queue.add_request(make_request("alarm", -5, arrival_time=3))
    assert waiting.look_at(MAX_WAIT_S + 2)[0] == "bulk"
    assert bulk.priority == -5
    assert waiting.counters.num_aged_requests == 1


def test_a_fault_on_the_way_leaves_everybody_in_the_queue(bulk, chat, monkeypatch):
    waiting = Waiting([bulk, make_request("bulk1", 10)], [chat])
    waiting.look_at(0)
    of = RequestClasses.of

    def fail_at_the_second(classes, request):
        if request.request_id == "bulk1":
            raise RuntimeError("a bug")
        return of(classes, request)

    monkeypatch.setattr(RequestClasses, "of", fail_at_the_second)
    with pytest.raises(RuntimeError, match="a bug"):
        waiting.look_at(MAX_WAIT_S)
    assert sorted(one.request_id for one in waiting.queue) == ["bulk", "bulk1"]


def test_a_backlog_is_let_past_a_few_at_a_time_in_the_order_of_arrival():
    bulk = [make_request(f"bulk{n}", 10, arrival_time=n) for n in range(5)]
    waiting = Waiting([*bulk[::-1], make_request("chat", -1, arrival_time=9)])
    order = waiting.look_at(0, MAX_WAIT_S, MAX_WAIT_S + 1)
    assert order == ["bulk0", "bulk1", "chat", "bulk2", "bulk3", "bulk4"]
    # One begins, which changes nothing; when it has ended, the next may pass.
    waiting.queue.pop_request()
    assert waiting.look_at(MAX_WAIT_S + 2) == order[1:]
    del waiting.requests["bulk0"]
    order = waiting.look_at(MAX_WAIT_S + 3)
    assert order == ["bulk1", "bulk2", "chat", "bulk3", "bulk4"]
    assert waiting.counters.num_aged_requests == 3


def test_the_wait_of_a_preempted_request_begins_anew(bulk, chat):
    waiting = Waiting([bulk], [chat])
    waiting.look_at(0)
    waiting.queue.remove_request(bulk)
    waiting.look_at(5)
    waiting.queue.prepend_request(bulk)
    waiting.look_at(20, MAX_WAIT_S + 1)
    assert bulk.priority == 10
    waiting.look_at(MAX_WAIT_S + 20)
    assert bulk.priority == -1
    assert waiting.counters.num_aged_requests == 1
