"""One run's figures from its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .client_health import ClientSample
from .outcome import TIMEOUT, UNFINISHED, Outcome
from .records import Records

PERCENTILES = (50, 95, 99)
_MAX_SILENCE_S = 6.0
"""Between a process's last sample and the end of the records: it measures once a second
and, as one of several, reports every three."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take before its figures are its own and not the server's.

    Attributes:
        max_client_cpu: Share of a core, the median over a run's seconds.
        max_lag_ms: How late timers may fire (99th percentile of a usual second) and
            requests be sent (99th percentile).
    """

    max_client_cpu: float = 0.8
    max_lag_ms: float = 25.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Latencies that a request must meet to count as good; None for any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def summarise(
    records: Records,
    *,
    is_open: bool,
    duration_s: float | None,
    warm_up_s: float,
    targets: Targets,
    limits: Limits,
) -> dict[str, Any]:
    """Compute a run's figures.

    Latencies and goodput are over the requests that were due in the window from the
    end of the warm-up to the end of sending. Throughput counts what ended, and the
    tokens that were delivered, in that window, whenever it was due. Failures are
    those of the whole run, the warm-up's too: a lost request is lost whenever it was
    sent.

    Args:
        records: Of the run.
        is_open: Whether arrivals were independent of the answers.
        duration_s: Length of sending; None when a number of requests was sent, and
            the window ends with the last of them.
        warm_up_s: Left out at first.
        targets: For goodput.
        limits: For the client.

    Returns:
        Plain values; latencies in ms, None where there are none.
    """
    end_s = duration_s or max((o.end_s for o in records.outcomes), default=0.0)
    width_s = max(end_s - warm_up_s, 1e-9)
    own = [o for o in records.outcomes if warm_up_s <= o.scheduled_s < end_s]
    ok = [o for o in own if o.is_ok]
    good = [o for o in own if o.meets(targets.ttft_ms, targets.tpot_ms)]
    ended = [o for o in records.outcomes if o.is_ok and warm_up_s <= o.end_s <= end_s]
    num_failed = sum(o.is_failed for o in records.outcomes)
    failures = Counter(o.failure for o in records.outcomes if o.failure)
    figures: dict[str, Any] = {
        "window_s": width_s,
        "num_requests": len(own),
        "num_ok": len(ok),
        "num_sent": len(records.outcomes),
        "num_failed": num_failed,
        "num_cut": sum(o.is_cut for o in records.outcomes),
        "num_unfinished": failures[UNFINISHED],
        "failures": dict(failures),
        "failure_rate": num_failed / max(1, len(records.outcomes)),
        "requests_per_s": len(ended) / width_s,
        "goodput_per_s": len(good) / width_s,
        "goodput_share": len(good) / len(own) if own else None,
        "output_tokens_per_s": count_tokens(records.outcomes, warm_up_s, end_s)
        / width_s,
        "input_tokens_per_s": sum(o.prompt_tokens or 0 for o in ended) / width_s,
        "output_tokens": sum(o.output_tokens for o in own),
        "input_tokens": sum(o.prompt_tokens or 0 for o in own),
        "cached_share": _cached_share(ok),
        "tokens_counted_by_server": all(o.counted_by_server for o in ok),
        "mean_in_flight": _mean_in_flight(records.outcomes, warm_up_s, end_s),
    }
    for name, values in latencies(own).items():
        figures |= percentiles(name, values)
    return figures | _judge_client(records, own, warm_up_s, end_s, is_open, limits)


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the latencies of requests in ms, by kind: ttft, itl, tpot, e2e.

    A request that was not answered has at least the time it waited until it was given
    up: leaving it out would flatter a server that hangs. Requests that failed
    otherwise, and streams that we stalled ourselves, are in no latency.
    """
    undisturbed = [o for o in outcomes if o.chaos is None]
    ok = [o for o in undisturbed if o.is_ok]
    hung = [o for o in undisturbed if o.failure in (TIMEOUT, UNFINISHED)]
    by_kind: dict[str, list[float | None]] = {
        "ttft": [o.ttft_ms for o in ok] + [_ttft_so_far(o) for o in hung],
        "itl": [gap for o in ok for gap in o.gaps_ms],
        "tpot": [o.tpot_ms for o in ok],
        "e2e": [o.e2e_ms for o in ok] + [o.waited_ms for o in hung],
    }
    return {
        kind: [value for value in values if value is not None]
        for kind, values in by_kind.items()
    }


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return `NAME_p50_ms` and so on, and `NAME_mean_ms`; None without values."""
    result: dict[str, float | None] = {
        f"{name}_p{percent}_ms": (
            float(np.percentile(values, percent)) if values else None
        )
        for percent in PERCENTILES
    }
    result[f"{name}_mean_ms"] = float(np.mean(values)) if values else None
    return result


def delivery_times(outcome: Outcome) -> list[float]:
    """Return when each delivery of a request arrived, in seconds of the run."""
    if outcome.first_s is None:
        return []
    times = [outcome.first_s]
    for gap in outcome.gaps_ms:
        times.append(times[-1] + gap / 1e3)
    return times


def count_tokens(outcomes: Iterable[Outcome], begin_s: float, end_s: float) -> float:
    """Count the tokens delivered in a span; a reply's are spread over its deliveries.

    Args:
        outcomes: Of all requests, failed ones included.
        begin_s: Of the span.
        end_s: Of the span, inclusive.
    """
    total = 0.0
    for outcome in outcomes:
        if not outcome.num_deliveries:
            continue
        inside = sum(begin_s <= time <= end_s for time in delivery_times(outcome))
        total += outcome.output_tokens * inside / outcome.num_deliveries
    return total


def _ttft_so_far(outcome: Outcome) -> float:
    return outcome.waited_ms if outcome.ttft_ms is None else outcome.ttft_ms


def _cached_share(ok: Sequence[Outcome]) -> float | None:
    known = [o for o in ok if o.cached_tokens is not None and o.prompt_tokens]
    prompt = sum(o.prompt_tokens or 0 for o in known)
    return sum(o.cached_tokens or 0 for o in known) / prompt if prompt else None


def _mean_in_flight(
    outcomes: Iterable[Outcome], begin_s: float, end_s: float
) -> float | None:
    """Little's law, measured: time spent in flight over time passed."""
    width_s = end_s - begin_s
    if width_s <= 0:
        return None
    spent_s = sum(
        max(0.0, min(o.end_s, end_s) - max(o.sent_s, begin_s)) for o in outcomes
    )
    return spent_s / width_s


def _judge_client(
    records: Records,
    own: Sequence[Outcome],
    begin_s: float,
    end_s: float,
    is_open: bool,
    limits: Limits,
) -> dict[str, Any]:
    seconds = _sample_seconds(records.client, begin_s, end_s)
    busiest = max(
        (float(np.median([s.cpu for s in one])) for one in seconds.values()),
        default=None,
    )
    # The 99th percentile of every second; of those the 95th, so that one hiccup in
    # twenty seconds is forgiven.
    lag = max(
        (
            float(np.percentile([s.lag_p99_ms for s in one], 95))
            for one in seconds.values()
        ),
        default=None,
    )
    send_lag = (
        float(np.percentile([o.send_lag_ms for o in own], 99))
        if is_open and own
        else None
    )
    reasons = []
    if busiest is None or lag is None:
        reasons.append("the client said nothing about itself")
    else:
        if busiest > limits.max_client_cpu:
            reasons.append(
                f"the client used {busiest:.0%} of a core "
                f"(limit {limits.max_client_cpu:.0%}): use --processes"
            )
        if lag > limits.max_lag_ms:
            reasons.append(
                f"the client's timers were {lag:.0f} ms late "
                f"(limit {limits.max_lag_ms:.0f} ms): give it a core of its own, "
                "or try --client-nice -10"
            )
    if send_lag is not None and send_lag > limits.max_lag_ms:
        reasons.append(
            f"requests were sent {send_lag:.0f} ms late "
            f"(limit {limits.max_lag_ms:.0f} ms)"
        )
    if not own:
        reasons.append("no request was due in the measured part")
    reasons += _find_silent(records)
    return {
        "client_cpu": busiest,
        "client_lag_ms": lag,
        "send_lag_p99_ms": send_lag,
        "machine_cpu": _mean([s.machine_cpu for one in seconds.values() for s in one]),
        "is_valid": not reasons,
        "invalid_because": reasons,
    }


def _sample_seconds(
    samples: Iterable[ClientSample], begin_s: float, end_s: float
) -> dict[str, list[ClientSample]]:
    """Return for each process a sample for every second of a span.

    A process that stood still for ten seconds says so once: that stands for them all.
    """
    seconds: dict[str, list[ClientSample]] = {}
    latest_s: dict[str, float] = {}
    for sample in samples:
        since_s = max(begin_s, latest_s.get(sample.process, 0.0))
        latest_s[sample.process] = sample.at_s
        inside_s = min(sample.at_s, end_s) - since_s
        if inside_s > 0:
            own = seconds.setdefault(sample.process, [])
            own += [sample] * max(1, round(inside_s))
    return seconds


def _find_silent(records: Records) -> list[str]:
    """Say which processes of the client were not there to the end."""
    last_s = {sample.process: sample.at_s for sample in records.client}
    ends_s = [*last_s.values(), *(o.end_s for o in records.outcomes)]
    reasons = [
        f"{process} said nothing after {at_s:.0f} s: what it was to send is lost"
        for process, at_s in sorted(last_s.items())
        if at_s < max(ends_s) - _MAX_SILENCE_S
    ]
    missing = (records.num_processes or 0) - len(last_s)
    if last_s and missing > 0:
        reasons.append(f"{missing} of the client's processes said nothing at all")
    return reasons


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
