"""A Ray cluster of our own and a Prometheus beside it, on one machine.

Both are real programs in processes of their own; nothing of them is left afterwards.
"""

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.helm import chart
from tests.helm.chart import ROOT, require
from tests.serving.conftest import (
    BIN,
    DEMO_CONFIG,
    Command,
    find_free_ports,
    wait_until,
)

RAY_CLUSTER_NAME = "demo-tetris-serve-x2c4v"
"""As KubeRay would name the Ray cluster of a release called demo."""

NUM_CHUNKS = 40
"""Lines that `tests.helm.slow_app` streams, which cannot be imported without Ray."""


@dataclass
class RayCluster:
    """`ray start` on ports of its own, with the token that KubeRay would hand out."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    nodes: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gcs_port, self.dashboard_port, self.metrics_port = find_free_ports(3)

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def env(self) -> dict[str, str]:
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs_port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's processes import what tests deploy.
            "PYTHONPATH": str(ROOT),
            **self.settings,
        }

    def start_head(self, num_cpus: int, options: str = "", **env: str) -> None:
        client_port, *_ = find_free_ports(1)
        self._start(
            f"--head --port={self.gcs_port} --num-cpus={num_cpus} "
            f"--dashboard-port={self.dashboard_port} --dashboard-host=127.0.0.1 "
            f"--ray-client-server-port={client_port} "
            f"--metrics-export-port={self.metrics_port} --temp-dir={self.folder} "
            f"{options}",
            **env,
        )

    def start_worker(self, num_cpus: int) -> None:
        metrics_port, *_ = find_free_ports(1)
        self._start(
            f"--address=127.0.0.1:{self.gcs_port} --num-cpus={num_cpus} "
            f"--metrics-export-port={metrics_port}",
        )

    def _start(self, options: str, **env: str) -> None:
        agent_port, grpc_port = find_free_ports(2)
        node = Command.start(
            [
                *(str(BIN / "ray"), "start", "--block", "--disable-usage-stats"),
                f"--dashboard-agent-listen-port={agent_port}",
                f"--dashboard-agent-grpc-port={grpc_port}",
                "--object-store-memory=200000000",
                *options.split(),
            ],
            self.folder / f"node{len(self.nodes)}.log",
            **self.env | env,
        )
        self.nodes.append(node)
        node.wait_for("Ray runtime started", 300)

    def run(self, *command: str, name: str, **env: str) -> Command:
        return Command.start(
            [str(BIN / command[0]), *command[1:]],
            self.folder / f"{name}.log",
            **self.env | env,
        )

    def ask(self, path: str, method: str = "GET", **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        options |= {"headers": headers, "timeout": 300, "trust_env": False}
        response = httpx.request(method, f"{self.dashboard}{path}", **options)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.end()


@dataclass
class Prometheus:
    """A Prometheus server that scrapes one Ray node every second.

    Its targets carry the labels that they get from the chart's PodMonitor.
    """

    command: Command
    url: str

    @classmethod
    def start(cls, folder: Path, metrics_port: int, rules: dict[str, Any]) -> Self:
        program = require("prometheus", "run .ci/extras, or put it on PATH")
        (port,) = find_free_ports(1)
        labels = {"namespace": "default", "ray_io_cluster": RAY_CLUSTER_NAME}
        targets = {"targets": [f"127.0.0.1:{metrics_port}"], "labels": labels}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "ray", "static_configs": [targets]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        command = Command.start(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            folder / "prometheus.log",
        )
        command.wait_for("ready to receive web requests", 120)
        return cls(command, f"http://127.0.0.1:{port}")

    def query(self, expression: str, **times: float) -> list[Any]:
        """Evaluate an expression, now or from `start` to `end` at every `step`.

        A rejected one fails the test.
        """
        response = httpx.get(
            f"{self.url}/api/v1/{'query_range' if times else 'query'}",
            params={"query": expression, **times},
            timeout=60,
            trust_env=False,
        )
        answer = response.json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def broken_rules(self) -> list[Any]:
        answer = httpx.get(f"{self.url}/api/v1/rules", timeout=60, trust_env=False)
        groups = answer.json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [rule for rule in rules if rule["health"] != "ok"]


def rendered_demo(
    port: int, engines: tuple[int, int] = (1, 1), **live: Any
) -> tuple[str, dict, dict[str, str]]:
    """Return the CPU example on the models here: config, rules, Serve's switches."""
    fewest, most = map(str, engines)
    models = yaml.safe_load(DEMO_CONFIG.read_text("utf-8"))["model"]
    folder = DEMO_CONFIG.parent
    values = {
        "config.model.target": str((folder / models["target"]).resolve()),
        "config.model.draft": str((folder / models["draft"]).resolve()),
        "config.http.port": str(port),
        "config.http.access.allow_anonymous": "true",
        # The only policy that predicts, so that no panel lacks its reason to be.
        "config.policy.name": "goodput",
        "config.replicas.min": fewest,
        "config.replicas.max": most,
        "config.replicas.num_cpus": "1",
        # Forecasts need it.
        "config.replicas.target_token_ms": "100",
        "monitoring.prometheusRule.enabled": "true",
        # A busy machine misses the usual targets without being ill.
        "monitoring.prometheusRule.latency.timeToFirstTokenSeconds": "10",
        "monitoring.prometheusRule.latency.interTokenSeconds": "1",
    }
    options = chart.options_of("demo-cpu", *map("=".join, values.items()))
    # At its usual share, the gain can be told after minutes.
    given = "--set-json=config.policy.audit=0.2", f"--set-json=live={json.dumps(live)}"
    objects = chart.render(*options, *given)
    (rule,) = objects.of_kind("PrometheusRule")
    variables = objects.pods["head"]["spec"]["containers"][0]["env"]
    own = [one for one in variables if one["name"].startswith("RAY_SERVE_")]
    switches = {variable["name"]: variable["value"] for variable in own}
    return objects.service["serveConfigV2"], rule["spec"], switches


def slow_stream(port: int, proxies: str, **options: object) -> str:
    """Return a Serve config of the slow application, with its deployment's options."""
    application = {
        "name": "slow",
        "import_path": "tests.helm.slow_app:app",
        "deployments": [{"name": "SlowStream", **options}],
    }
    config = {
        "proxy_location": proxies,
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
    return yaml.safe_dump(config)


def deploy(cluster: RayCluster, serve_config: str, timeout_s: float) -> None:
    """Deploy a config of one application as KubeRay does, until all of it runs."""
    config = yaml.safe_load(serve_config)
    (application,) = config["applications"]

    def look() -> Any:
        known = cluster.ask("/api/serve/applications/")["applications"]
        return known.get(application["name"], {})

    before_s = look().get("last_deployed_time_s", 0)
    cluster.ask("/api/serve/applications/", "PUT", json=config)

    def is_running() -> bool:
        details = look()
        if details.get("last_deployed_time_s", 0) <= before_s:
            return False
        assert details["status"] not in {"DEPLOY_FAILED", "UNHEALTHY"}, details
        return details["status"] == "RUNNING"

    wait_until(is_running, timeout_s)
