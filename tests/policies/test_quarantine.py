"""When a drafter is tried again, and about whom a quarantine is."""

from itertools import pairwise

import numpy as np
import pytest

from policies.decisions.quarantine import FIRST_WAIT, MAX_WAIT, Quarantine, Quarantines
from policies.estimators.acceptance_watch import AcceptanceWatch, Cell, Collapse

pytestmark = pytest.mark.faults

CAUSE = Collapse(
    Cell(bucket=4, class_index=1, position=0), 20, 0, 14.0, from_context=530, since=1000
)
"""None of 20 drafts was accepted, where 14 were expected."""


def make_quarantine(class_index=1, from_context=512, position=0):
    return Quarantine("context", class_index, from_context, position, CAUSE)


def run_rounds(quarantine, num_steps, *, is_accepted):
    """Try a draft whenever one is due; return at which steps, until it recovers."""
    tried = []
    for step in range(1, num_steps + 1):
        quarantine.note_step()
        if quarantine.verifies:
            tried.append(step)
            if quarantine.judge(is_accepted=is_accepted(step), expected=0.7):
                break
    return tried


def test_tries_become_rarer_up_to_a_limit():
    one = make_quarantine()
    tried = run_rounds(one, 600, is_accepted=lambda _: False)
    waits = [later - step - 1 for step, later in pairwise(tried) if later - step > 1]
    assert tried[0] == FIRST_WAIT + 1
    assert waits == sorted(waits)
    assert waits[-1] == MAX_WAIT
    # What it costs: steps that verify one draft.
    assert len(tried) / 600 < 0.2


@pytest.mark.parametrize("end", range(100, 160, 3))
def test_a_drafter_that_works_again_is_taken_back_within_fifty_steps(end):
    one = make_quarantine()
    assert run_rounds(one, 400, is_accepted=lambda step: step > end)[-1] <= end + 50


@pytest.mark.parametrize("usual", [0.4, 0.7])
@pytest.mark.parametrize("num_reqs", [1, 4])
def test_nor_does_it_take_longer_where_some_drafts_are_rejected(num_reqs, usual):
    """One in fifty may: whose first tries are rejected by chance."""
    rng = np.random.default_rng(0)
    num_late = 0
    for end in rng.integers(100, 200, size=400).tolist():
        one, is_back = make_quarantine(), False
        for step in range(end + 50):
            one.note_step()
            tries = num_reqs if one.verifies else 0
            for _ in range(tries):
                luck = step > end and rng.random() < usual
                is_back = is_back or one.judge(is_accepted=luck, expected=usual)
            if is_back:
                break
        num_late += not is_back
    assert num_late / 400 <= 0.02


def test_rounds_become_rarer_too_where_few_drafts_are_usual():
    """Of one request alone, 24 rejected drafts are no surprise then."""
    one = make_quarantine()
    num_tried = 0
    for _ in range(600):
        one.note_step()
        if one.verifies:
            num_tried += 1
            assert not one.judge(is_accepted=False, expected=0.15)
    assert one.wait == MAX_WAIT
    assert num_tried < 0.5 * 600


def test_a_round_without_anybody_to_try_ends_and_costs_no_patience():
    one = make_quarantine()
    for _ in range(200):
        one.note_step()
    assert one.num_rounds == 0
    assert one.wait == FIRST_WAIT


@pytest.mark.parametrize(("longest_good", "reason"), [(520, "context"), (540, "all")])
def test_one_that_outgrows_a_limit_is_told_from_one_that_breaks(longest_good, reason):
    """Nothing else was judged since; the alarm is about 530 tokens and more."""
    watch = AcceptanceWatch()
    watch.last_good[CAUSE.cell] = CAUSE.since - 10
    watch.longest_good[CAUSE.cell] = longest_good
    assert Quarantines().add(CAUSE, watch, 1010).reason == reason


def test_the_strictest_quarantine_of_a_request_counts():
    deep, shallow = make_quarantine(None, 0, 2), make_quarantine(1, 512, 0)
    quarantines = Quarantines([deep, shallow])
    assert quarantines.find(1, 600) is shallow
    assert quarantines.find(1, 100) is deep
    assert quarantines.find(0, 600) is deep
    assert Quarantines([shallow]).find(0, 600) is None
    assert not deep.contains(shallow)
    assert make_quarantine(None, 0, 0).contains(shallow)


SHORTER, OTHER_CLASS, LONGER_OF_OTHER_CLASS = (2, 1, 0), (2, 0, 0), (5, 0, 0)


@pytest.mark.parametrize(
    ("good", "bad", "found"),
    [
        ([], [], ("all", None, 0)),
        ([SHORTER], [], ("context", None, 530)),
        ([], [SHORTER], ("all", None, 0)),
        ([OTHER_CLASS], [], ("class", 1, 0)),
        ([SHORTER, LONGER_OF_OTHER_CLASS], [], ("context", 1, 530)),
        ([SHORTER, OTHER_CLASS], [], ("context", None, 530)),
    ],
)
def test_a_quarantine_is_as_narrow_as_what_is_known_allows(good, bad, found):
    """By drafts judged since the alarm began, accepted or not."""
    watch = AcceptanceWatch()
    watch.suspicion[CAUSE.cell] = 25.0
    for cell in (*good, *bad):
        watch.last_seen[cell] = 1001
        watch.last_good[cell] = 1001 if cell in good else 900
    one = Quarantines().add(CAUSE, watch, 1010)
    assert (one.reason, one.class_index, one.from_context) == found
    assert watch.suspicion[CAUSE.cell] == 0.0
