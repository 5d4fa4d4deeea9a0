"""What a server tells about itself, and how it is followed through outages."""

import os

from loadtest.client.endpoint import Endpoint
from loadtest.compare.deployment import Deployment
from loadtest.compare.scrape import GrowingCounters, read_page, scrape, summarise_server

from .stand_in_server import StandIn, run_stand_in

PAGE = """\
# TYPE ray_tetris_drafts_total counter
ray_tetris_drafts_total{replica="a"} 10
ray_tetris_drafts_total{replica="b"} 5
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 70
# TYPE ray_serve_http_requests_total counter
ray_serve_http_requests_total 9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
# TYPE ray_vllm_e2e_request_latency_seconds histogram
ray_vllm_e2e_request_latency_seconds_bucket{le="0.5"} of no interest
"""


def test_figures_are_read_from_rays_and_vllms_pages():
    counters, queues = read_page(PAGE)
    assert {name for name, _ in counters} == {
        "tetris_drafts_total",
        "vllm_generation_tokens_total",
    }
    # Queues add up, and the fullest cache counts.
    assert queues == {"num_running": 5.0, "kv_cache_usage": 0.5}


def test_counters_add_up_through_restarts_and_replicas_that_go_away():
    grown = GrowingCounters()
    a, b = ("drafts", (("replica", "a"),)), ("drafts", (("replica", "b"),))
    for page in (
        {a: 100.0},  # What was before does not count.
        {a: 110.0, b: 5.0},  # A new replica starts from zero: 10 + 5.
        {b: 9.0},  # The first one died, the second did 4 more.
        {a: 3.0, b: 9.0},  # Restarted: 3.
    ):
        grown.update(page)
    assert grown.totals == {"drafts": 22.0}


def test_one_page_of_two_is_no_figure_of_the_whole():
    with (
        run_stand_in(StandIn(page=PAGE)) as here,
        run_stand_in(StandIn(page=PAGE)) as there,
    ):
        pages = (f"{here.url}/metrics", f"{there.url}/metrics")
        deployment = Deployment(Endpoint(here.url), pages, pid=os.getpid())
        with scrape(deployment, samples_processes=True) as seen:
            there.page = None
    first, last = seen.timeline
    assert (first["num_running"], first["kv_cache_usage"]) == (10.0, 0.5)
    assert "num_running" not in last
    assert seen.problems
    assert len({row["epoch_s"] for row in seen.process_samples}) == 2


def test_an_outage_is_a_time_without_replicas(server):
    with scrape(Deployment(Endpoint(server.url)), only_at_ends=True) as seen:
        server.replicas = 0
    summary = summarise_server(seen.counters, seen.timeline)
    assert [point["replicas"] for point in seen.timeline] == [1, 0]
    assert (summary["replicas_min"], summary["replicas_max"]) == (0, 1)
    # Who has never told a number may mean something else by its refusal.
    with scrape(Deployment(Endpoint(server.url))) as seen:
        pass
    assert not any("replicas" in point for point in seen.timeline)
