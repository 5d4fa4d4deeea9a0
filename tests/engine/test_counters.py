"""Counters of speculation, by request and by position."""

from types import SimpleNamespace

import numpy as np

from policies.types import DraftSelection
from serving.engine.shared.counters import SpeculationCounters


def test_blocks_counted_together_are_counted_as_one_by_one():
    rng = np.random.default_rng(0)
    together = SpeculationCounters("goodput", "draft_model", max_depth=4)
    single = SpeculationCounters("goodput", "draft_model", max_depth=4)
    for num_reqs in (0, 1, 3, 20):
        # Drafters that ignore the depth may verify more than there are positions.
        verified = rng.integers(1, 6, num_reqs).tolist()
        accepted = [int(rng.integers(0, most + 1)) for most in verified]
        together.count_verification(verified, accepted)
        for row in range(num_reqs):
            single.count_verification([verified[row]], [accepted[row]])
    assert together == single
    assert together.num_drafts == 24
    assert together.num_verified_tokens_per_pos[0] == 24
    assert sum(together.num_accepted_tokens_per_pos) <= together.num_accepted_tokens


def test_a_block_reaches_every_position_up_to_its_length():
    counters = SpeculationCounters("fixed", "draft_model", max_depth=3)
    counters.count_verification([3, 1, 0], [2, 0, 0])
    assert counters.num_drafts == 2
    assert counters.num_verified_tokens_per_pos == [2, 1, 1]
    assert counters.num_accepted_tokens_per_pos == [1, 1, 0]
    assert (counters.num_verified_tokens, counters.num_accepted_tokens) == (4, 2)


def test_cut_tokens_are_counted_by_what_cut_them():
    from serving.engine.cpu.selection import DraftSelector

    def count(**selection):
        counters = SpeculationCounters("goodput", "draft_model", 4)
        requests = [SimpleNamespace(spec_token_ids=[7] * 4) for _ in range(3)]
        admitted = np.array([4, 1, 0])
        DraftSelector._admit(
            SimpleNamespace(_counters=counters),
            requests,
            DraftSelection(admitted, draft_budget=5, **selection),
        )
        assert [len(one.spec_token_ids) for one in requests] == [4, 1, 0]
        return dict(counters.num_cut_tokens)

    assert count() == {"budget": 7}
    assert count(num_cut_by_latency=2) == {"latency": 2, "budget": 5}
    assert count(num_cut_by_latency=9) == {"latency": 7}
    assert count(is_probe=True) == {"probe": 7}
