"""Made-up requests whose drafts are accepted by chance, under a real watchdog."""

from types import SimpleNamespace

import numpy as np

from serving.engine.shared.counters import SpeculationCounters
from serving.engine.shared.request_classes import RequestClasses
from serving.engine.shared.watchdog import Drafts, SpeculationWatchdog

DEPTH = 4

CLASSES = {"classes": {"interactive": {"priority": 0}, "batch": {"priority": 1}}}


class MadeUpTraffic:
    """A batch that is always full.

    Drafts have confidences as drafters have them, high and low; requests are harder or
    easier than the confidences say. Each is accepted as that is likely, unless
    `collapsed` says that the drafter is broken for a request: then one in fifty is.

    Args:
        num_reqs: Requests that run.
        seed: Of all that is drawn.
        reply: Tokens of a reply, on average.
        reports_confidence: As draft models do.
    """

    def __init__(self, num_reqs, seed, *, reply=300, reports_confidence=True):
        self.rng = np.random.default_rng(seed)
        self.counters = SpeculationCounters("made up", "made up", DEPTH)
        classes = RequestClasses.from_section(CLASSES)
        self.watchdog = SpeculationWatchdog(classes, self.counters)
        self.step = self.num_requests = 0
        self.hardness = 0.0
        self.collapsed = lambda request: False
        self.learns = []
        self.recovered, self.rebuilt = set(), set()
        self._reply, self._reports_confidence = reply, reports_confidence
        self.running = [self._arrive() for _ in range(num_reqs)]

    @property
    def num_drafting(self):
        """Requests that had drafts verified in the latest step."""
        return sum(one.num_verified > 0 for one in self.running)

    def _arrive(self):
        self.num_requests += 1
        return SimpleNamespace(
            request_id=f"r{self.num_requests}",
            priority=int(self.rng.integers(2)),
            sampling_params=None,
            num_tokens=int(self.rng.integers(10, 900)),
            num_left=1 + self.rng.geometric(1 / self._reply),
            # What it is harder or easier, in log-odds.
            effect=self.rng.normal(0.0, 0.5),
            topic=self.rng.normal(1.0, 1.0),
            spec_token_ids=[],
            num_verified=0,
            num_new=0,
        )

    def run(self, num_steps):
        """Take some steps."""
        for _ in range(num_steps):
            self._take_step()

    def _take_step(self):
        self.step += 1
        watchdog, running, rng = self.watchdog, self.running, self.rng
        self.recovered |= set(watchdog.take_recovered())
        self.rebuilt |= set(watchdog.take_rebuilds())
        watchdog.begin_step(running)
        log_odds = np.array([one.topic for one in running])[:, None] - self.hardness
        log_odds = log_odds + rng.normal(0.0, 1.2, (len(running), DEPTH))
        confidence = 1 / (1 + np.exp(-log_odds))
        effect = np.array([one.effect for one in running])[:, None]
        acceptance = 1 / (1 + np.exp(0.3 - 0.8 * log_odds - effect))
        acceptance[[self.collapsed(one) for one in running]] = 0.02
        is_accepted = rng.random(acceptance.shape) < acceptance
        for row, one in enumerate(running):
            one.num_verified = len(one.spec_token_ids)
            own = is_accepted[row, : one.num_verified]
            one.num_new = 1 + int(own.cumprod().sum())
        row_of = {one.request_id: row for row, one in enumerate(running)}
        drafting = [one for one in running if one.num_verified]
        if drafting:

            def locate(some):
                if self._reports_confidence:
                    return Drafts(confidence, [row_of[req_id] for req_id in some])
                return Drafts.without_confidence(len(some), is_due=False)

            requests = {one.request_id: one for one in running}
            req_ids = [one.request_id for one in drafting]
            verified = [one.num_verified for one in drafting]
            accepted = [one.num_new - 1 for one in drafting]
            learns = watchdog.observe(requests, req_ids, verified, accepted, locate)
            learns = [True] * len(drafting) if learns is None else learns
            self.learns = list(zip(req_ids, learns, strict=True))
        for row, one in enumerate(running):
            one.num_tokens += one.num_new
            one.num_left -= one.num_new
            if one.num_left <= 0:
                watchdog.forget(one.request_id)
                running[row] = self._arrive()
        depth = DEPTH
        if watchdog.is_active:
            depth = watchdog.limit_depth(DEPTH, running)
        for one in running:
            one.spec_token_ids = [0] * depth
