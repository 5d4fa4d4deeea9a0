"""One run's figures from its records."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from loadtest.client.health import ClientSample
from loadtest.client.outcome import TIMEOUT, UNFINISHED, Outcome
from loadtest.client.records import Records

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
    duration_s: float,
    lead_in_s: float,
    targets: Targets,
    limits: Limits,
) -> dict[str, Any]:
    """Compute a run's figures.

    Latencies and goodput are over the requests that were due in the window from the
    end of the lead-in to the end of sending. Throughput counts what ended, and the
    tokens that were delivered, in that window, whenever it was due. Failures are
    those of the whole run, the lead-in's too: a lost request is lost whenever it was
    sent. Latencies are None where there are none.
    """
    sent, window = records.outcomes, (lead_in_s, duration_s)
    width_s = max(duration_s - lead_in_s, 1e-9)
    own = [o for o in sent if lead_in_s <= o.scheduled_s < duration_s]
    ok = [o for o in own if o.is_ok]
    num_good = sum(o.meets(targets.ttft_ms, targets.tpot_ms) for o in own)
    ended = [o for o in sent if o.is_ok and lead_in_s <= o.end_s <= duration_s]
    num_failed = sum(not o.is_ok for o in sent)
    failures = Counter(o.failure for o in sent if o.failure)
    cached = [o for o in ok if o.cached_tokens is not None and o.prompt_tokens]
    num_cached = sum(o.cached_tokens or 0 for o in cached)
    # Little's law, measured: time spent in flight over time passed.
    in_flight_s = sum(
        max(0.0, min(o.end_s, duration_s) - max(o.sent_s, lead_in_s)) for o in sent
    )
    return {
        "num_requests": len(own),
        "num_ok": len(ok),
        "num_sent": len(sent),
        "num_failed": num_failed,
        "num_cut": sum(o.is_cut for o in sent),
        "num_unfinished": failures[UNFINISHED],
        "failures": dict(failures),
        "failure_rate": num_failed / max(1, len(sent)),
        "requests_per_s": len(ended) / width_s,
        "goodput_per_s": num_good / width_s,
        "goodput_share": num_good / len(own) if own else None,
        "output_tokens_per_s": count_tokens(sent, *window) / width_s,
        "input_tokens_per_s": sum(o.prompt_tokens or 0 for o in ended) / width_s,
        "cached_share": num_cached / sum(o.prompt_tokens or 0 for o in cached)
        if cached
        else None,
        "tokens_counted_by_server": all(o.counted_by_server for o in ok),
        "mean_in_flight": in_flight_s / width_s,
        **{
            f"{kind}_p{percent}_ms": _percentile(values, percent)
            for kind, values in latencies(own).items()
            for percent in PERCENTILES
        },
        **_judge_client(records, own, window, is_open, limits),
    }


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the latencies of requests in ms, by kind: ttft, itl, tpot, e2e.

    A request that was not answered has at least the time it waited until it was given
    up: leaving it out would flatter a server that hangs. Requests that failed
    otherwise are in no latency.
    """
    ok = [o for o in outcomes if o.is_ok]
    hung = [o for o in outcomes if o.failure in (TIMEOUT, UNFINISHED)]
    waited = [o.waited_ms if o.ttft_ms is None else o.ttft_ms for o in hung]
    by_kind: dict[str, list[float | None]] = {
        "ttft": [*(o.ttft_ms for o in ok), *waited],
        "itl": [gap for o in ok for gap in o.gaps_ms],
        "tpot": [o.tpot_ms for o in ok],
        "e2e": [*(o.e2e_ms for o in ok), *(o.waited_ms for o in hung)],
    }
    return {k: [v for v in values if v is not None] for k, values in by_kind.items()}


def delivery_times(outcome: Outcome) -> list[float]:
    """Return when each delivery of a request arrived, in seconds of the run."""
    if outcome.first_s is None:
        return []
    gaps_s = np.asarray([0.0, *outcome.gaps_ms]) / 1e3
    return list(map(float, outcome.first_s + np.cumsum(gaps_s)))


def count_tokens(outcomes: Iterable[Outcome], begin_s: float, end_s: float) -> float:
    """Count the tokens of a span; a reply's are spread over its deliveries."""
    total = 0.0
    for outcome in outcomes:
        inside = sum(begin_s <= time <= end_s for time in delivery_times(outcome))
        total += outcome.output_tokens * inside / max(1, outcome.num_deliveries)
    return total


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _judge_client(
    records: Records,
    own: Sequence[Outcome],
    window: tuple[float, float],
    is_open: bool,
    limits: Limits,
) -> dict[str, Any]:
    seconds = _seconds_within(records.client, *window)
    by_process = seconds.groupby("process")
    busiest = _largest(by_process["cpu"].median())
    # The 99th percentile of every second; of those the 95th, so that one hiccup in
    # twenty seconds is forgiven.
    lag = _largest(by_process["lag_p99_ms"].quantile(0.95))
    late = _percentile([o.send_lag_ms for o in own], 99) if is_open else None
    limit = f"(limit {limits.max_lag_ms:.0f} ms)"
    reasons = _find_silent(records)
    if busiest is None:
        reasons.append("the client said nothing about itself")
    elif busiest > limits.max_client_cpu:
        reasons.append(
            f"the client used {busiest:.0%} of a core (limit "
            f"{limits.max_client_cpu:.0%}): use --processes"
        )
    if lag is not None and lag > limits.max_lag_ms:
        reasons.append(
            f"the client's timers were {lag:.0f} ms late {limit}: give it a core of "
            "its own, or try --client-nice -10"
        )
    if late is not None and late > limits.max_lag_ms:
        reasons.append(f"requests were sent {late:.0f} ms late {limit}")
    if not own:
        reasons.append("no request was due in the measured part")
    return {
        "client_cpu": busiest,
        "client_lag_ms": lag,
        "send_lag_p99_ms": late,
        "machine_cpu": _largest(seconds[["machine_cpu"]].mean()),
        "is_valid": not reasons,
        "invalid_because": reasons,
    }


def _seconds_within(
    samples: Sequence[ClientSample], begin_s: float, end_s: float
) -> pd.DataFrame:
    """Return the samples whose second, the one before them, lies in a span."""
    names = [field.name for field in fields(ClientSample)]
    table = pd.DataFrame(map(asdict, samples), columns=names)
    table = table.astype({name: float for name in names if name != "process"})
    return table[(table["at_s"] > begin_s) & (table["at_s"] < end_s + 1)]


def _largest(values: pd.Series) -> float | None:
    return None if pd.isna(values.max()) else float(values.max())


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
