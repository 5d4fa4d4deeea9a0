"""Drafts give way before a request loses the blocks it holds."""

from types import SimpleNamespace

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


def make_scheduler(running, num_free, *, lookahead=0, num_kinds=1):
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


def trim(scheduler):
    num_cut = trim_to_free_blocks(scheduler)
    return num_cut, [len(one.spec_token_ids) for one in scheduler.running]


def test_drafts_that_would_begin_a_block_are_cut_short_of_it():
    # The step computes position 13 and the drafts' 14 to 17; the block ends with 15.
    request = make_request(14, 4)
    assert trim(make_scheduler([request], num_free=0)) == (2, [2])
    assert request.spec_token_ids == [0, 1]


def test_drafts_stay_while_blocks_are_free():
    running = [make_request(14, 4), make_request(14, 4)]
    assert trim(make_scheduler(running, num_free=2)) == (0, [4, 4])


def test_the_request_that_would_be_preempted_first_gives_way_first():
    running = [make_request(14, 4), make_request(15, 4), make_request(11, 4)]
    assert trim(make_scheduler(running, num_free=1)) == (3, [4, 1, 4])


def test_nothing_is_cut_where_somebody_is_preempted_all_the_same():
    # The second needs a block without any draft.
    running = [make_request(14, 4), make_request(17, 4)]
    assert trim(make_scheduler(running, num_free=0)) == (0, [4, 4])
    assert trim(make_scheduler(running, num_free=1)) == (2, [2, 4])


def test_positions_of_drafts_to_come_count_as_vllm_counts_them():
    # vLLM reserves two positions more, up to 15.
    assert trim(make_scheduler([make_request(12, 3)], 0, lookahead=2)) == (1, [2])


def test_the_rest_of_a_prompt_comes_first():
    prompt = make_request(40, 0, num_computed=16)
    scheduler = make_scheduler([prompt, make_request(14, 4)], num_free=3)
    assert trim(scheduler) == (2, [0, 2])


def test_blocks_of_several_kinds_are_left_to_vllm():
    scheduler = make_scheduler([make_request(14, 4)], num_free=0, num_kinds=2)
    assert trim(scheduler) == (0, [4])


def test_drafts_that_can_begin_two_blocks_are_left_to_vllm():
    """Whether the first of them is cut would depend on how far the draft goes on."""
    scheduler = make_scheduler([make_request(14, BLOCK + 1)], num_free=1)
    assert trim(scheduler) == (0, [BLOCK + 1])


def test_what_is_cut_does_not_depend_on_the_tokens_of_a_draft():
    """A draft that ends early loses no position that a longer one would keep."""
    for num_tokens in range(9, 25):
        kept = [
            trim(make_scheduler([make_request(num_tokens, n)], num_free=0))[1][0]
            for n in range(6)
        ]
        longest = kept[-1]
        # Where nothing can be saved, each keeps all it has.
        assert kept == [min(n, longest) for n in range(6)]
