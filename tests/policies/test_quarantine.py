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


@pytest.mark.parametrize(("usual", "most"), [(0.7, 0.2), (0.15, 0.5)])
def test_tries_become_rarer_up_to_a_limit(usual, most):
    """Where few drafts are usual, 24 rejected ones of a request are no surprise."""
    one, tried = make_quarantine(), []
    for step in range(600):
        one.note_step()
        if one.verifies:
            tried.append(step)
            assert not one.judge(is_accepted=False, expected=usual)
    waits = [later - step - 1 for step, later in pairwise(tried) if later - step > 1]
    assert tried[0] == FIRST_WAIT
    assert waits == sorted(waits)
    assert one.wait == MAX_WAIT
    # What it costs: steps that verify one draft.
    assert len(tried) < most * 600


@pytest.mark.parametrize("usual", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("num_reqs", [1, 4])
def test_a_drafter_that_works_again_is_taken_back_within_fifty_steps(num_reqs, usual):
    """But for one in fifty, whose first tries are rejected by chance."""
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
