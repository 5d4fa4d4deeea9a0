"""Which drafts a simulated step verifies, by the functions that engines decide by.

Budget, selection and the end of a draft are decided in every step, the depth now and
then, each by the compiled function of `policies.decisions` that an engine's planner
calls. Chances and costs are known without error, and nothing is explored.
"""

from __future__ import annotations

import numpy as np

from policies.compiled import compiled
from policies.decisions.budget import find_budget
from policies.decisions.depth import NUM_THRESHOLDS, add_up_drafts, find_depth
from policies.decisions.early_exit import expect_gain
from policies.decisions.recent_drafts import NUM_REMEMBERED_DRAFTS, NUM_SAMPLES
from policies.decisions.select import admit_from, gather_scores
from policies.depth_control import KEEP_DEPTH_GAIN

from .state import ALL, FORESEEN, Costs, Fleet, Floats, Ints

PLAN_EVERY = 20
"""Steps between two choices of the depth. Engines take 8, and plan anew at another
load; the difference is `planned.py`'s to tell."""


@compiled
def target_ms(costs: Costs, num_tokens: int) -> float:
    """Return what the target takes for its tokens, as CUDA graphs pad them."""
    if num_tokens <= costs.pad_limit:
        padding = costs.pad_multiple
        num_tokens = (num_tokens + padding - 1) // padding * padding
    return max(costs.floor_ms, costs.token_ms * num_tokens)


@compiled
def drafter_ms(costs: Costs, depth: int, num_reqs: int) -> float:
    """Return what the drafter takes for its passes."""
    return depth * (costs.draft_pass_ms + costs.draft_token_ms * num_reqs)


@compiled
def select(fleet: Fleet, replica: int) -> None:
    """Choose how deep a filled batch has drafted, and what of it is verified.

    Args:
        fleet: Its `slots.drafts` and `depth` are set.
        replica: Which.
    """
    drafts, costs = fleet.drafts, fleet.costs
    prompts, chosen = fleet.slots.prompt[replica], fleet.slots.drafts[replica]
    rows = np.empty(fleet.num_running[replica], np.int64)
    count, num_others, most = 0, 0, drafts.survival.shape[1]
    for slot in range(rows.size):
        chosen[slot] = 0
        num_others += fleet.slots.chunk[replica, slot]
        if prompts[slot] == 0:
            rows[count] = slot
            count += 1
            num_others += 1
    if costs.rule == ALL:
        # After a step of prompts alone, too.
        fleet.depth[replica] = most
        for row in range(count):
            block = fleet.slots.block[replica, rows[row]]
            chosen[rows[row]] = drafts.num_offered[block]
        return
    if count == 0 or most == 0:
        return
    scores, offered = np.empty((count, most)), np.empty(count, np.int64)
    for row in range(count):
        block = fleet.slots.block[replica, rows[row]]
        scores[row] = drafts.survival[block]
        # The last token of a reply is no draft's.
        left = fleet.slots.output[replica, rows[row]] - 1
        offered[row] = min(left, drafts.num_offered[block])
    price = fleet.plan[replica, 1]
    if costs.rule == FORESEEN:
        depth, best = 0, -np.inf
        for passes in range(most + 1):
            _, surplus = _admit(scores, offered, passes, costs, num_others, price)
            surplus -= price * drafter_ms(costs, passes, count)
            if surplus > best:
                depth, best = passes, surplus
    else:
        depth = _draft(fleet, replica, scores, offered, num_others)
    admitted, _ = _admit(scores, offered, depth, costs, num_others, price)
    for row in range(count):
        chosen[rows[row]] = admitted[row]
    fleet.depth[replica] = depth
    if costs.rule == FORESEEN:
        return
    for row in range(count):
        place = fleet.num_steps[replica, 1] % NUM_REMEMBERED_DRAFTS
        fleet.recent[replica, place] = fleet.slots.block[replica, rows[row]]
        fleet.num_steps[replica, 1] += 1
    if fleet.num_steps[replica, 0] % PLAN_EVERY == 0:
        plan_depth(fleet, replica, count, num_others)
    fleet.num_steps[replica, 0] += 1


@compiled
def _admit(
    survival: Floats,
    offered: Ints,
    depth: int,
    costs: Costs,
    num_others: int,
    price: float,
) -> tuple[Ints, float]:
    """Return what is verified of drafts that deep, and tokens less time at a price."""
    lengths = np.minimum(offered, depth)
    scores = survival.copy()
    ranked = -np.sort(-gather_scores(scores, lengths))
    step_ms = np.empty(ranked.size + 1)
    for budget in range(step_ms.size):
        step_ms[budget] = target_ms(costs, num_others + budget)
    budget, _ = find_budget(ranked, step_ms, price, np.inf)
    least = ranked[budget - 1] if budget > 0 else np.inf
    surplus = ranked[:budget].sum() - price * step_ms[budget]
    return admit_from(scores, lengths, least, budget), surplus


@compiled
def _draft(
    fleet: Fleet, replica: int, survival: Floats, offered: Ints, num_others: int
) -> int:
    """Return after how many passes a draft ends, as `early_exit` ends it."""
    if fleet.plan[replica, 0] == 0.0:
        return 0
    costs, count, price = fleet.costs, offered.size, fleet.plan[replica, 1]
    width = max(1, round(2.0 * fleet.plan[replica, 2] * count))
    token_ms = target_ms(costs, num_others + width) - target_ms(costs, num_others)
    for depth in range(1, survival.shape[1]):
        latest = np.where(offered > depth, survival[:, depth - 1], 0.0)
        gained = expect_gain(
            latest, fleet.next_acceptance[replica], price * token_ms / width
        )
        if gained <= price * drafter_ms(costs, 1, count):
            return depth
    return int(survival.shape[1])


@compiled
def plan_depth(fleet: Fleet, replica: int, num_reqs: int, num_others: int) -> None:
    """Plan the next steps by recent drafts, and note how likely these were accepted."""
    drafts, costs = fleet.drafts, fleet.costs
    count = min(fleet.num_steps[replica, 1], NUM_REMEMBERED_DRAFTS)
    most = drafts.survival.shape[1]
    survival, acceptance = np.empty(count * most), np.empty(count * most)
    for row in range(count):
        before = 1.0
        for position in range(most):
            here = drafts.survival[fleet.recent[replica, row], position]
            survival[row * most + position] = here
            acceptance[row * most + position] = here / before if before > 0.0 else 0.0
            before = here
    gained, verified, _ = add_up_drafts(
        survival, np.argsort(-survival), most, NUM_THRESHOLDS
    )
    fixed_ms = costs.base_ms + costs.request_ms * num_reqs
    fixed_ms += costs.kv_token_ms * fleet.num_kv_tokens[replica]
    # Every token pays for the same share of a prompt, at every depth.
    fixed_ms -= target_ms(costs, num_others) - target_ms(costs, num_reqs)
    goodput = np.empty(gained.shape)
    for depth in range(most + 1):
        depth_ms = fixed_ms + drafter_ms(costs, depth, num_reqs)
        for column in range(gained.shape[1]):
            num_tokens = num_others + round(num_reqs * verified[depth, column])
            step_ms = depth_ms + target_ms(costs, num_tokens)
            tokens = num_reqs * (1.0 + gained[depth, column])
            goodput[depth, column] = tokens / step_ms
    plan = fleet.plan[replica]
    depth, column = find_depth(goodput, int(plan[0]), KEEP_DEPTH_GAIN)
    plan[0], plan[1] = depth, goodput[depth, column]
    plan[2] = verified[depth, column]
    acceptance.sort()
    for sample in range(NUM_SAMPLES):
        middle = int((sample + 0.5) * acceptance.size / NUM_SAMPLES)
        fleet.next_acceptance[replica, sample] = acceptance[middle]
