"""Which requests would come too late to be worth beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from policies.decisions.fairness import request_cost_ms

if TYPE_CHECKING:
    from policies.decisions.routing import ReplicaLoad

WAIT_MARGIN: Final = 4.0
"""How often a predicted wait counts against a deadline.

With 1, half of what is let in at twice the capacity comes late. A margin on the whole
time refuses everybody whose deadline is a few times what an answer takes
(`python -m loadtest.simulate.show crowd`).
"""


class Prediction(NamedTuple):
    """How long a request takes from now to its last token.

    Attributes:
        wait_ms: Until it runs.
        run_ms: From then on.
    """

    wait_ms: float
    run_ms: float

    def late_ms(self, deadline_ms: float) -> float:
        """Return in how many milliseconds it could come and be in time; 0 is now.

        The wait counts `WAIT_MARGIN` times, for it is what errs: in a queue that
        lasts as long as deadlines allow, a small error decides about everybody.
        """
        wait_ms = (deadline_ms - self.run_ms) / WAIT_MARGIN
        return max(0.0, self.wait_ms - wait_ms)


def predict_finish(
    load: ReplicaLoad,
    num_replicas: float,
    work_ahead_ms: float,
    num_prompt_tokens: int,
    num_reply_tokens: float,
    *,
    has_seat: bool,
) -> Prediction:
    """Predict how long a request takes from now to its last token.

    Replicas that are full take what waits as fast as they do its work, one request at a
    time; then it runs beside as many others as now.

    Args:
        load: Of a replica, the mean of all.
        num_replicas: That serve this queue, or the part of them that does; > 0.
        work_ahead_ms: `FairQueue.work_ahead_ms`, of one replica's time.
        num_prompt_tokens: To be computed.
        num_reply_tokens: Expected.
        has_seat: Whether a replica could take it now, and all that waits before it.

    Source: Little's law in a replica whose seats are taken.
    """
    wait_ms = 0.0
    if not has_seat:
        next_ms = request_cost_ms(load, 0, num_reply_tokens)
        wait_ms = (work_ahead_ms + next_ms) / num_replicas
    prompt_ms = load.prompt_token_ms * (load.num_prompt_tokens + num_prompt_tokens)
    # A full replica takes it in the place of another.
    step_ms = load.step_ms(load.num_requests + has_seat)
    run_ms = prompt_ms + num_reply_tokens / load.tokens_per_step * step_ms
    return Prediction(wait_ms, run_ms)
