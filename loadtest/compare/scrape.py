"""Follows a server's metrics and its running replicas through a run."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .deployment import Deployment
from .processes import sample

_PERIOD_S = 5.0
_LOOKS_PER_PAGE = 2
"""Seldom: Serve takes 40 ms of processor time to count its replicas, and Ray some 300
to show its metrics, which a server on the same cores would feel. Pages are read as
often as Prometheus would."""

_COUNTER = re.compile(r"(tetris|vllm)_\w+_total$")
_GAUGES = {
    "vllm_num_requests_running": "num_running",
    "vllm_num_requests_waiting": "num_waiting",
    "vllm_kv_cache_usage_perc": "kv_cache_usage",
}
_OWN_GAUGES = {
    "tetris_running_requests": "num_running",
    "tetris_waiting_requests": "num_waiting",
    "tetris_kv_cache_usage_ratio": "kv_cache_usage",
}
"""Ours come first: Ray's exporter drops vLLM's while the engine is idle."""

_DRAFT_TOKENS = "vllm_spec_decode_num_draft_tokens_total"
_COUNTS = {
    "draft_tokens_proposed": ("tetris_draft_tokens_proposed_total", _DRAFT_TOKENS),
    "draft_tokens_verified": ("tetris_draft_tokens_verified_total", _DRAFT_TOKENS),
    "draft_tokens_accepted": (
        "tetris_draft_tokens_accepted_total",
        "vllm_spec_decode_num_accepted_tokens_total",
    ),
    "drafts": ("tetris_drafts_total", "vllm_spec_decode_num_drafts_total"),
    "fallbacks": ("tetris_fallbacks_total",),
    "preemptions": ("vllm_num_preemptions_total",),
}
_ACCEPTED = "tetris_draft_tokens_accepted_total"
_NAME_END = re.compile(r"[{ ]")

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of one counter."""


def read_samples(
    text: str, is_wanted: Callable[[str], Any]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of the samples of an exporter's page.

    Names are without what exporters add: `ray_vllm_x` and `vllm:x` are `vllm_x`.
    """
    # Ray's page is long, and parsing slow: only the lines that count are parsed.
    lines = (
        line
        for line in text.splitlines(True)
        if is_wanted(_normalise(_NAME_END.split(line, 1)[0]))
    )
    for family in text_string_to_metric_families("".join(lines)):
        for one in family.samples:
            yield _normalise(one.name), dict(one.labels), one.value


def _normalise(name: str) -> str:
    return name.removeprefix("ray_").replace("vllm:", "vllm_")


def read_page(text: str) -> tuple[dict[Series, float], dict[str, float]]:
    """Read the counters of engine and policy off an exporter's page, and its gauges."""
    known = _GAUGES.keys() | _OWN_GAUGES.keys()
    samples = [*read_samples(text, lambda name: name in known or _COUNTER.match(name))]
    counters = {
        (name, tuple(sorted(labels.items()))): value
        for name, labels, value in samples
        if name not in known
    }
    names = {name for name, _, _ in samples}
    keys = _OWN_GAUGES if names >= _OWN_GAUGES.keys() else _GAUGES
    gauges = ({keys[name]: value} for name, _, value in samples if name in keys)
    return counters, add_gauges(gauges)


def add_gauges(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up queues of engines or nodes; of cache use the largest counts."""
    found: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            before = found.get(key, 0.0)
            is_cache = key == "kv_cache_usage"
            found[key] = max(before, value) if is_cache else before + value
    return found


class GrowingCounters:
    """Adds up the growth of counters, through restarts and replicas that go away.

    A replica that dies takes its counters off the page, and a new one starts from
    zero; so differences between the ends of a run are not enough.
    """

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._before: dict[Series, float] | None = None
        self.totals: dict[str, float] = {}

    def update(self, counters: Mapping[Series, float]) -> None:
        """Take over what an exporter shows now; the first time only as a start."""
        if self._before is not None:
            for series, value in counters.items():
                before = self._before.get(series, 0.0)
                grown = value - before if value >= before else value
                self.totals[series[0]] = self.totals.get(series[0], 0.0) + grown
        # Series that are gone for now are remembered: a page may leave one out once.
        self._before = {**(self._before or {}), **counters}


def summarise_server(
    counters: Mapping[str, float], timeline: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return speculation's figures of a whole run; None where nobody counts."""
    counts = {
        key: next((counters[name] for name in names if name in counters), None)
        for key, names in _COUNTS.items()
    }
    drafts, accepted = counts.pop("drafts"), counts["draft_tokens_accepted"]
    per_draft = accepted / drafts if accepted is not None and drafts else None
    replicas = [point["replicas"] for point in timeline if "replicas" in point]
    return {
        **counts,
        "acceptance_length": None if per_draft is None else 1 + per_draft,
        "replicas_min": min(replicas, default=None),
        "replicas_max": max(replicas, default=None),
    }


@contextmanager
def repeat(look: Callable[[], None], period_s: float) -> Iterator[threading.Event]:
    """Do something every few seconds, in a thread, while a block runs.

    Yields what is set at the end.
    """
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(period_s):
            look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


@dataclass
class Seen:
    """What a server told of itself through a run.

    Attributes:
        counters: At the end, growth of every counter by normalised name.
        timeline: Every few seconds `epoch_s`, `replicas`, `num_running`,
            `num_waiting`, `kv_cache_usage`, and the counter of accepted draft tokens so
            far; what a server does not tell is left out. Several pages are added up,
            and count only together.
        process_samples: Rows of `processes.sample`, if asked for.
        problems: Why figures are missing.
    """

    deployment: Deployment
    counters: dict[str, float] = field(default_factory=dict)
    timeline: list[dict[str, float]] = field(default_factory=list)
    process_samples: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read nothing yet."""
        pages = self.deployment.metrics_urls
        self._grown = {page: GrowingCounters() for page in pages}

    def look(self, *, reads_pages: bool, pid: int | None) -> None:
        """Add a point to the timeline, and samples of what descends from a process."""
        point: dict[str, float] = {"epoch_s": time.time()}
        if reads_pages:
            point |= self._read_pages()
        replicas = self.deployment.endpoint.count_replicas()
        # Without a replica a server of ours answers 503, as others do for their own
        # reasons: only one that has told a number means none by it.
        has_told = any("replicas" in before for before in self.timeline)
        if replicas or (replicas == 0 and has_told):
            point["replicas"] = replicas
        self.timeline.append(point)
        if pid is not None:
            self.process_samples += sample(pid)

    def add_up(self) -> dict[str, float]:
        """Return the growth of all counters so far."""
        return add_gauges(one.totals for one in self._grown.values())

    def _read_pages(self) -> dict[str, float]:
        gauges = []
        for page, grown in self._grown.items():
            text = self.deployment.endpoint.fetch(page, self.problems.append)
            if text is not None:
                counters, queues = read_page(text)
                grown.update(counters)
                gauges.append(queues)
        if len(gauges) < len(self._grown):
            return {}
        totals = self.add_up()
        accepted = {"accepted": totals[_ACCEPTED]} if _ACCEPTED in totals else {}
        return add_gauges(gauges) | accepted


@contextmanager
def scrape(
    deployment: Deployment,
    *,
    samples_processes: bool = False,
    looks_per_page: int = _LOOKS_PER_PAGE,
    only_at_ends: bool = False,
) -> Iterator[Seen]:
    """Follow a server while a block runs; what its counters show first is zero.

    With `only_at_ends` it is left alone in between.
    """
    seen = Seen(deployment)
    pid = deployment.pid if samples_processes else None

    def look() -> None:
        seen.look(reads_pages=len(seen.timeline) % looks_per_page == 0, pid=pid)

    look()
    period_s = threading.TIMEOUT_MAX if only_at_ends else _PERIOD_S
    with repeat(look, period_s) as stop:
        yield seen
        # When exporters have caught up.
        stop.wait(deployment.settle_s if deployment.metrics_urls else 0.0)
    seen.look(reads_pages=True, pid=pid)
    seen.counters = seen.add_up()
