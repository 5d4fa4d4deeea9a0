"""Which drafts a simulated step verifies, by the functions that engines decide by.

Tokens less time at the price that the replica's own tokens have lately had, as in
`policies.decisions.budget`. Chances are those of the request's kind: known without
error, and alike for all its steps, which real confidences are not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.compiled import compiled
from policies.decisions.budget import find_budget
from policies.decisions.select import admit_from, gather_scores

from .state import Costs, Fleet, Requests

_KEPT = 0.98
"""Of a replica's tokens and time from one step to the next."""


@compiled
def tokens_ms(costs: Costs, num_tokens: int) -> float:
    """Return what the target takes for its tokens, as CUDA graphs pad them."""
    if num_tokens <= costs.pad_limit:
        padding = costs.pad_multiple
        num_tokens = (num_tokens + padding - 1) // padding * padding
    return max(costs.floor_ms, costs.token_ms * num_tokens)


@compiled
def select(
    fleet: Fleet,
    requests: Requests,
    costs: Costs,
    survival: NDArray[np.float64],
    replica: int,
    num_other_tokens: int,
) -> int:
    """Choose what the decoding requests of a batch verify.

    Args:
        fleet: Its `slot_drafts` are set.
        requests: Whose kinds are known.
        costs: Of a step.
        survival: `[num_kinds, num_drafts]`.
        replica: Which.
        num_other_tokens: In the step, whatever is chosen.

    Returns:
        Drafts that are verified.
    """
    drafts = fleet.slot_drafts[replica]
    count, num_drafts = 0, survival.shape[1]
    rows = np.empty(fleet.num_running[replica], np.int64)
    for slot in range(rows.size):
        drafts[slot] = num_drafts
        if fleet.slot_prompt[replica, slot] == 0:
            rows[count] = slot
            count += 1
    if not costs.selects or count == 0 or num_drafts == 0:
        return int(count * num_drafts)
    scores = np.empty((count, num_drafts))
    lengths = np.empty(count, np.int64)
    for row in range(count):
        slot = rows[row]
        kind = requests.kind[fleet.slot_request[replica, slot]]
        # The last token of a reply is no draft's.
        lengths[row] = min(num_drafts, fleet.slot_output[replica, slot] - 1)
        for position in range(num_drafts):
            scores[row, position] = survival[kind, position]
    ranked = -np.sort(-gather_scores(scores, lengths))
    step_ms = np.empty(ranked.size + 1)
    for budget in range(step_ms.size):
        step_ms[budget] = tokens_ms(costs, num_other_tokens + budget)
    tokens, ms = fleet.lately[replica]
    price = tokens / ms if ms > 0.0 else 0.0
    budget, _ = find_budget(ranked, step_ms, price, np.inf)
    least = ranked[budget - 1] if budget > 0 else np.inf
    admitted = admit_from(scores, lengths, least, budget)
    for row in range(count):
        drafts[rows[row]] = admitted[row]
    return int(budget)


@compiled
def note_step(fleet: Fleet, replica: int, num_tokens: int) -> None:
    """Learn what time is worth from the tokens of the step that has ended."""
    lately = fleet.lately[replica]
    lately[0] = _KEPT * lately[0] + num_tokens
    lately[1] = _KEPT * lately[1] + fleet.step_ms[replica]
