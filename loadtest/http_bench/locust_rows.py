"""What a request adds to Locust's own statistics."""

from __future__ import annotations

from collections.abc import Sequence

from locust.env import Environment

from .options import LoadOptions
from .outcome import CLIENT_DROPPED, Outcome


class RequestFailureError(Exception):
    """A failed request as Locust counts it: by its kind alone."""


def log_outcome(
    environment: Environment, outcome: Outcome, options: LoadOptions
) -> None:
    """Add a request to the rows of its workload.

    `CHAT` is the whole request and alone counts in the totals; its size is in output
    tokens. `TTFT`, `TPOT` and `ITL` are its parts in ms; the size of `TTFT` is prompt
    tokens. `GOOD` has once more the requests that met the targets, so that its requests
    per second are the goodput, and `CUT` those whose stream broke off.
    """
    if outcome.failure == CLIENT_DROPPED:
        return
    stats, name = environment.stats, outcome.workload
    whole_ms = outcome.e2e_ms or outcome.waited_ms
    is_good = outcome.meets(options.ttft_target_ms, options.tpot_target_ms)
    num_tokens = outcome.output_tokens
    parts: tuple[tuple[str, Sequence[float | None], int], ...] = (
        ("TTFT", [outcome.ttft_ms], outcome.prompt_tokens or 0),
        ("TPOT", [outcome.tpot_ms], 0),
        ("ITL", outcome.gaps_ms, 0),
        ("GOOD", [whole_ms] if is_good else [], num_tokens),
        ("CUT", [whole_ms] if outcome.is_cut else [], num_tokens),
    )
    for method, values, size in parts:
        row = stats.get(name, method)
        for value in values:
            if value is not None:
                row.log(value, size)
    environment.events.request.fire(
        request_type="CHAT",
        name=name,
        response_time=whole_ms,
        response_length=num_tokens,
        exception=outcome.failure and RequestFailureError(outcome.failure),
        context={},
    )
