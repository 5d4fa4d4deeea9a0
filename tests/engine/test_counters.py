"""Counters of speculation, by request and by position."""

from types import SimpleNamespace

import numpy as np

from policies.types import DraftSelection
from serving.engine.shared.counters import SpeculationCounters


def test_a_block_reaches_every_position_up_to_its_length():
    counters = SpeculationCounters("fixed", "draft_model", max_depth=3)
    # Drafters that ignore the depth may verify more than there are positions.
    counters.count_verification([5, 1, 0], [2, 0, 0])
    assert counters.num_drafts == 2
    assert counters.num_verified_tokens_per_pos == [2, 1, 1]
    assert counters.num_accepted_tokens_per_pos == [1, 1, 0]
    assert (counters.num_verified_tokens, counters.num_accepted_tokens) == (6, 2)
    counters.count_verification([2], [2])
    assert counters.num_verified_tokens_per_pos == [3, 2, 1]
    assert counters.num_accepted_tokens_per_pos == [2, 2, 0]


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
