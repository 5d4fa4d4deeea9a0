"""One line of the front's log for each request that has ended; no text of anybody's.

What is told stands in it as JSON, and in Serve's JSON encoding as an object `request`
too, beside the `request_id` that Serve puts into every line.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from serving.front.admission import OF_KEY

if TYPE_CHECKING:
    from serving.front.in_flight import InFlight

logger = logging.getLogger("ray.serve")

LEFT: Final = "left"
"""The client is gone, or a stop string came, which only fronts look for."""


def log_end(one: InFlight, end: str, drafts: Any = None) -> None:
    """Write the line.

    Args:
        one: The request, still with the replica that had it last.
        end: vLLM's reason, `LEFT`, or `error` and the status.
        drafts: vLLM's figures of its last engine; None where there are none.
    """
    now_s = time.monotonic()
    flow, caller = one.standing.turn.flow, one.standing.caller
    told: dict[str, Any] = {
        "end": end,
        "prompt_tokens": len(one.request.prompt_token_ids or ()),
        "output_tokens": len(one.emitted),
        "first_token_s": None if one.first_s is None else _since(one, one.first_s),
        "total_s": _since(one, now_s),
        "replica": None if one.link is None else one.link.offer.replica,
        "replays": one.moves.num_replays,
        "class": flow.partition(OF_KEY)[0],
        "key": None if caller is None else caller.name,
    }
    if drafts is not None:
        accepted = sum(count * times for count, times in enumerate(drafts.histogram))
        told |= {"drafted_tokens": drafts.num_draft_tokens, "accepted_tokens": accepted}
    # Of the request's own context, which has its id; it may be the present one.
    one.context.copy().run(
        logger.info, "Request ended: %s", json.dumps(told), extra={"request": told}
    )


def _since(one: InFlight, time_s: float) -> float:
    return round(time_s - one.taken_s, 4)
