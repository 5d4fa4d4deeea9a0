"""A Ray instance of our own: started here, and gone without a trace afterwards."""

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from serving.compat_ray import local_node
from serving.local.kept_state import choose_namespace, forget_state
from serving.settings.model import Environment, RedisForRay

_PR_SET_CHILD_SUBREAPER: Final = 36
_OBJECT_STORE_BYTES: Final = 256 << 20
"""Requests and tokens are passed by value; Ray's default is a third of the memory."""

_MAX_MESSAGE_BYTES: Final = 512 << 20
"""Of one message between replicas. Serve's 4 MiB are less than a reply with the log
probabilities of a long prompt; bodies have a limit of their own."""

_TERM_GRACE_S: Final = 5.0
_GCS: Final = "gcs_server"

DISPENSABLE: Final = frozenset(
    {"monitor", "log_monitor", "dashboard", "ray_client_server"}
)
"""Head processes of Ray that no request needs, as `find_dead_processes` has them."""


def prepare_environment(environment: Environment) -> None:
    """Set Ray's own switches; call it before anything imports Ray.

    Token authentication stays on, as is Ray's default: Ray's own ports listen on all
    interfaces, and whoever reaches them may run code. The token is the one that Ray's
    command-line tools use too (see `token_file`), or one for this run only where no
    file can be written. `RAY_AUTH_MODE=disabled` switches it off.

    In a Redis of `RAY_REDIS_ADDRESS` each run has a place of its own, or it would go
    on with the deployment of the one before.

    Args:
        environment: What the user has set.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # A chunk of a stream costs half as much between replicas as by Ray's objects.
    os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    os.environ.setdefault(
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(_MAX_MESSAGE_BYTES)
    )
    # Requests and their chunks change threads twice less on their way through a front.
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
    # Three looks find a proxy dead; at Serve's ten seconds each, nobody is answered for
    # half a minute.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    # Ray's workers, engines included, would otherwise yield to every other program.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if environment.redis is not None:
        choose_namespace()
    if environment.ray_auth_mode is None:
        # Said aloud, so that Ray does not warn about its default.
        os.environ["RAY_AUTH_MODE"] = "token"
        home = token_file().parent.parent
        if not token_file().exists() and not os.access(home, os.W_OK):
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class LocalRay:
    """Ray's head processes as children of this process.

    Every process that Ray, Serve and vLLM start below is one of our descendants, and
    stays one when its parent dies, because this process adopts orphans. That is how
    `stop` finds what is left over without ever touching anybody else's Ray.
    """

    def __init__(
        self, dashboard_port: int, metrics_port: int, redis: RedisForRay | None = None
    ) -> None:
        """Remember the ports; nothing is started yet.

        Args:
            dashboard_port: Of the dashboard.
            metrics_port: Where all metrics are exported.
            redis: Where Ray keeps what its GCS knows; None for in the GCS alone.
        """
        self.dashboard_port = dashboard_port
        self.metrics_port = metrics_port
        self._redis = redis
        self._not_ours: frozenset[int] = frozenset()

    def start(self) -> None:
        """Start Ray, with its dashboard on the loopback interface."""
        _adopt_orphans()
        self._not_ours = frozenset(process.pid for process in _descendants())
        import ray

        ray.init(
            address="local",
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=self.dashboard_port,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _metrics_export_port=self.metrics_port,
            **_login_of(self._redis),
        )

    @property
    def log_dir(self) -> Path:
        """Folder of the logs of every Ray, Serve and vLLM process."""
        return Path(local_node().get_logs_dir_path())

    def find_dead_processes(self) -> list[str]:
        """Name the head processes of Ray that have died."""
        node = local_node()
        dead = node.dead_processes() if node is not None else [("node", None)]
        return [str(name) for name, _ in dead]

    def revive(self, name: str) -> bool:
        """Start a head process of Ray again that has died, if all it knew is kept.

        Raylet, workers and Serve come back to it by themselves, at the same port.

        Args:
            name: As `find_dead_processes` has it.

        Returns:
            Whether it was; else this Ray is lost.
        """
        if name != _GCS or self._redis is None:
            return False
        node = local_node()
        # Of a process that has died this only forgets.
        node.kill_gcs_server(check_alive=False)
        node.start_gcs_server()
        return True

    def stop(self) -> None:
        """Stop Ray and end whatever is left of our descendants. Idempotent."""
        import ray

        with contextlib.suppress(Exception):
            ray.shutdown()
        self.kill()
        if self._redis is not None:
            forget_state(self._redis)

    def kill(self) -> None:
        """End all of our descendants, politely first, without asking Ray."""
        deadline_s = time.monotonic() + _TERM_GRACE_S
        for process in self._leftovers():
            with contextlib.suppress(psutil.Error):
                process.terminate()
        while leftovers := list(self._leftovers()):
            if time.monotonic() > deadline_s:
                for process in leftovers:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            time.sleep(0.1)

    def _leftovers(self) -> Iterator[psutil.Process]:
        _reap()
        for process in _descendants():
            if process.pid in self._not_ours:
                continue
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _login_of(redis: RedisForRay | None) -> dict[str, str]:
    if redis is None:
        return {}
    return {"_redis_username": redis.username, "_redis_password": redis.password}


def token_file() -> Path:
    """The file in which Ray keeps the token that its dashboard asks for."""
    return Path.home() / ".ray" / "auth_token"


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> list[psutil.Process]:
    try:
        return list(psutil.Process().children(recursive=True))
    except psutil.Error:
        return []


def _reap() -> None:
    """Collect exited children, so that they do not linger as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
