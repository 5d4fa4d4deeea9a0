"""A fleet over two hosts, of which one can be killed and started anew.

A network namespace stands for the other host, which takes root.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import yaml

from loadtest.client.endpoint import Endpoint
from loadtest.compare.arms import Arm
from loadtest.compare.deployment import (
    Deployment,
    find_config,
    find_free_port,
    run_logged,
)
from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.result_folder import read_tail

_NEAR_IP: Final = "10.213.8.1"
FAR_IP: Final = "10.213.8.2"
_NEAR_END, _FAR_END, _NAMESPACE = "storm-near", "storm-far", "storm-host"
_TIMEOUT_S = 600.0
_SETTLE_S = 6.0
FIRST: Final = -15
"""A session's niceness."""
_OBJECT_STORE_BYTES = 200_000_000
_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "4000",
    # As the chart has it, and `tetris-serve up`.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "4",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


@contextmanager
def _wire() -> Iterator[None]:
    """Have a host of its own while the block runs, and a wire to it."""
    if os.geteuid() != 0:
        raise LoadTestError("a second host is a network namespace: run this as root")
    # What a run that was killed has left.
    for left in (f"netns delete {_NAMESPACE}", f"link delete {_NEAR_END}"):
        subprocess.run(["ip", *left.split()], capture_output=True)
    _ip(f"netns add {_NAMESPACE}")
    try:
        _ip(f"link add {_NEAR_END} type veth peer name {_FAR_END} netns {_NAMESPACE}")
        _ip(f"address add {_NEAR_IP}/30 dev {_NEAR_END}")
        _ip(f"link set {_NEAR_END} up")
        _ip(f"-n {_NAMESPACE} address add {FAR_IP}/30 dev {_FAR_END}")
        _ip(f"-n {_NAMESPACE} link set {_FAR_END} up")
        _ip(f"-n {_NAMESPACE} link set lo up")
        yield
    finally:
        _ip(f"netns delete {_NAMESPACE}")


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        raise LoadTestError(f"ip {words}: {done.stderr.strip()}")


@dataclass
class Hosts:
    """A head with the fronts and all engines but one, which another host has.

    Attributes:
        settings: `section.setting=value`, beside those of the file `config`.
        num_engines: That there are to be, as the chart says it to Serve; hosts have
            seats for as many as at the start.
        changed: Settings likewise, since the start.
    """

    logs: Path
    config: str
    settings: Sequence[str]
    num_engines: int
    changed: Sequence[str] = ()
    _far: ExitStack = field(default_factory=ExitStack)
    _num_starts: int = 0
    _gcs_port: int = field(default_factory=find_free_port)
    _dashboard_port: int = field(default_factory=find_free_port)
    _port: int = field(default_factory=find_free_port)
    _arm: Arm | None = None

    @contextmanager
    def run(self, arm: Arm, say: Callable[[str], None]) -> Iterator[Deployment]:
        """Have a policy served by both hosts while the block runs."""
        self._arm, metrics = arm, find_free_port()
        with _wire(), ExitStack() as nodes:
            say(f"starting two hosts; their output goes to {self.logs}")
            head = (
                f"--head --port={self._gcs_port} --node-ip-address={_NEAR_IP} "
                f"--dashboard-port={self._dashboard_port} "
                f"--metrics-export-port={metrics} "
                f"--ray-client-server-port={find_free_port()} --labels=at=head "
                f"--num-cpus={self.num_engines - 1}"
            )
            self._start_node(nodes, "head", head)
            nodes.callback(self._far.close)
            self.start_far()
            self.deploy()
            endpoint = Endpoint(f"http://{_NEAR_IP}:{self._port}")
            self._wait_until_ready(endpoint, self.num_engines)
            pages = (f"http://{_NEAR_IP}:{metrics}/metrics",)
            yield Deployment(endpoint, pages, _SETTLE_S, os.getpid())

    def deploy(self) -> None:
        """Have Serve run what the attributes say.

        Raises:
            LoadTestError: It is refused.
        """
        file = self.logs / "serve.yaml"
        file.write_text(yaml.safe_dump(self._describe()))
        command = [find_program("serve"), "deploy", str(file)]
        log = self.logs / "deploy.log"
        with run_logged(
            [*command, "--address", self._dashboard()], log, self.env()
        ) as deploying:
            if deploying.wait(_TIMEOUT_S):
                raise LoadTestError(f"serve deploy: {read_tail(log)}")

    def start_far(self) -> int:
        """Start the other host, again if it was killed; return its first process's id.

        As a Pod is, it is started again when it gives up: Ray waits 20 s for its parts.
        """
        options = f"--address={_NEAR_IP}:{self._gcs_port} --node-ip-address={FAR_IP} "
        options += "--num-cpus=1"
        enter = ("nsenter", f"--net=/run/netns/{_NAMESPACE}")
        for is_last in (False, False, True):
            self._far.close()
            self._num_starts += 1
            name = f"far-{self._num_starts}"
            try:
                return self._start_node(self._far, name, options, *enter)
            except LoadTestError:
                if is_last:
                    raise
        raise AssertionError

    def set_wire(self, *, up: bool) -> None:
        """Let the other host be reached, or nobody."""
        _ip(f"-n {_NAMESPACE} link set {_FAR_END} {'up' if up else 'down'}")

    @staticmethod
    def is_far(process: psutil.Process) -> bool:
        """Return whether a raylet is the other host's."""
        with suppress(psutil.NoSuchProcess):
            return any(FAR_IP in word for word in process.cmdline())
        return False

    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self._dashboard_port}"

    def env(self) -> dict[str, str]:
        """Return what a command needs to reach them."""
        return {**os.environ, **_ENV, "RAY_ADDRESS": f"{_NEAR_IP}:{self._gcs_port}"}

    def _start_node(
        self, stack: ExitStack, name: str, options: str, *prefix: str
    ) -> int:
        """Start a host as a session of processes; return its first one's id."""
        agent = f"--dashboard-agent-listen-port={find_free_port()}"
        rest = f"--object-store-memory={_OBJECT_STORE_BYTES} {agent}"
        command = [
            *prefix,
            find_program("ray"),
            "start",
            "--block",
            *shlex.split(options),
        ]
        log = self.logs / f"{name}.log"
        node = stack.enter_context(
            run_logged([*command, *rest.split()], log, self.env())
        )
        set_priority(node.pid, FIRST)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if node.poll() is not None or time.monotonic() > deadline_s:
                raise LoadTestError(f"{name} did not start:\n{read_tail(log)}")
            time.sleep(0.2)
        set_priority(node.pid, 0)
        return node.pid

    def _describe(self) -> dict[str, Any]:
        """Return a file for `serve deploy`."""
        described = yaml.safe_load((REPO / "configs/serve/tiny.yaml").read_text())
        described["http_options"] = {"host": "0.0.0.0", "port": self._port}
        # Storms are not for others' servers.
        assert self._arm is not None
        assert self._arm.policy is not None
        policy = self._arm.policy.settings() | {"audit": 0}
        own = {f"policy.{name}": value for name, value in policy.items()}
        own |= {"config": str(find_config(self.config).resolve())}
        # So that no host takes another's engine.
        own |= {"replicas.num_cpus": 1, "http.fronts.label_selector": {"at": "head"}}
        for setting in (*self.settings, *self.changed):
            name, _, value = setting.partition("=")
            own[name] = yaml.safe_load(value)
        (application,) = described["applications"]
        application["args"] |= own
        model = yaml.safe_load(find_config(self.config).read_text())["model"]["id"]
        num = self.num_engines
        told = {"user_config": {"replicas": {"min": num}}}
        bounds = {"autoscaling_config": {"min_replicas": num, "max_replicas": num}}
        application["deployments"] = [
            {"name": f"TetrisEngine:{model}", **bounds, **told},
            {"name": "TetrisFront", **told},
        ]
        return dict(described)

    def _wait_until_ready(self, endpoint: Endpoint, num: int) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while endpoint.why_silent() is not None or endpoint.count_replicas() != num:
            if time.monotonic() > deadline_s:
                page = f"{self._dashboard()}/api/serve/applications/"
                answer = httpx.get(page, trust_env=False, timeout=60).text
                raise LoadTestError(f"the fleet is not ready: {answer[:2000]}")
            time.sleep(0.5)


def set_priority(pid: int, niceness: int) -> None:
    """Say before whom the session of a process has cores, if Linux lets us.

    Hosts have cores of their own in truth. Where three engines want two, one that
    starts would get so little that it took five minutes.
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def find_program(name: str) -> str:
    """Return a command of the environment that runs us."""
    return str(Path(sys.executable).with_name(name))
