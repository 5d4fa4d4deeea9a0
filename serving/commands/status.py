"""`tetris-serve status`: what a running server does, and what speculation gains."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from serving.commands.console import Console, complain
from serving.settings.model import Environment

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY: Final = "TETRIS_SERVE_KEY"
_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 1.5
"""How long the board is watched: rates need two looks, and it has news every .4 s."""

_UNREADABLE: Final = (AttributeError, KeyError, TypeError, ValueError)
"""Where something else than one of our servers answers."""

_HEAD: Final = (
    "replica",
    "policy",
    "running",
    "waiting",
    "tokens/s",
    "accepted",
    "step",
    "depth",
    "times no speculation",
)


class StatusError(RuntimeError):
    """The server cannot be asked, or is not well."""


def add_status_command(commands: Any) -> None:
    """Add the command to the parser's others."""
    parser = commands.add_parser(
        "status",
        help="say what a running server does, and what speculation gains",
        description=(
            "Ask a server for its health, and its board for what each replica does: "
            "requests, tokens per second, accepted drafts, and how many times the "
            "tokens of no speculation it brings, with a 95 % interval. Exits with 1 if "
            "the server does not answer or no replica runs."
        ),
    )
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="of the server (default: http://127.0.0.1 at the variable PORT or 8000)",
    )
    parser.add_argument(
        "--key",
        default=os.environ.get(_KEY),
        help=f"API key with the scope `metrics` (default: the variable {_KEY})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what the server says, as JSON"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    url = args.url or f"http://127.0.0.1:{Environment.read().port or 8000}"
    try:
        with _connect(url, args.key) as client:
            status = ask(client)
    except StatusError as error:
        complain(f"error: {url}: {error}")
        return 1
    Console().say(json.dumps(status) if args.json else describe(url, status))
    return 0


def _connect(url: str, key: str | None) -> httpx.Client:
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable():
        # Not repeated: it may be a key all the same.
        raise StatusError(f"no key looks like the one in --key or {_KEY}; make it anew")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Whatever proxy is set for others: this is most often this machine.
        return httpx.Client(
            base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )
    except (httpx.InvalidURL, UnicodeError) as error:
        raise StatusError(f"is no URL ({error})") from None


def ask(client: httpx.Client) -> dict[str, Any]:
    """Return `health` as the server has it, and `replicas`.

    Of each the newest that the board has, with the sums since the first look; None
    where there is no board.

    Raises:
        StatusError: The server does not answer, is not well, or wants another key.
    """
    try:
        health = client.get("/health")
        if health.status_code != httpx.codes.OK:
            raise StatusError(_explain(health))
        with client.stream("GET", "/board/events") as events:
            replicas = None
            if events.status_code == httpx.codes.OK:
                replicas = _add_up(_watch(events))
            elif events.status_code != httpx.codes.NOT_FOUND:
                events.read()
                raise StatusError(_explain(events))
        # Not a server's of ours if it is something else.
        return {"health": dict(health.json()), "replicas": replicas}
    except httpx.TransportError as error:
        raise StatusError(f"nobody answers ({error})") from None
    except (httpx.HTTPError, httpx.InvalidURL, *_UNREADABLE) as error:
        raise StatusError(f"no answer that can be read ({error!r})") from None


def _watch(events: httpx.Response) -> Iterator[list[dict[str, Any]]]:
    """Yield what each look of the board at the replicas has shown."""
    ends_s = time.monotonic() + _LOOK_S
    for line in events.iter_lines():
        kind, _, told = line.partition(": ")
        if kind == "data":
            yield json.loads(told).get("replicas", [])
        if time.monotonic() > ends_s:
            return


def _add_up(looks: Iterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    newest: dict[str, dict[str, Any]] = {}
    for look in looks:
        for replica in look:
            totals = replica.get("totals", {})
            known = newest.setdefault(replica["replica"], {"before": {}})
            known.pop("error", None)
            known["before"] = known["before"] or totals
            # A recording that began anew counts from zero.
            if totals and totals.get("steps", 0) < known["before"].get("steps", 0):
                known["before"] = dict.fromkeys(totals, 0)
            steps = replica.get("steps") or known.get("steps", [])
            known |= replica | {"steps": steps[-1:]}
    for known in newest.values():
        before = known.pop("before")
        known["totals"] = {
            name: value - before.get(name, 0)
            for name, value in known.get("totals", {}).items()
        }
    return list(newest.values())


def _explain(answer: httpx.Response) -> str:
    try:
        said = answer.json()["error"]["message"]
    except _UNREADABLE:
        said = answer.reason_phrase
    hint = ""
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        hint = f"; give a key with the scope `metrics`, by --key or {_KEY}"
    return f"{answer.status_code}: {said}{hint}"


def describe(url: str, status: dict[str, Any]) -> str:
    """Return what `ask` found, as a table."""
    health, replicas = status["health"], status["replicas"]
    count = health.get("running_replicas", 0)
    noun = "replica runs" if count == 1 else "replicas run"
    lines = [f"{url}: {health.get('status')}, {count} {noun}"]
    if "age_s" in health:
        lines.append(f"Ray Serve's controller has told nothing for {health['age_s']} s")
    if replicas is None:
        lines.append("no board (http.board: false): what replicas do is in the metrics")
    elif replicas:
        rows = [_HEAD, *map(_row, replicas)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    elif count:
        lines.append("the replicas do not answer: what they do is not known")
    return "\n".join(lines)


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    name, totals = (replica["replica"][:8], replica["policy"]), replica["totals"]
    if "error" in replica or not totals:
        # Of what hangs, or records no steps, nobody knows whether it is idle.
        unknown = ("-",) * (len(_HEAD) - len(name) - 1)
        return (*name, *unknown, replica.get("error", "-"))
    [step] = replica["steps"] or [{}]
    seconds, admitted = totals.get("seconds"), totals.get("admitted")
    return (
        *name,
        f"{step.get('running', 0)}",
        f"{step.get('waiting', 0)}",
        f"{totals['emitted'] / seconds:.0f}" if seconds else "idle",
        f"{totals['accepted'] / admitted:.0%}" if admitted else "-",
        f"{1e3 * seconds / totals['steps']:.1f} ms" if seconds else "-",
        f"{step.get('depth', '-')}",
        _gain(replica),
    )


def _gain(replica: dict[str, Any]) -> str:
    if "gain" not in replica:
        return "-"
    gain = "cannot tell yet"
    if replica["gain"]:
        ratio, lower, upper = replica["gain"]
        gain = f"{ratio:.2f} ({lower:.2f} to {upper:.2f})"
    return f"{gain}, held back" if replica.get("held") else gain
