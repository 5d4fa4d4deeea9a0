"""Options of the Locust file, for the command line and Locust's web page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client_chaos import ClientAction, parse_client_actions
from .errors import LoadTestError
from .load import Load, parse_load
from .workloads import GENERATED, Workload, make_workload

if TYPE_CHECKING:
    # Importing it patches the whole process.
    from locust.argument_parser import LocustArgumentParser

HEADER_VARIABLE = "TETRIS_LOADTEST_HEADER"
"""In the environment, not among arguments: everybody may read those."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What one run of the Locust file does.

    Attributes:
        host: Root of the endpoint.
        model: Name to ask for; empty for the first one that the endpoint lists.
        load: Arrivals.
        workload: Name of the workload.
        duration_s: Time in which requests are sent.
        num_requests: Stop after as many; 0 for no limit. Closed loop only.
        drain_s: Time that running requests get to finish afterwards.
        max_tokens: Longest reply.
        temperature: Of sampling.
        seed: Equal seeds send equal requests at equal times (open loop).
        ttft_target_ms: For goodput; None for none.
        tpot_target_ms: For goodput; None for none.
        extra_body: More fields of every request.
        headers: More headers of every request.
        read_timeout_s: Longest time without a byte.
        total_timeout_s: Longest time of one request.
        max_prompt_chars: Leaves out longer conversations of a file.
        run_id: Begins all request ids.
        records: File for outcomes, as JSON lines.
        actions: What clients do to their own streams.
    """

    host: str
    model: str
    load: Load
    workload: str
    duration_s: float
    num_requests: int
    drain_s: float
    max_tokens: int
    temperature: float
    seed: str
    ttft_target_ms: float | None
    tpot_target_ms: float | None
    extra_body: dict[str, Any]
    headers: dict[str, str]
    read_timeout_s: float
    total_timeout_s: float
    max_prompt_chars: int | None
    run_id: str
    records: Path | None
    actions: tuple[ClientAction, ...]

    def make_workload(self) -> Workload:
        """Make the workload; equal for all arms, since only the seed decides."""
        return make_workload(self.workload, self.seed, self.max_prompt_chars)


def add_options(parser: LocustArgumentParser) -> None:
    """Add our options to Locust's."""
    group = parser.add_argument_group("streamed completions")
    add = group.add_argument
    add("--model", default="", help="model to ask for (default: the first one listed)")
    add("--load", default="closed:8", help="e.g. closed:8, poisson:2, gamma=3:4")
    add("--workload", default="mixed", help=f"{', '.join(GENERATED)}, or a file")
    add("--duration", type=float, default=60.0, metavar="S", help="of sending")
    add("--requests", type=int, default=0, metavar="N", help="stop after as many")
    add("--drain", type=float, default=60.0, metavar="S", help="to finish afterwards")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest reply")
    add("--temperature", type=float, default=0.0)
    add("--seed", default="0", help="of prompts and arrivals")
    add("--ttft-target-ms", type=float, default=0.0, help="for goodput; 0 for none")
    add("--tpot-target-ms", type=float, default=0.0, help="for goodput; 0 for none")
    add("--extra-body", default="{}", help="more fields of each request, as JSON")
    add("--read-timeout", type=float, default=120.0, metavar="S")
    add("--request-timeout", type=float, default=600.0, metavar="S")
    add("--max-prompt-chars", type=int, default=0, metavar="N", help="0 for any")
    add("--run-id", default="locust", help="begins all request ids")
    add("--records", default="", metavar="FILE", help="outcomes as JSON lines")
    add("--client-chaos", default="", help="e.g. stall@0.4x3=5,drop@0.6x3")
    # Not in the group, which knows no secrets.
    parser.add_argument(
        "--header",
        default="",
        env_var=HEADER_VARIABLE,
        is_secret=True,
        help="one more header, NAME: VALUE, e.g. an API key",
    )


def read_options(parsed: Any, host: str | None) -> LoadOptions:
    """Check what was given.

    Args:
        parsed: Locust's parsed options.
        host: Root of the endpoint.

    Raises:
        LoadTestError: Names the option that cannot work.
    """
    try:
        load = parse_load(parsed.load)
        actions = parse_client_actions(parsed.client_chaos)
    except ValueError as error:
        raise LoadTestError(str(error)) from None
    if not host:
        raise LoadTestError("--host is missing, e.g. --host http://127.0.0.1:8000")
    if parsed.duration <= 0:
        raise LoadTestError(f"--duration must be above 0 (got {parsed.duration:g})")
    if parsed.requests and load.is_open:
        raise LoadTestError("--requests goes with closed loop; use --duration instead")
    return LoadOptions(
        host=host.rstrip("/").removesuffix("/v1"),
        model=parsed.model,
        load=load,
        workload=parsed.workload,
        duration_s=parsed.duration,
        num_requests=parsed.requests,
        drain_s=parsed.drain,
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        seed=parsed.seed,
        ttft_target_ms=parsed.ttft_target_ms or None,
        tpot_target_ms=parsed.tpot_target_ms or None,
        extra_body=read_extra_body(parsed.extra_body),
        headers=read_header(parsed.header),
        read_timeout_s=parsed.read_timeout,
        total_timeout_s=parsed.request_timeout,
        max_prompt_chars=parsed.max_prompt_chars or None,
        run_id=parsed.run_id,
        records=Path(parsed.records) if parsed.records else None,
        actions=actions,
    )


def read_extra_body(text: str) -> dict[str, Any]:
    """Read `--extra-body`.

    Raises:
        LoadTestError: If it is no JSON object, or asks for several replies at once.
    """
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LoadTestError(f"--extra-body must be a JSON object (got {text})")
    if value.get("n") not in (None, 1):
        raise LoadTestError(
            f"--extra-body: n must be 1 (got {value['n']}): a stream is measured as "
            "one reply"
        )
    return value


def read_header(text: str) -> dict[str, str]:
    """Read `--header`; what follows the name may be a secret, and is never shown.

    Raises:
        LoadTestError: If it has no name.
    """
    if not text:
        return {}
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        raise LoadTestError("--header must be NAME: VALUE")
    return {name.strip(): value.strip()}
