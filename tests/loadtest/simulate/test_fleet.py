"""The event loop against arithmetic and queueing theory."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.simulate import fit, state
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import MODELS, Engine, load_engine, make_drafts
from loadtest.simulate.fleet import ROUTERS, run_fleet
from loadtest.simulate.load import Lengths, Load, draw_requests, parse_arrivals

STEP_S = 0.01


def engine(chance: float = 0.0, **costs: float) -> Engine:
    """Return an engine of constant steps, or of what is given instead."""
    terms = {"base_ms": 1e3 * STEP_S} | dict.fromkeys(state.Costs._fields[1:7], 0.0)
    limits = {"num_drafts": 0, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    made = state.Costs(**{**terms, **limits, **costs})  # type: ignore[arg-type]  # mixed
    survival = [[chance**j for j in range(1, made.num_drafts + 1)]] * 2
    return Engine(
        "test", made, make_drafts(np.array(survival).reshape(2, made.num_drafts))
    )


def drawn(arrival_s: object, prompt: object, output: object) -> Drawn:
    when = np.array(arrival_s, dtype=np.float64)
    ints = (np.full(when.shape, number, np.int64) for number in (prompt, output, 0))
    return Drawn(when, *ints)


def alone(made: Engine, *requests: object) -> state.Fleet:
    return run_fleet(made, drawn(*requests), 1, "round-robin", 0, 5)


def count_there(run: state.Fleet) -> state.Ints:
    """Return requests there after each event that routers are told of.

    From no request's own times.
    """
    kind = run.events.kind
    return np.cumsum(1 * (kind == state.CAME) - 1 * (kind == state.LEFT))


def mixed_run(router: str, staleness_s: float = 0.1, seed: int = 3) -> state.Fleet:
    """Run a bursty load with heavy tails, acceptance shifting, at 90 % of capacity."""
    made = load_engine("h100-qwen3-1.7b", 3)
    load = Load(parse_arrivals("gamma=3"), Lengths(300, 2), Lengths(200, 2), 0.2, 0.9)
    rate = 8 * 0.9 * made.capacity_per_s(load)
    requests = draw_requests(load, 4000, rate, seed)
    return run_fleet(made, requests, 8, router, staleness_s, seed)


def test_a_step_costs_emits_and_admits_what_arithmetic_says() -> None:
    costs = {"base_ms": 10.0, "request_ms": 2.0, "token_ms": 0.1, "kv_token_ms": 0.01}
    limits = {"num_drafts": 3, "max_num_seqs": 2, "max_num_batched_tokens": 60}
    made = engine(1.0, **costs, **limits)
    # Nine tokens: one with the prompt, four in each of two steps.
    run = alone(made, [0, 0.001, 0.002], [100, 20, 5], 9)
    first = [
        10 + 6 + 0.6,  # 60 tokens of the first prompt
        10 + 6 + 1.2,  # the other 40, and the second prompt: its request came too late
        10 + 4 + 0.8 + 0.01 * (101 + 21),  # both decode; the third waits for a slot
        10 + 4 + 0.8 + 0.01 * (105 + 25),
        10 + 0.5 + 0.05,
    ]
    ends_ms = np.cumsum(first)
    requests = run.requests
    assert requests.first_token_s * 1e3 == pytest.approx(ends_ms[[1, 1, 4]])
    last = ends_ms[4] + 2 * (10 + 2 + 0.4) + 0.01 * (6 + 10)
    assert requests.finish_s * 1e3 == pytest.approx([ends_ms[3], ends_ms[3], last])
    assert run.counts[[state.STEPS, state.REQUEST_STEPS]].tolist() == [7, 1 + 2 * 3 + 3]


def test_weights_are_a_floor_and_graphs_pad() -> None:
    made = engine(floor_ms=3.0, token_ms=1.0, pad_multiple=8, pad_limit=16)
    run = alone(made, [0, 1, 2], [2, 9, 17], 1)
    taken = 1e3 * (run.requests.finish_s - run.requests.arrival_s)
    assert taken == pytest.approx([10 + 8, 10 + 16, 10 + 17])


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_finishes_once_and_little_s_law_holds(router: str) -> None:
    run = mixed_run(router)
    requests = run.requests
    assert (requests.num_finishes == 1).all()
    assert (requests.arrival_s < requests.first_token_s).all()
    assert (requests.first_token_s <= requests.finish_s).all()
    assert set(requests.replica) == set(range(8))
    there = count_there(run)
    integral = float((there[:-1] * np.diff(run.events.when_s)).sum())
    assert there[-1] == 0
    assert integral == pytest.approx((requests.finish_s - requests.arrival_s).sum())


@pytest.mark.parametrize("varies", [True, False], ids=["M/Geo/1", "M/D/1"])
def test_one_slot_is_the_queue_of_the_textbook(varies: bool) -> None:
    """Within 5 %: the mean wait (Pollaczek and Khinchine), and what an arrival sees."""
    load, tokens, count = 0.7, 10, 200_000
    lengths = np.full(count, tokens)
    if varies:
        lengths = np.random.default_rng(1).geometric(1 / tokens, count)
    service_s = tokens * STEP_S
    when = np.cumsum(np.random.default_rng(2).exponential(service_s / load, count))
    run = alone(engine(max_num_seqs=1), when, 1, lengths)
    wait_s = run.requests.first_token_s - STEP_S - when
    # Half the mean square of the lengths, over the square of their mean.
    spread = (2 - 1 / tokens) / 2 if varies else 1 / 2
    expected_s = spread * service_s * load / (1 - load)
    assert wait_s.mean() == pytest.approx(expected_s, rel=0.05)
    # Poisson arrivals see time averages: by Little, the rate times the time there.
    there = load * (1 + expected_s / service_s)
    seen = count_there(run)[run.events.kind == state.CAME] - 1
    assert seen.mean() == pytest.approx(there, rel=0.05)


def test_drafts_are_accepted_as_often_as_their_kind_s_are() -> None:
    made = engine(0.6, num_drafts=3)
    run = alone(made, [0.0], 1, 100_001)
    # A relative standard error of .2 %.
    tokens_per_step = 100_000 / (run.counts[state.STEPS] - 1)
    assert tokens_per_step == pytest.approx(1 + 0.6 + 0.6**2 + 0.6**3, rel=0.01)


def test_a_step_verifies_what_is_worth_its_time() -> None:
    """Where tokens are dear hard drafts are left out; where they are free, none."""
    survival = np.array([[0.9, 0.8], [0.3, 0.1]])
    load = drawn(np.linspace(0, 20, 4000), 10, 60)
    load.kind[::2] = 1
    speeds = []
    rules = state.ALL, state.WORTH, state.WORTH, state.ALL
    for token_ms, rule in zip((0.5, 0.5, 0.0, 0.0), rules, strict=True):
        costs = engine(token_ms=token_ms, num_drafts=2, rule=rule).costs
        made = Engine("", costs, make_drafts(survival))
        run = run_fleet(made, load, 1, "round-robin", 0, 5)
        speeds.append(run.requests.finish_s.max())
        assert (run.requests.num_finishes == 1).all()
    assert speeds[1] < 0.95 * speeds[0]
    assert speeds[2] == pytest.approx(speeds[3])


def test_room_in_the_kv_cache_is_waited_for() -> None:
    made = engine(max_kv_tokens=105)
    run = alone(made, [0, 0.001, 0.002], [50, 30, 30], 10)
    # The second fits beside the first; the third waits until the first is done.
    _, second, third = run.requests.first_token_s
    assert second < run.requests.finish_s[0] <= third - STEP_S / 2


def test_who_joined_last_gives_way_and_computes_anew() -> None:
    made = engine(max_kv_tokens=100, token_ms=1.0)
    run = alone(made, [0, 0.001], [50, 30], 20)
    requests = run.requests
    assert (requests.num_finishes == 1).all()
    # 83 tokens when both have begun; each step adds two, so the ninth has no room.
    assert requests.num_emitted.tolist() == [20, 20]
    assert np.isnan(requests.resumed_s[0])
    # After a step of the first alone it computes its prompt and nine tokens in one
    # beside it. That it gives way once more, until the first is done, changes nothing.
    assert run.counts[state.PREEMPTED] == 2
    begun_s = requests.first_token_s[1]
    assert requests.resumed_s[1] == pytest.approx(
        begun_s + 8 * (STEP_S + 2e-3) + (STEP_S + 1e-3) + (STEP_S + 1e-3 * (1 + 39))
    )


def test_an_overloaded_fleet_finishes_what_its_capacity_says() -> None:
    made = load_engine("h100-qwen3-1.7b", 3)
    load = Load()
    capacity = 4 * made.capacity_per_s(load)
    requests = draw_requests(load, 20_000, 3 * capacity, 0)
    finish_s = run_fleet(made, requests, 4, "round-robin", 0, 0).requests.finish_s
    start_s, end_s = np.quantile(finish_s, [0.2, 0.8])
    assert 0.6 * 20_000 / (end_s - start_s) == pytest.approx(capacity, rel=0.1)


def test_what_a_fleet_can_do_counts_the_depth_that_is_chosen() -> None:
    """Of drafts that are worth nothing and cost something, none."""
    capacity = [
        Engine("", costs, make_drafts(np.zeros((2, 3)))).capacity_per_s(Load())
        for depth, rule in ((3, state.ALL), (3, state.WORTH), (0, state.ALL))
        for costs in [engine(token_ms=1.0, num_drafts=depth, rule=rule).costs]
    ]
    assert capacity[0] < 0.6 * capacity[1]
    assert capacity[1] == capacity[2]


@pytest.mark.parametrize("staleness_s", [0.0, 0.05, 2.0])
def test_a_router_sees_only_telemetry_of_the_stated_age(staleness_s: float) -> None:
    requests = mixed_run("least-requests", staleness_s).requests
    differed = False
    for request in range(0, requests.arrival_s.size, 37):
        then = requests.arrival_s[request] - staleness_s
        came = requests.arrival_s[:request] <= then
        went = requests.finish_s[:request] <= then
        known = np.bincount(requests.replica[:request][came & ~went], minlength=8)
        assert known[requests.replica[request]] == known.min()
        now = requests.finish_s[:request] > requests.arrival_s[request]
        true = np.bincount(requests.replica[:request][now], minlength=8)
        differed |= bool(true[requests.replica[request]] > true.min())
    assert differed == (staleness_s > 0)


def test_a_router_that_counts_what_it_sends_hears_late_of_ends_alone() -> None:
    requests = mixed_run("least-sent", 0.5).requests
    for request in range(0, requests.arrival_s.size, 37):
        went = requests.finish_s[:request] <= requests.arrival_s[request] - 0.5
        sent = np.bincount(requests.replica[:request][~went], minlength=8)
        assert sent[requests.replica[request]] == sent.min()


def test_same_seed_same_result_and_arms_meet_the_same_luck() -> None:
    one, same, other = (mixed_run("power-of-two", seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one.requests, same.requests, strict=True):
        assert np.array_equal(a, b, equal_nan=True)
    assert not np.array_equal(one.requests.finish_s, other.requests.finish_s)
    # Chunks of a prompt aside, which request needs how many steps is no router's doing.
    made, requests = engine(0.6, num_drafts=3), drawn(np.linspace(0, 17, 5000), 10, 40)
    runs = [run_fleet(made, requests, 8, router, 0.1, 1) for router in ROUTERS]
    assert len({run.counts[state.REQUEST_STEPS] for run in runs}) == 1


def test_committed_models_are_what_their_sources_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit.main() == 0
    committed = MODELS["cpu-demo-100m"].read_text("utf-8")
    assert capsys.readouterr().out == committed
    costs = load_engine("h100-qwen3-1.7b", 0).costs
    assert 1e3 * costs.kv_token_ms == pytest.approx(0.0356, rel=0.01)
    # Weights outweigh arithmetic up to half of 989 T over .96 of 3.35 T bytes.
    assert costs.floor_ms / costs.token_ms == pytest.approx(153.8, rel=0.01)
