"""The rendered demo on a real Ray cluster, watched by a real Prometheus.

One deployment for all of it: what the chart hands to Serve answers a chat completion;
then, under load, every panel and every rule finds its data.
"""

import concurrent.futures
import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from loadtest.compare.processes import find_processes
from tests.conftest import run
from tests.helm import chart
from tests.helm.live import (
    RAY_CLUSTER_NAME,
    Prometheus,
    RayCluster,
    deploy,
    rendered_demo,
)
from tests.pictures import draw_dashboard, picture_path
from tests.serving.conftest import (
    DEMO_CONFIG,
    START_TIMEOUT_S,
    Server,
    clean_environment,
    find_free_ports,
    wait_until,
)
from tests.serving.test_cli import long_stream

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

LOAD_S = 30
CLIENTS = (1, 2, 5, 12)
PATIENCE_S = 120
STREAMS = 100
# Fronts send them after 10 s, engine or not.
HEADERS_S = 25
DASHBOARDS = sorted((chart.FOLDER / "dashboards").glob("*.json"))

# What a healthy deployment has no data of: these show the zero they fall back to.
NEEDS_TROUBLE = {
    "Fallbacks",
    "Requests without drafts",
    "Engine steps and failed snapshots",
    "Preemptions",
    "Requests that went on elsewhere",
    "Rates that fronts count alone",
    "Prefix cache hits",
}


@dataclass
class Deployment:
    cluster: RayCluster
    prometheus: Prometheus
    client: openai.OpenAI
    port: int

    def reload(self, engines: tuple[int, int] = (1, 1), **live: Any) -> None:
        config, *_ = rendered_demo(self.port, engines, **live)
        deploy(self.cluster, config, timeout_s=300)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    chart.require("prometheus", "run .ci/extras, or put it on PATH")
    # Ray's sockets must fit into 107 characters.
    folder = tmp_path_factory.mktemp("live")
    (http_port,) = find_free_ports(1)
    config, rules, switches = rendered_demo(http_port)
    cluster = RayCluster(folder, switches)
    prometheus = Prometheus.start(folder, cluster.metrics_port, rules)
    with prometheus.command, cluster:
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
        yield Deployment(cluster, prometheus, client, http_port)


def chat(client: openai.OpenAI, number: int, **options: Any) -> int:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"Count from {number} to 30."}],
        max_tokens=64,
        **options,
    )
    tokens = int(answer.usage.completion_tokens)
    assert tokens > 0
    return tokens


def keep_chatting(client: openai.OpenAI, is_over: Callable[[], bool]) -> int:
    count = 0
    while not is_over():
        chat(client, count)
        count += 1
    return count


def keep_streaming(client: openai.OpenAI, is_over: Callable[[], bool]) -> int:
    """Begin a stream each second; each is taken, and waits for an engine if it must."""

    def stream() -> None:
        began_s = time.monotonic()
        chunks = client.completions.create(
            model="demo", prompt="Count from 1 to 30.", max_tokens=64, stream=True
        )
        assert time.monotonic() - began_s < HEADERS_S
        *_, last = chunks
        assert last.choices[0].finish_reason

    streams = []
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        while not is_over():
            streams.append(pool.submit(stream))
            time.sleep(1)
    return len([one.result() for one in streams])


def time_is_up(after_s: float) -> Callable[[], bool]:
    until_s = time.monotonic() + after_s
    return lambda: time.monotonic() > until_s


def put_under_load(client: openai.OpenAI) -> None:
    """Send what is refused, and LOAD_S seconds of chats, of more and more clients.

    A gain is found out for each octave of load by itself, and told of all together.
    """
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="unknown", prompt="x")
    for num_clients in CLIENTS:
        is_over = time_is_up(LOAD_S / len(CLIENTS))
        with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
            chats = pool.map(
                keep_chatting, num_clients * [client], num_clients * [is_over]
            )
            assert min(chats) > 0
    once = client.with_options(max_retries=0)
    late = {"deadline_ms": 1}
    for stream, extra in ((False, late), (True, {"vllm_xargs": late})):
        with pytest.raises(openai.RateLimitError, match="deadline_ms of 1;") as refusal:
            once.completions.create(
                model="demo", prompt="x", stream=stream, extra_body=extra
            )
        assert int(refusal.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("demo", 0, "completion_tokens"),
        ("another", 1, "does not exist"),
        ("nobody listens", 1, "refused"),
    ],
)
def test_helms_test_tells_whether_the_model_answers(live, model, code, words):
    (pod,) = chart.demo().of_kind("Pod")
    program, *arguments = pod["spec"]["containers"][0]["command"]
    assert program == "python"
    url = str(live.client.base_url).removesuffix("/v1/")
    if model == "nobody listens":
        url = f"http://127.0.0.1:{find_free_ports(1)[0]}"
    given = {"TETRIS_URL": url, "TETRIS_MODEL": model, "TETRIS_WAIT_S": "0"}
    env = clean_environment(**given)
    result = run(sys.executable, *arguments, env=env, status=code)
    assert words in result.stdout + result.stderr


def query(live: Deployment, expression: str, **times: float) -> list[Any]:
    """Ask as a dashboard does, with values in the place of Grafana's variables."""
    named = expression.replace("$Cluster", RAY_CLUSTER_NAME)
    return live.prometheus.query(named.replace("$__rate_interval", "1m"), **times)


def find_empty_panels(live: Deployment, file: Path) -> list[str]:
    empty = []
    for panel in json.loads(file.read_text("utf-8"))["panels"]:
        # No GPU here; everything else must show something.
        for target in panel.get("targets", []) if panel["title"] != "GPU" else []:
            expression = target["expr"]
            if panel["title"] not in NEEDS_TROUBLE:
                # Else a misspelt metric would look like nothing to report.
                expression = expression.removesuffix(" or vector(0)")
            if not query(live, expression):
                empty.append(f"{panel['title']}: {expression}")
    return empty


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_returns_data_and_is_drawn(live, file, tmp_path):
    # Ray drops the gauges of an engine that idles, and a busy machine is late.
    is_over = time_is_up(PATIENCE_S)
    while (empty := find_empty_panels(live, file)) and not is_over():
        keep_chatting(live.client, time_is_up(5))
    assert not empty

    picture = picture_path(f"{file.stem}.png", tmp_path)
    draw_dashboard(file, functools.partial(query, live), LOAD_S / 60, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_rule_is_evaluated_and_no_alert_fires(live):
    """On a healthy deployment, whose Prometheus Ray's dashboard finds too."""
    assert live.prometheus.broken_rules() == []
    assert live.prometheus.query('ALERTS{alertstate="firing"}') == []
    assert live.cluster.ask("/api/prometheus_health")["result"] is True


def test_logs_are_json_and_carry_the_client_s_request_id(live):
    headers = {"X-Request-ID": "from-the-client"}
    tokens = chat(live.client, 1, extra_headers=headers)

    def entries() -> list[dict[str, Any]]:
        found = []
        for file in live.cluster.folder.glob("session_latest/logs/serve/*.log"):
            # The last line may still be in the writing.
            *lines, _ = file.read_text("utf-8", "replace").split("\n")
            found += [json.loads(line) for line in lines if line[:1] == "{"]
        return [one for one in found if one.get("request_id") == "from-the-client"]

    def components() -> str:
        names = (one.get("deployment") or one["component_name"] for one in entries())
        return " ".join(names)

    wanted = ("TetrisFront", "TetrisEngine")
    wait_until(lambda: all(map(components().__contains__, wanted)), 60)
    wait_until(lambda: any("request" in one for one in entries()), 60)
    (told,) = [one["request"] for one in entries() if "request" in one]
    assert (told["output_tokens"], told["replays"]) == (tokens, 0)
    assert {"drafted_tokens", "accepted_tokens", "first_token_s"} <= told.keys()


def replica_ids(live: Deployment, deployment: str = "") -> set[str]:
    """Return the replicas that run, of deployments whose names begin so."""
    applications = live.cluster.ask("/api/serve/applications/")["applications"]
    return {
        replica["replica_id"]
        for application in applications.values()
        for name, one in application["deployments"].items()
        if name.startswith(deployment)
        for replica in one["replicas"]
        if replica["state"] == "RUNNING"
    }


def engine_ids(live: Deployment) -> set[str]:
    return replica_ids(live, "TetrisEngine")


def steps_by_policy(live: Deployment) -> set[str]:
    steps = live.prometheus.query("rate(ray_tetris_engine_steps_total[15s]) > 0")
    return {one["metric"]["policy"] for one in steps}


@contextlib.contextmanager
def busy_with(
    live: Deployment, keep_asking: Callable[[openai.OpenAI, Callable[[], bool]], int]
) -> Iterator[None]:
    """Ask all the while; no request may fail."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stop, client = threading.Event(), live.client.with_options(max_retries=0)
        chats = pool.submit(keep_asking, client, stop.is_set)
        try:
            yield
        finally:
            stop.set()
        assert chats.result() > 0


def test_policy_and_limits_change_while_requests_run(live):
    """By the same replicas; what makes no sense changes nothing."""
    before = replica_ids(live)
    with busy_with(live, keep_chatting):
        policy = {"name": "fixed", "draft_tokens": 1, "classes": {"new": {}}}
        live.reload(policy=policy, replicas={"max_queued_requests": 5})
        wait_until(lambda: steps_by_policy(live) == {"fixed"}, PATIENCE_S)
        body = {"request_class": "new"}
        assert live.client.completions.create(
            model="demo", prompt="x", max_tokens=2, extra_body={"vllm_xargs": body}
        ).choices
        live.reload(policy={"name": "goodput", "max_draft_tokens": 64})
        failures = "ray_tetris_reload_failures_total > 0"
        wait_until(lambda: live.prometheus.query(failures), PATIENCE_S)
        # For some seconds a late report may leave no rate at all.
        seen = wait_until(lambda: steps_by_policy(live), PATIENCE_S)
        assert seen == {"fixed"}
    assert replica_ids(live) == before


def test_engines_come_and_no_other_is_restarted(live):
    def fewest_and_wanted() -> tuple[int, int]:
        applications = live.cluster.ask("/api/serve/applications/")["applications"]
        engines = applications["tetris"]["deployments"]["TetrisEngine:demo"]
        bounds = engines["deployment_config"]["autoscaling_config"]
        return bounds["min_replicas"], engines["target_num_replicas"]

    before = replica_ids(live)
    with busy_with(live, keep_chatting):
        live.reload(engines=(2, 2))
        wait_until(lambda: len(engine_ids(live)) == 2, START_TIMEOUT_S)
        assert replica_ids(live) > before
        live.reload(engines=(1, 2), replicas={"max_queued_requests": 50})
        # An update alone takes away nothing that the load may need.
        wait_until(lambda: fewest_and_wanted()[0] == 1, PATIENCE_S)
        assert fewest_and_wanted() == (1, 2)


def test_a_redeploy_lets_streams_finish_and_begin_and_an_engine_goes_alone(live):
    """Of our own file for Serve, `configs/serve/tiny.yaml`, in the chart's place.

    Engines of both builds run at a time, and must not be taken for each other: whoever
    speaks for those before knows too long requests for fine ones.
    """
    live.reload(engines=(2, 2))
    wait_until(lambda: len(engine_ids(live)) == 2, START_TIMEOUT_S)
    content = yaml.safe_load(rendered_demo(live.port)[0])
    own = yaml.safe_load((chart.ROOT / "configs" / "serve" / "tiny.yaml").read_text())
    (application,) = own["applications"]
    application["args"] |= {
        "config": str(DEMO_CONFIG),
        "engine.max_model_len": 768,
    }
    content["applications"] = [application]

    def scaled(*engines: int) -> str:
        rendered = yaml.safe_load(rendered_demo(live.port, engines)[0])
        scale = rendered["applications"][0]["deployments"][0]
        del scale["user_config"]
        application["deployments"] = [scale]
        return yaml.safe_dump(content)

    head, before = live.cluster.nodes[0], engine_ids(live)

    def redeployed() -> bool:
        ids = engine_ids(live)
        return len(ids) == 2 and not ids & before

    def has_one_front() -> bool:
        roles = [role for role, _ in find_processes(head.process.pid)]
        return roles.count("front") == 1

    server = Server(head, live.port, live.cluster.metrics_port)
    with busy_with(live, keep_streaming), long_stream(server):
        deploy(live.cluster, scaled(2, 2), timeout_s=START_TIMEOUT_S)
        wait_until(redeployed, START_TIMEOUT_S)

    wait_until(has_one_front, 180)
    assert chat(live.client, 1)
    with pytest.raises(openai.BadRequestError, match="768"):
        live.client.completions.create(model="demo", prompt=[5] * 800, max_tokens=1)

    both = replica_ids(live)
    with busy_with(live, keep_chatting):
        deploy(live.cluster, scaled(1, 1), timeout_s=300)
        wait_until(lambda: len(engine_ids(live)) == 1, START_TIMEOUT_S)
    assert replica_ids(live) < both
