"""Drafts give way before a request loses the blocks it holds."""

from types import SimpleNamespace

import pytest

from serving.engine.shared.kv_shortage import trim_to_free_blocks

BLOCK = 8


def make_request(num_tokens, num_drafts, num_computed=-1):
    """Make one that decodes, unless less of it is computed."""
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_computed_tokens=num_tokens - 1 if num_computed < 0 else num_computed,
        num_output_placeholders=0,
        spec_token_ids=list(range(num_drafts)),
    )


def make_scheduler(running, *, num_free=0, lookahead=0, num_kinds=1):
    """Make what is looked at of a scheduler; requests hold what is computed."""
    for index, request in enumerate(running):
        request.request_id = str(index)
    blocks = SimpleNamespace(
        block_size=BLOCK,
        req_to_blocks={
            one.request_id: [None] * -(-one.num_computed_tokens // BLOCK)
            for one in running
        },
    )
    return SimpleNamespace(
        running=running,
        max_num_scheduled_tokens=64,
        num_lookahead_tokens=lookahead,
        num_spec_tokens=max(len(one.spec_token_ids) for one in running),
        max_model_len=512,
        block_size=BLOCK,
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: num_free),
            coordinator=SimpleNamespace(single_type_managers=(blocks,) * num_kinds),
        ),
    )


@pytest.mark.parametrize(
    ("requests", "scheduler", "num_cut", "left"),
    [
        # The step computes position 13 and the drafts' 14 to 17; the block ends at 15.
        ([(14, 4)], {}, 2, [2]),
        ([(14, 4)] * 2, {"num_free": 2}, 0, [4, 4]),
        # Who would be preempted first gives way first.
        ([(14, 4), (15, 4), (11, 4)], {"num_free": 1}, 3, [4, 1, 4]),
        # The second needs a block without any draft: somebody is preempted anyway.
        ([(14, 4), (17, 4)], {}, 0, [4, 4]),
        ([(14, 4), (17, 4)], {"num_free": 1}, 2, [2, 4]),
        # vLLM reserves two positions more, up to 15.
        ([(12, 3)], {"lookahead": 2}, 1, [2]),
        # The rest of a prompt comes first; one that takes the whole step leaves drafts
        # nothing to need.
        ([(40, 0, 16), (14, 4)], {"num_free": 3}, 2, [0, 2]),
        ([(100, 0, 16), (14, 4)], {"num_free": 8}, 0, [0, 4]),
        # Blocks of two kinds, and drafts over two blocks, are vLLM's.
        ([(14, 4)], {"num_kinds": 2}, 0, [4]),
        ([(14, BLOCK + 1)], {}, 0, [BLOCK + 1]),
    ],
)
def test_drafts_give_way_where_that_saves_a_request(requests, scheduler, num_cut, left):
    running = [make_request(*one) for one in requests]
    assert trim_to_free_blocks(make_scheduler(running, **scheduler)) == num_cut
    # Those that stay are the first.
    assert [one.spec_token_ids for one in running] == [list(range(n)) for n in left]
