"""`tetris-serve drain-node`: empty a Ray node before its machine goes.

What Kubernetes calls before it stops a worker Pod. Ray Serve then starts replacements
elsewhere, sends new requests there, and lets the running ones finish. So does the
node's proxy, through which streams of fronts on other nodes come.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from serving.commands.console import Console, complain

_POLL_S: Final = 1.0
_REASON: Final = "DRAIN_NODE_REASON_PREEMPTION"
"""Unlike an idle termination, it is accepted while replicas run."""

_PROXIES: Final = frozenset({"HAProxyManager", "ProxyActor"})
"""Serve's actors with clients' connections; one that drains stays for half a minute."""


class DrainError(RuntimeError):
    """The node cannot be drained."""


def add_drain_command(commands: Any) -> None:
    """Add the command to the program's parser.

    Args:
        commands: What `add_subparsers` returned.
    """
    parser = commands.add_parser(
        "drain-node",
        help="move the replicas of this Ray node elsewhere and wait for its requests",
        description=(
            "Tell Ray that this node is about to stop, and return once no replica and "
            "no proxy is left on it. Exits with 1 if one is at the deadline, or if Ray "
            "refuses."
        ),
    )
    parser.add_argument(
        "--deadline",
        type=int,
        default=150,
        metavar="SECONDS",
        help="when the node goes at the latest (default: 150)",
    )
    parser.add_argument(
        "--node-id", metavar="ID", help="another node than the one on this machine"
    )
    parser.set_defaults(run=lambda args: drain_node(args.deadline, args.node_id))


def drain_node(deadline_s: int, node_id: str | None = None) -> int:
    """Drain a Ray node and wait until it is empty.

    No driver is started for it: that would be one more process which keeps the node
    from being empty, and which ends with it.

    Args:
        deadline_s: Seconds after which whatever still runs is given up.
        node_id: Ray's id of the node in hex; the one node on this machine when None.

    Returns:
        The exit code: 0 once no replica and no proxy is left, 1 if one is at the
        deadline or Ray cannot be asked.
    """
    ends_s = time.monotonic() + deadline_s
    console = Console()
    # Ray asks its head by HTTP, which no proxy for others has a way to.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
    try:
        node_id = node_id or _find_own_node()
        _ask_ray(node_id, deadline_s)
        left = _wait_until_empty(lambda: _count_busy(node_id), ends_s, console)
    except DrainError as error:
        complain(f"error: {error}")
        return 1
    if left:
        complain(f"error: {left} replicas or proxies still run after {deadline_s} s")
        return 1
    console.say(f"drained: no replica and no proxy is left on node {node_id}")
    return 0


def _find_own_node() -> str:
    from ray.util import get_node_ip_address
    from ray.util.state import list_nodes

    address = get_node_ip_address()
    own = _answer_of(
        list_nodes, filters=[("node_ip", "=", address), ("state", "=", "ALIVE")]
    )
    if len(own) != 1:
        raise DrainError(
            f"{len(own)} Ray nodes have the address {address}; name one with --node-id"
        )
    return str(own[0].node_id)


def _ask_ray(node_id: str, deadline_s: int) -> None:
    """Have Ray drain a node; this hidden command is all that it offers for that."""
    command = [
        *(str(Path(sys.executable).parent / "ray"), "drain-node"),
        *("--node-id", node_id, "--reason", _REASON),
        *("--reason-message", "the node is about to stop"),
        *("--deadline-remaining-seconds", str(deadline_s)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise DrainError(
            f"Ray does not drain node {node_id}: {result.stderr or result.stdout}"
        )


def _wait_until_empty(
    count_busy: Callable[[], int], ends_s: float, console: Console
) -> int:
    """Wait until nothing is busy, and return how many are when time is up.

    Ray drains by itself: while its head is away, what is left is not known.

    Raises:
        DrainError: Ray does not answer when time is up.
    """
    while True:
        try:
            left = count_busy()
            said = f"{left} replicas or proxies left"
        except DrainError as error:
            if time.monotonic() >= ends_s:
                raise
            left, said = 1, str(error)
        if not left or time.monotonic() >= ends_s:
            return left
        console.step(f"draining: {said}")
        time.sleep(_POLL_S)


def _count_busy(node_id: str) -> int:
    from ray.util.state import list_actors

    actors = _answer_of(
        list_actors, filters=[("state", "=", "ALIVE"), ("node_id", "=", node_id)]
    )
    names = [actor.class_name for actor in actors]
    return sum(one.startswith("ServeReplica:") or one in _PROXIES for one in names)


def _answer_of(question: Callable[..., list[Any]], **options: Any) -> list[Any]:
    """Ask Ray's state API, which has an exception type for every way to fail."""
    try:
        return question(**options)
    except Exception as error:
        raise DrainError(f"Ray does not answer: {error}") from error
