"""The watchdog beside a real planner and a real scheduler, with a made-up worker."""

import logging

import pytest

from serving.engine.cpu.step_messages import STOP_ATTRIBUTE
from tests.engine.made_up import plan_instead

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.faults,
    pytest.mark.usefixtures("no_host_time"),
]

NUM_REQS, DEPTH = 4, 8


class Run:
    """Steps of a scheduler whose requests are replaced as they end."""

    def __init__(self, pair, **section):
        from tests.engine.stand_in_worker import StandInWorker, make_cpu_scheduler

        section = {"num_reqs": NUM_REQS, "depth": DEPTH, "policy": "goodput", **section}
        self.scheduler = make_cpu_scheduler(pair, **section)
        self.counters = self.scheduler.counters
        self.worker, self.learnt, self._number = StandInWorker(), [], 0
        self.num_drafts, self.lengths = {}, {"prompt_len": 10, "max_tokens": 200}
        self._observe = self.scheduler._planner.observe
        plan_instead(self.scheduler, observe=self._learn)

    def _learn(self, outcome):
        self.learnt.append(outcome.req_ids)
        self._observe(outcome)

    def step(self):
        """Take a step; return the depths drafted to, and how many were verified."""
        from tests.engine.stand_in_worker import add_requests

        for name in ("chat", "bulk"):
            there = sum(one.startswith(name) for one in self.scheduler.requests)
            self._number += 1
            own = {"prefix": f"{name}{self._number}-", **self.lengths}
            own["extra_args"] = {"request_class": name}
            add_requests(self.scheduler, NUM_REQS // 2 - there, **own)
        output = self.worker.step(self.scheduler)
        scheduled = output.scheduled_spec_decode_tokens
        self.num_drafts = {name: len(drafts) for name, drafts in scheduled.items()}
        return output.num_spec_tokens_to_schedule, sum(self.num_drafts.values())


def test_goodput_drafts_as_before_within_fifty_steps_of_the_end(tiny_pair):
    run = Run(tiny_pair)
    steps = [run.step() for _ in range(200)]
    usual = sum(verified for _, verified in steps[-50:]) / 50
    assert usual > NUM_REQS
    run.worker.is_broken = lambda req_id: True
    steps = [run.step() for _ in range(100)]
    assert run.counters.num_quarantines.total() == 1
    late = steps[40:]
    # Nothing is drafted but what is tried, and that teaches the planner nothing.
    assert sum(verified for _, verified in late) <= 2 * 4 * NUM_REQS
    assert sum(depth == 0 for depth, _ in late) > 0.8 * len(late)
    assert not any(run.learnt[-60:])
    run.worker.is_broken = lambda req_id: False
    for _ in range(50):
        run.step()
    steps = [run.step() for _ in range(50)]
    assert sum(verified for _, verified in steps) / 50 > 0.7 * usual
    assert not run.counters.num_fallbacks
    assert not run.scheduler._watchdog.is_active


def test_a_class_that_collapses_alone_is_told_and_left_alone(tiny_pair, caplog):
    """The others draft on, and planners learn of them alone."""
    classes = {"chat": {"weight": 2.0}, "bulk": {}}
    run = Run(tiny_pair, policy="fixed", classes=classes)
    # All contexts are of one bucket: they tell nobody apart.
    run.lengths = {"prompt_len": 130, "max_tokens": 100}
    for _ in range(200):
        run.step()
    run.worker.is_broken = lambda req_id: req_id.startswith("chat")
    drafting = []
    with caplog.at_level(logging.WARNING, logger="serving.engine.shared.watchdog"):
        for _ in range(100):
            run.step()
            drafting += run.num_drafts
    assert run.counters.num_quarantines == {"class": 1}
    assert any("of class chat" in line for line in caplog.messages)
    assert run.counters.num_cut_tokens["quarantine"] > 0
    num_chat = sum(name.startswith("chat") for name in drafting)
    assert num_chat < 0.4 * 100 * NUM_REQS // 2
    # Who has just come has no drafts yet.
    assert len(drafting) - num_chat > 0.9 * 100 * NUM_REQS // 2
    learnt = {name[:4] for names in run.learnt[-50:] for name in names}
    assert learnt == {"bulk"}


def test_a_try_of_the_first_draft_makes_nobody_else_draft_to_the_end(tiny_pair):
    run = Run(tiny_pair, classes={"chat": {}, "bulk": {}})
    run.lengths = {"prompt_len": 130, "max_tokens": 100}
    for _ in range(200):
        run.step()
    run.worker.is_broken = lambda req_id: req_id.startswith("chat")
    execute, rules = run.worker.execute, []

    def look(output):
        if run.scheduler._watchdog.probes and output.num_spec_tokens_to_schedule > 1:
            rules.append(getattr(output, STOP_ATTRIBUTE, None))
        return execute(output)

    run.worker.execute = look
    for _ in range(200):
        run.step()
    assert len(rules) > 5
    assert rules.count(None) < 0.2 * len(rules)


def test_without_an_alarm_nothing_is_decided_otherwise(tiny_pair):
    """The same steps, in the same order, as without a watchdog."""
    runs = Run(tiny_pair), Run(tiny_pair, watchdog=False)
    assert runs[1].scheduler._watchdog is None
    steps = [[run.step() for _ in range(120)] for run in runs]
    assert steps[0] == steps[1]
    assert sum(verified for _, verified in steps[0]) > 0
    watched, unwatched = (run.counters.snapshot() for run in runs)
    for counters in (watched, unwatched):
        for name in ("planning_seconds_total", "selection_seconds_total"):
            del counters[name]
    assert watched == unwatched


def test_a_client_that_hangs_up_during_a_step_is_no_fault(tiny_pair):
    """So few run that the watchdog looks at every step."""
    from vllm.v1.request import RequestStatus

    run, heard = Run(tiny_pair, policy="fixed"), []
    plan_instead(run.scheduler, observe=heard.append)
    scheduler, worker = run.scheduler, run.worker
    for number in range(10):
        run.step()
        output = scheduler.schedule()
        sampled, drafts = worker.execute(output)
        # In the end all of them at once.
        num_gone = 1 if number < 9 else NUM_REQS
        drafting = list(output.scheduled_spec_decode_tokens)
        gone, others = drafting[:num_gone], drafting[num_gone:]
        scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        scheduler.update_from_output(output, sampled)
        scheduler.update_draft_token_ids(drafts)
        assert not run.counters.num_fallbacks
        assert heard[-1].req_ids == tuple(others)


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_nothing_is_drafted_where_nobody_may_use_it(tiny_pair, policy):
    """Audits would take it for speculation that fails, and hold it back from all."""
    from tests.engine.stand_in_worker import StandInWorker, add_requests

    scheduler = Run(tiny_pair, policy=policy).scheduler
    off = {"extra_args": {"speculative_decoding": "off"}}
    add_requests(scheduler, 2, prefix="opted_out", **off)
    # What the prompt brings is all of its answer, or all but the last token.
    add_requests(scheduler, 1, prefix="one", max_tokens=1)
    add_requests(scheduler, 1, prefix="two", max_tokens=2)
    worker = StandInWorker()
    for _ in range(3):
        assert worker.step(scheduler).num_spec_tokens_to_schedule == 0
    # Stop tokens are barred from its first block, so that it is drafted for later.
    add_requests(scheduler, 1, prefix="short", min_tokens=1)
    assert worker.step(scheduler).num_spec_tokens_to_schedule > 0


def test_no_try_is_made_of_who_cannot_have_drafts(tiny_pair):
    """Who opted out, is at the end, or has not had its whole prompt yet."""
    from tests.engine.stand_in_worker import StandInWorker, add_requests

    scheduler = Run(tiny_pair, policy="fixed").scheduler
    (long,) = add_requests(scheduler, 1, prefix="long")
    (ending,) = add_requests(scheduler, 1, prefix="ending", max_tokens=3)
    off = {"extra_args": {"speculative_decoding": "off"}}
    (opted_out,) = add_requests(scheduler, 1, prefix="opted_out", **off)
    StandInWorker().step(scheduler)
    can_draft = scheduler._drafts.rooms.can_draft
    assert can_draft(long, 0)
    assert can_draft(long, DEPTH - 1)
    # Of two tokens that are left the target itself brings one.
    assert can_draft(ending, 0)
    assert not can_draft(ending, 1)
    assert not can_draft(opted_out, 0)
    long.is_prefill_chunk = True
    assert not can_draft(long, 0)
