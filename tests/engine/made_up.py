"""Fake prices and planners: on models as small as a test's, drafting never pays."""

from policies.estimators.feedback import DraftFeedback
from policies.types import CostProfile


class _Instead:
    """A planner some of whose methods are others; a planner is asked for the rest."""

    def __init__(self, planner, methods):
        self._planner = planner
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self._planner, name)


def plan_instead(scheduler, **methods):
    """Let other functions be called in the place of methods of the planner."""
    scheduler._planner = _Instead(scheduler._planner, methods)


def draft_at(engine, depths):
    """Draft as deep as an iterator says; return what planners hear of each step."""
    timings, choose = [], lambda *_: next(depths)
    plan_instead(engine.scheduler, choose_depth=choose, observe_timing=timings.append)
    return timings


class DeafFeedback(DraftFeedback):
    """Hears no outcome, so that the calibration stays at its prior."""

    def flush(self, calibration):
        """Learn nothing."""


def make_up_costs(engine, draft_ms=(0.4, 4.0), target_ms=(60.3, 140.0)):
    """Let a planner believe in a target slow enough for drafts to pay.

    Everything but the prices is real: what a pass of drafter and target takes for 1 and
    for 256 tokens.
    """
    scheduler = engine.scheduler
    cost = scheduler._planner.cost
    cost.fit_profile(CostProfile((1, 256), target_ms, draft_ms))
    # Neither the start-up profile nor measured steps change them any more.
    cost.import_state(cost.export_state())
    if hasattr(scheduler, "_orders"):  # The GPU's.
        scheduler._orders.loads.match = lambda _times: None
    else:
        scheduler._learn_timing = lambda _now_s: None


def make_up_beliefs(engine, draft_ms=(0.4, 4.0)):
    """Keep a planner's prices, and its belief in the drafter, where they started.

    A draft equal to the target is never rejected; once that is learnt, whatever is
    drafted is verified, and there is no selection to test.
    """
    make_up_costs(engine, draft_ms)
    planner = engine.scheduler._planner
    planner.acceptance.feedback = DeafFeedback(planner.depth.max_depth)
