"""Prefix caches, and the sessions that use them."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import load_engine
from loadtest.simulate.fleet import Targets, measure, run_fleet
from loadtest.simulate.load import Load, draw_requests, read_load
from loadtest.simulate.prefixes import count_known, keep, make_prefixes
from loadtest.simulate.sessions import parse_sessions


def test_a_cache_drops_what_was_met_longest_ago() -> None:
    rng = np.random.default_rng(0)
    prefixes, expected = make_prefixes(1, 60, 10), OrderedDict[int, None]()
    for _ in range(500):
        chain = rng.integers(0, 4) * 15 + np.arange(rng.integers(1, 15))
        known = next((n for n, b in enumerate(chain) if b not in expected), chain.size)
        assert count_known(prefixes, 0, chain) == known
        keep(prefixes, 0, chain, 257)
        for block in reversed(chain.tolist()):
            expected[block] = None
            expected.move_to_end(block)
        while len(expected) > 25:
            expected.popitem(last=False)
        assert prefixes.size[0] == len(expected)


def draw(text: str, count: int = 4000, rate: float = 80.0) -> Drawn:

    return draw_requests(Load(sessions=parse_sessions(text)), count, rate, 3)


def test_each_turn_carries_those_before_it() -> None:
    drawn = draw("5:2:512")
    assert (np.diff(drawn.arrival_s) >= 0).all()
    assert drawn.arrival_s[-1] == pytest.approx(4000 / 80, rel=0.1)
    ends = drawn.num_prompt_tokens + drawn.num_output_tokens
    sizes = np.diff(drawn.chain_first)
    assert (sizes == ends // 128).all()
    seen: dict[int, int] = {}
    num_later = 0
    for request in range(4000):
        chain = drawn.chain[drawn.chain_first[request] :][: sizes[request]].tolist()
        # Four blocks for all of a kind, then those of the session.
        assert (
            chain[:4]
            == [*range(4 * drawn.kind[request], 4 * drawn.kind[request] + 4)][
                : len(chain)
            ]
        )
        if len(chain) > 4:
            assert chain[4:] == [*range(chain[4], chain[-1] + 1)]
            before = seen.get(chain[4])
            seen[chain[4]] = int(ends[request])
            if before is not None:
                num_later += 1
                assert before < drawn.num_prompt_tokens[request]
    assert num_later > 2000


def test_what_a_fleet_can_do_counts_what_was_said_before() -> None:
    load = Load(sessions=parse_sessions("6:4:512"))
    drawn = draw_requests(load, 40_000, 50, 3)
    assert load.mean_prompt == 512 + 300 + 5 * (300 + 200)
    assert drawn.num_prompt_tokens.mean() == pytest.approx(load.mean_prompt, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "5:0", "5:1:-1", "5:1:1:1", "x", "nan"])
def test_what_is_no_sessions_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="no number"):
        parse_sessions(text)


def test_affinity_finds_what_is_cached_and_room_limits_it() -> None:
    engine = load_engine("h100-qwen3-1.7b", 3)
    drawn, found = draw("5:2:512"), {}
    for router in ("round-robin", "prefix-affinity", "ours"):
        run = run_fleet(engine, drawn, 4, router, 0.1, 3)
        assert (run.requests.num_finishes == 1).all()
        assert (run.requests.num_cached < drawn.num_prompt_tokens).all()
        found[router] = measure(run.requests, Targets(100, 5))["cached_share"]
    assert found["prefix-affinity"] > 0.7
    assert found["ours"] > found["round-robin"] + 0.2
    small = engine.costs._replace(max_kv_tokens=60_000)
    made = replace(engine, costs=small)
    run = run_fleet(made, drawn, 4, "prefix-affinity", 0.1, 3)
    share = measure(run.requests, Targets(100, 5))["cached_share"]
    assert share < found["prefix-affinity"] - 0.1


def test_mooncake_s_hashes_name_the_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 9_000 * n, "input_length": 1100, "output_length": 5}
        | {"hash_ids": [7, 30 + n % 2, 100 + n]}
        for n in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    drawn = draw_requests(read_load(path, 0.5, 0.5), 10, 1.0, 0)
    engine = load_engine("h100-qwen3-1.7b", 3)
    found = run_fleet(engine, drawn, 1, "ours", 0.1, 0).requests.num_cached
    # Two whole blocks of 512: the first is common to all, the second to every other.
    assert found.tolist() == [0, 512, *[1024] * 8]
