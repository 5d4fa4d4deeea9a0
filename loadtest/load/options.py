"""Options of one run, for Locust's command line and page and for our own command."""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from loadtest.client.endpoint import Endpoint
from loadtest.errors import LoadTestError

from .arrivals import Load, parse_load
from .workloads import GENERATED

HEADER_VARIABLE = "TETRIS_LOADTEST_HEADER"
"""In the environment, not among arguments: everybody may read those."""


def _option(default: Any, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class LoadOptions:
    """What one run sends: every field is an option of its name, as it was given.

    Equal seeds send equal requests, in open loop at equal times.
    """

    host: str
    load: str = _option("closed:8", "e.g. closed:8, poisson:2, gamma=3:ramp:1-4")
    workload: str = _option("mixed", f"{', '.join(GENERATED)}, or a file")
    model: str = _option("", "name to ask for (default: the first one listed)")
    duration: float = _option(60.0, "of sending", "S")
    drain: float = _option(60.0, "to finish requests afterwards", "S")
    max_tokens: int = _option(128, "longest reply", "N")
    temperature: float = _option(0.0, "of sampling", "T")
    seed: str = _option("0", "of prompts and arrivals", "N")
    ttft_target_ms: float = _option(0.0, "for goodput; 0 for none", "MS")
    tpot_target_ms: float = _option(0.0, "for goodput; 0 for none", "MS")
    extra_body: str = _option("{}", "more fields of each request", "JSON")
    max_prompt_chars: int = _option(
        0, "leave out longer conversations of a file; 0 for none", "N"
    )
    run_id: str = _option("locust", "begins all request ids", "NAME")
    records: str = _option("", "outcomes as JSON lines", "FILE")
    header: str = _option("", "one more header, e.g. an API key", "NAME: VALUE")

    def check(self) -> None:
        """Read all that has a form of its own; an error names the option."""
        parts = urlsplit(self.host)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadTestError(
                f"--host {self.host}: must be an address such as http://127.0.0.1:8000"
            )
        if self.duration <= 0:
            raise LoadTestError(f"--duration must be above 0 (got {self.duration:g})")
        _ = self.arrivals, self.body, self.endpoint

    @cached_property
    def arrivals(self) -> Load:
        """The load."""
        try:
            return parse_load(self.load)
        except ValueError as error:
            raise LoadTestError(str(error)) from None

    @cached_property
    def endpoint(self) -> Endpoint:
        """Where to send."""
        url = self.host.rstrip("/").removesuffix("/v1")
        return Endpoint(url, read_header(self.header))

    @cached_property
    def body(self) -> dict[str, Any]:
        """What all requests have in common, besides the model."""
        try:
            more = json.loads(self.extra_body or "{}")
        except ValueError:
            more = None
        if not isinstance(more, dict):
            raise LoadTestError(
                f"--extra-body must be a JSON object (got {self.extra_body})"
            )
        if more.get("n") not in (None, 1):
            raise LoadTestError(
                f"--extra-body: n must be 1 (got {more['n']}): a stream is measured as "
                "one reply"
            )
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }


OPTIONS = {one.name: one for one in dataclasses.fields(LoadOptions)[1:]}
"""Without the host, which is Locust's own option."""


def add_option(parser: Any, name: str, **changes: Any) -> None:
    """Add an option to a parser, Locust's or any other; changes are for argparse."""
    option, kind = OPTIONS[name], get_type_hints(LoadOptions)[name]
    told = {"type": kind, "default": option.default, **option.metadata, **changes}
    if told["default"] not in ("", "{}", None):
        told["help"] += f" (default: {told['default']})"
    parser.add_argument(f"--{name.replace('_', '-')}", **told)


def read_header(text: str) -> dict[str, str]:
    """Read `--header`; what follows the name may be a secret, and is never shown."""
    if not text:
        return {}
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        raise LoadTestError("--header must be NAME: VALUE")
    return {name.strip(): value.strip()}
