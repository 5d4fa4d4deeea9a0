"""The rendered demo on a real Ray cluster, watched by a real Prometheus.

One deployment for all of it: what the chart hands to Serve answers a chat completion;
then, under load, every panel and every rule finds its data.
"""

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.helm.conftest import (
    CHART,
    DEMO,
    of_kind,
    ray_service,
    render_example,
    require,
)
from tests.helm.live import (
    RAY_CLUSTER_NAME,
    Prometheus,
    RayCluster,
    deploy,
    keep_busy,
    read_log_lines,
)
from tests.pictures import draw_dashboard, picture_path
from tests.serving.conftest import DEMO_CONFIG, find_free_ports, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

LOAD_S = 45
PATIENCE_S = 120
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))

# No GPU here; everything else must show something.
NEEDS_HARDWARE = {"GPU"}

# What a healthy deployment has no data of: these show the zero they fall back to.
NEEDS_TROUBLE = {
    "Fallbacks",
    "Engine steps and failed snapshots",
    "Preemptions",
    "Requests that went on elsewhere",
    "Rates that fronts count alone",
    "Prefix cache hits",
}


@dataclass
class Deployment:
    """The demo under load."""

    cluster: RayCluster
    prometheus: Prometheus
    client: openai.OpenAI
    config: str


def rendered_demo(port: int) -> tuple[str, dict]:
    """Return the Serve config and the rules of the CPU example, on the models here."""
    models = yaml.safe_load(DEMO_CONFIG.read_text("utf-8"))["model"]
    folder = DEMO_CONFIG.parent
    values = {
        "config.model.target": str((folder / models["target"]).resolve()),
        "config.model.draft": str((folder / models["draft"]).resolve()),
        "config.http.port": str(port),
        "config.http.access.allow_anonymous": "true",
        # The only policy that predicts, so that no panel lacks its reason to be.
        "config.policy.name": "goodput",
        "config.replicas.max": "1",
        # Forecasts need it.
        "config.replicas.target_token_ms": "100",
        "monitoring.prometheusRule.enabled": "true",
        # A busy machine misses the usual tenth of a second without being ill.
        "monitoring.prometheusRule.latency.interTokenSeconds": "1",
    }
    objects = render_example(DEMO, *map("=".join, values.items()))
    (rule,) = of_kind(objects, "PrometheusRule")
    return ray_service(objects)["serveConfigV2"], rule["spec"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Deploy the demo and keep it busy for a while."""
    require("prometheus", "run .ci/extras, or put it on PATH")
    # Ray's sockets must fit into 107 characters.
    folder = tmp_path_factory.mktemp("live")
    (http_port,) = find_free_ports(1)
    config, rules = rendered_demo(http_port)
    cluster = RayCluster(folder)
    prometheus = Prometheus.start(folder, cluster.metrics_port, rules)
    try:
        # What the chart sets on the Pods.
        cluster.settings["RAY_PROMETHEUS_HOST"] = prometheus.url
        # Ray's own default: it drops a gauge that was not set again within two of
        # these periods, and Serve and the nodes set some of theirs every 5 to 10 s.
        cluster.settings["RAY_metrics_report_interval_ms"] = "10000"
        cluster.start_head(num_cpus=2)
        deploy(cluster, config, timeout_s=900)
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", timeout=300
        )
        put_under_load(client)
        wait_until(prometheus.is_scraping, 120)
        yield Deployment(cluster, prometheus, client, config)
    finally:
        cluster.end()
        prometheus.command.end()


def put_under_load(client: openai.OpenAI) -> None:
    """Send what is refused, and chats from six threads for LOAD_S seconds."""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="unknown", prompt="x")
    until_s = time.monotonic() + LOAD_S

    def keep_chatting(_: int) -> int:
        return keep_busy(until_s, lambda number: chat(client, number))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        counts = list(pool.map(keep_chatting, range(6)))
    assert sum(counts) > 6
    with pytest.raises(openai.RateLimitError, match="deadline_ms of 1;") as refusal:
        client.with_options(max_retries=0).completions.create(
            model="demo", prompt="x", extra_body={"deadline_ms": 1}
        )
    assert int(refusal.value.response.headers["retry-after"]) >= 1


def chat(client: openai.OpenAI, number: int) -> None:
    """Send one chat and wait for its answer."""
    client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"Count from {number} to 30."}],
        max_tokens=64,
    )


def test_what_the_chart_hands_to_serve_answers_a_chat(live):
    answer = live.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count from 1 to 5."}],
        max_tokens=24,
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def fill_in(expression: str) -> str:
    """Put values in the place of Grafana's variables."""
    named = expression.replace("$Cluster", RAY_CLUSTER_NAME)
    return named.replace("$__rate_interval", "1m")


def find_empty_panels(live: Deployment, file: Path) -> list[str]:
    """Return the queries of a dashboard that find no data."""
    empty = []
    for panel in json.loads(file.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", []):
            expression = fill_in(target["expr"])
            if panel["title"] not in NEEDS_TROUBLE:
                # Else a misspelt metric would look like nothing to report.
                expression = expression.removesuffix(" or vector(0)")
            if not live.prometheus.query(expression):
                empty.append(f"{panel['title']}: {expression}")
    return [line for line in empty if line.partition(":")[0] not in NEEDS_HARDWARE]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_returns_data_and_is_drawn(live, file, tmp_path):
    # Ray drops the gauges of an engine that idles, and a busy machine is late.
    until_s = time.monotonic() + PATIENCE_S
    while (empty := find_empty_panels(live, file)) and time.monotonic() < until_s:
        keep_busy(time.monotonic() + 5, lambda number: chat(live.client, number))
    assert not empty

    def query(expression: str, **times: float) -> list:
        return live.prometheus.query(fill_in(expression), **times)

    picture = picture_path(f"{file.stem}.png", tmp_path)
    draw_dashboard(file, query, LOAD_S / 60, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_rule_is_evaluated(live):
    assert live.prometheus.broken_rules() == []


def test_no_alert_fires_on_a_healthy_deployment(live):
    assert live.prometheus.query('ALERTS{alertstate="firing"}') == []


def test_targets_and_misses_belong_to_the_ray_cluster(live):
    for name, value in {
        "tetris:ttft_target_seconds": 2.5,
        "tetris:latency_objective_ratio": 0.99,
    }.items():
        (sample,) = live.prometheus.query(name)
        assert sample["metric"]["ray_io_cluster"] == RAY_CLUSTER_NAME
        assert float(sample["value"][1]) == value
    (sample,) = live.prometheus.query("tetris:ttft_misses:ratio_rate5m")
    assert sample["metric"]["namespace"] == "default"


def test_ray_s_dashboard_finds_prometheus(live):
    assert live.cluster.ask("/api/prometheus_health")["result"] is True


def test_logs_are_json_and_carry_the_client_s_request_id(live):
    live.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        extra_headers={"X-Request-ID": "from-the-client"},
    )

    def components() -> set[str]:
        lines = read_log_lines(live.cluster.folder, "session_latest/logs/serve/*.log")
        return {
            line.get("deployment") or line.get("component_name", "")
            for line in lines
            if line.get("request_id") == "from-the-client"
        }

    wait_until(lambda: len(components()) >= 3, 60)
    lines = read_log_lines(live.cluster.folder, "session_latest/logs/serve/*.log")
    (line,) = [
        line["request"]
        for line in lines
        if line.get("request_id") == "from-the-client" and "request" in line
    ]
    assert (line["output_tokens"], line["replays"]) == (2, 0)
    assert {"drafted_tokens", "accepted_tokens", "first_token_s"} <= line.keys()
    names = components()
    assert "proxy" in names
    for deployment in ("TetrisFront", "TetrisEngine"):
        assert any(deployment in name for name in names), names


def replica_ids(live: Deployment) -> set[str]:
    """Return all replicas that run, engines and fronts."""
    applications = live.cluster.ask("/api/serve/applications/")["applications"]
    return {
        replica["replica_id"]
        for application in applications.values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }


def redeploy(live: Deployment, user_config: dict[str, Any]) -> None:
    """Hand it to engines and fronts."""
    config = yaml.safe_load(live.config)
    (application,) = config["applications"]
    application["deployments"] = [
        {"name": name, "user_config": user_config}
        for name in ("TetrisEngine:demo", "TetrisFront")
    ]
    deploy(live.cluster, yaml.safe_dump(config), timeout_s=300)


def steps_by_policy(live: Deployment) -> set[str]:
    steps = live.prometheus.query("rate(ray_tetris_engine_steps_total[15s]) > 0")
    return {one["metric"]["policy"] for one in steps}


def test_policy_and_limits_change_while_streams_run(live):
    """By the same replicas; what makes no sense changes nothing."""
    before = replica_ids(live)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stop = threading.Event()

        def stream_on() -> int:
            count = 0
            while not stop.is_set():
                chat(live.client, count)
                count += 1
            return count

        streaming = pool.submit(stream_on)
        try:
            policy = {"name": "fixed", "draft_tokens": 1, "classes": {"new": {}}}
            redeploy(live, {"policy": policy, "replicas": {"max_queued_requests": 5}})
            wait_until(lambda: steps_by_policy(live) == {"fixed"}, PATIENCE_S)
            body = {"request_class": "new"}
            assert live.client.completions.create(
                model="demo", prompt="x", max_tokens=2, extra_body={"vllm_xargs": body}
            ).choices
            redeploy(live, {"policy": {"name": "goodput", "max_draft_tokens": 64}})
            wait_until(
                lambda: live.prometheus.query("ray_tetris_reload_failures_total > 0"),
                PATIENCE_S,
            )
            assert steps_by_policy(live) == {"fixed"}
        finally:
            stop.set()
        assert streaming.result() > 0
    assert replica_ids(live) == before
