"""The manager's decisions, on tensors of the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies.types import AcceptanceScale
from serving.engine.compat import StepTimingSample
from serving.engine.gpu.copy import DeviceReader
from serving.engine.gpu.step_messages import VerificationOrder
from serving.engine.gpu.verification import PlannedVerification, make_profile


def make_verification(depth=3, *, max_total_logits=10_000):
    """Make our manager for a group of one rank, over what vLLM's holds.

    On the CPU: its constructor makes streams.
    """
    upstream = SimpleNamespace(
        num_speculative_steps=depth,
        num_bonus_tokens=1,
        query_start_loc=torch.zeros(9, dtype=torch.int32),
        _max_total_logits=max_total_logits,
        _batch_budget=None,
        _confidence_probs=torch.ones(8, depth),
        _batch_draft_capacity=torch.zeros(8, dtype=torch.int32),
        _num_non_draft_tokens=torch.zeros(8, dtype=torch.int32),
        _cu_num_logits=torch.zeros(9, dtype=torch.int32),
    )
    return PlannedVerification(
        upstream,
        tp_group=SimpleNamespace(broadcast=lambda tensor, src: tensor),
        num_draft_passes=depth,
        reader=DeviceReader(torch.device("cpu")),
    )


def record(verification, slots, rows):
    """Report drafts' confidences as the runner does after drafting."""
    batch = SimpleNamespace(num_reqs=len(slots), idx_mapping=torch.tensor(slots))
    # As the drafter's buffer: more rows than requests.
    padded = torch.tensor([*rows, [9.0] * len(rows[0])])
    verification.record_confidences(padded, batch)


def run(verification, slots=(0, 1)):
    """Size and allocate a step of two requests, `a` and `b`, as the runner does.

    Returns:
        Tokens of the step, drafts admitted of each request, and their budget.
    """
    depth = verification._confidence_probs.shape[1]
    drafts = {req_id: [-1] * depth for req_id in "ab"}
    total = verification.get_num_tokens(dict.fromkeys("ab", depth + 1), drafts)
    logits, _, budget = verification.reallocate_drafts(["a", "b"], torch.tensor(slots))
    return total, (np.diff(logits.tolist()) - 1).tolist(), budget


@pytest.mark.parametrize(
    ("order", "max_total_logits", "admitted"),
    [
        (None, 99, 6),
        (VerificationOrder(1, draft_budget=99), 99, 6),
        (VerificationOrder(1, draft_budget=5), 99, 5),
        # No more than the sampler can address.
        (VerificationOrder(1, draft_budget=6), 4, 2),
    ],
)
def test_all_drafts_are_verified_but_for_an_order_or_lack_of_room(
    order, max_total_logits, admitted
):
    verification = make_verification(max_total_logits=max_total_logits)
    verification.take_order(order)
    total, _, budget = run(verification)
    assert (total, budget) == (2 + admitted, admitted)


def test_the_ranking_follows_calibration_and_weights_of_the_order():
    verification = make_verification(depth=2)
    record(verification, [0, 1], [[0.6, 0.6], [0.5, 0.5]])
    plain = VerificationOrder(1, 1, ("b", "a"))
    scale = AcceptanceScale(1.0, np.zeros(2), np.array([2.0, 0.0]), 8.0)
    for order, admitted in [
        (plain, [1, 0]),
        (VerificationOrder(2, 1, ("b", "a"), scale), [0, 1]),
        (VerificationOrder(3, 1, ("b", "a"), weights=np.array([3.0, 1.0])), [0, 1]),
        (VerificationOrder(4, 1, ("b", "a"), scale, np.array([0.1, 1.0])), [1, 0]),
    ]:
        verification.take_order(order)
        assert run(verification)[1] == admitted, order


def test_a_planner_that_knows_fewer_positions_than_the_engine_drafts_is_no_fault():
    verification = make_verification(depth=3)
    record(verification, [0, 1], [[0.9, 0.9, 0.9], [0.2, 0.2, 0.2]])
    scale = AcceptanceScale(1.0, np.zeros(1), np.zeros(2), 8.0)
    verification.take_order(VerificationOrder(1, 3, ("a", "b"), scale))
    assert run(verification)[1] == [3, 0]


def test_what_was_verified_is_reported_with_the_confidences_it_was_ranked_by():
    verification = make_verification(depth=2)
    record(verification, [3, 1], [[0.9, 0.8], [0.3, 0.2]])
    verification.take_order(VerificationOrder(1, 2))
    run(verification, [3, 1])
    record(verification, [3, 1], [[0.1, 0.1], [0.1, 0.1]])
    verified = verification.take_verified()
    assert verified.req_ids == ("a", "b")
    confidence, num_admitted = verified.copy.read()
    np.testing.assert_allclose(confidence, [[0.9, 0.8], [0.3, 0.2]], rtol=1e-6)
    assert num_admitted.tolist() == [2, 0]
    assert verification.take_verified() is None
    # A step without drafts reports nothing of the step before.
    verification.take_order(VerificationOrder(2, 2))
    run(verification, [3, 1])
    verification.take_order(VerificationOrder(3, 0))
    assert verification.take_verified() is None
    # A new request does not inherit the confidences of its slot.
    verification.add_request(3)
    assert verification._confidence_probs[3].tolist() == [1.0, 1.0]


def test_start_up_steps_carry_no_context():
    """Which the planner prices by itself; upstream lends each request 8192 tokens."""
    verification = make_verification()
    verification.req_states = SimpleNamespace(max_num_batched_tokens=8)
    batches = [*verification.batches_to_profile([1, 2])]
    assert {batch["num_tokens"] for batch in batches} == {1, 2, 3, 4, 8}
    assert {batch["context_len"] for batch in batches} == {0}
    upstream = super(PlannedVerification, verification).batches_to_profile([1])
    assert next(upstream)["context_len"] > 0


def test_start_up_timings_become_a_profile_of_single_passes():
    # Past 4 requests the first pass grows and the other two do not.
    times_ms = [(5.0, 3.0), (5.2, 3.3), (90.0, 80.0), (6.0, 6.0), (9.0, 10.0)]
    samples = [
        StepTimingSample(*own_ms, num_tokens, min(num_tokens, 4), True)
        for num_tokens, own_ms in zip((2, 2, 2, 4, 16), times_ms, strict=True)
    ]
    verification = make_verification(depth=3)
    verification.set_initial_cost_curves(samples)
    profile = verification.profile
    assert profile.num_tokens == (2, 4, 16)
    assert profile.target_ms == (5.2, 6.0, 9.0)
    assert profile.draft_ms == pytest.approx((1.1, 2.0, 6.0))
    assert not profile.drafts_in_one_pass
    in_one_pass = make_profile(samples[:1], num_draft_passes=1)
    assert in_one_pass.draft_ms == (3.0,)
    assert in_one_pass.drafts_in_one_pass
