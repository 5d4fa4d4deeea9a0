"""What is shown of a fleet, each part with a deployment of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from loadtest.client.outcome import Outcome
from loadtest.client.records import read_records
from loadtest.compare.arms import parse_arm
from loadtest.compare.deployment import Deployment, Launcher
from loadtest.compare.locust_process import run_locust
from loadtest.compare.processes import find_victims
from loadtest.compare.scrape import repeat, scrape, summarise_server
from loadtest.errors import LoadTestError
from loadtest.load.options import LoadOptions, read_header

from .watch import PERIOD_S, Watch, count_begun

_POLICY: Final = "goodput:8"
_TOKENS: Final = 128
_CALM_S: Final = 300.0
"""Longest wait for a fleet to have as many replicas as it should."""

_FLEETS: Final[dict[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("fleets.yaml").read_text()
)

_KEY: Final = re.compile(r"^tetris-\S+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a part is played.

    Attributes:
        folder: For logs and records.
        config: Deployment file.
        scale: Of all durations: below 1 only shows that it runs.
        say: Tells people.
    """

    folder: Path
    config: str
    scale: float
    say: Callable[[str], None]

    @contextlib.contextmanager
    def deploy(self, part: str, header: str = "", *more: str) -> Iterator[Play]:
        """Have a part's fleet running, watched, while the block runs."""
        told = [*more, *(f"{name}={v}" for name, v in _FLEETS[part].items())]
        headers = read_header(header)
        launcher = Launcher(self.folder / "logs", self.config, told, headers)
        with launcher.run(parse_arm(_POLICY), self.say) as deployment:
            watch = Watch(deployment)
            with repeat(watch.look, PERIOD_S):
                yield Play(self, deployment, watch)


@dataclass(frozen=True, slots=True)
class Play:
    """A fleet under load."""

    stage: Stage
    deployment: Deployment
    watch: Watch

    def send(self, name: str, load: str, seconds: float, **more: Any) -> list[Outcome]:
        """Put load on it; return what became of all requests, by when they were due."""
        records = self.stage.folder / "records" / f"{name}.jsonl"
        records.parent.mkdir(parents=True, exist_ok=True)
        self.stage.say(f"{name}: {load} for {seconds * self.stage.scale:.0f} s")
        given: dict[str, Any] = {"max_tokens": _TOKENS, "seed": name, **more}
        options = LoadOptions(
            host=self.deployment.endpoint.url,
            load=load,
            duration=seconds * self.stage.scale,
            run_id=name,
            records=str(records.absolute()),
            **given,
        )
        run_locust(options, self.stage.folder / "logs" / f"locust-{name}.log")
        read = read_records(records)
        records.unlink()
        by_s = self.watch.since(read.epoch_s or time.time())
        return [replace(one, **_shift(one, by_s)) for one in read.outcomes]

    def settle(self, replicas: int) -> None:
        """Wait until so many replicas were seen running twice in a row."""
        deadline_s = time.monotonic() + _CALM_S
        while [p.get("running") for p in self.watch.points[-2:]] != 2 * [replicas]:
            if time.monotonic() > deadline_s:
                raise LoadTestError(
                    f"after {_CALM_S:.0f} s there are not {replicas} replicas; see the "
                    "log"
                )
            time.sleep(PERIOD_S)


def _shift(one: Outcome, by_s: float) -> dict[str, Any]:
    """Return its times by another clock."""
    names = ("scheduled_s", "sent_s", "first_s", "last_s", "end_s")
    times = {name: getattr(one, name) for name in names}
    return {name: at_s if at_s is None else at_s + by_s for name, at_s in times.items()}


def play_scale(stage: Stage) -> dict[str, Any]:
    """A load swells and ebbs: replicas go from one to three and back."""
    with stage.deploy("scale") as play:
        outcomes = play.send("scale", "closed:diurnal:2-44", 300)
        play.settle(1)
        return _tell(outcomes, play.watch)


def play_idle(stage: Stage) -> dict[str, Any]:
    """Nobody asks, somebody does, and nobody again: no replica, one, none."""
    with stage.deploy("idle") as play:
        outcomes = []
        for number in range(3):
            play.settle(0)
            outcomes += play.send(f"idle-{number}", "closed:4", 15)
        play.settle(0)
        return _tell(outcomes, play.watch)


def play_mix(stage: Stage) -> dict[str, Any]:
    """The same rate and length of replies, but from half-time on few drafts fit."""
    with stage.deploy("capacity") as play:
        capacity = _find_capacity(play)
    with stage.deploy("mix") as play:
        outcomes, begins_s, accepted = [], [], {}
        for temperature in (0.0, 2.0):
            begins_s.append(play.watch.since(time.time()))
            with scrape(play.deployment) as seen:
                outcomes += play.send(
                    f"mix-{temperature:g}",
                    f"poisson:{0.4 * capacity:.1f}",
                    120,
                    max_tokens=100,
                    temperature=temperature,
                    extra_body='{"ignore_eos": true}',
                )
            server = summarise_server(seen.counters, seen.timeline)
            accepted[f"{temperature:g}"] = server["acceptance_length"]
        ends_s = [begins_s[1], play.watch.since(time.time())]
        wanted = {}
        for name, begin_s, end_s in zip(accepted, begins_s, ends_s, strict=True):
            # Of each half its later part: before, the other still shows.
            middle_s = (begin_s + end_s) / 2
            own = [
                point["wanted"]
                for point in play.watch.points
                if "wanted" in point and middle_s < point["at_s"] < end_s
            ]
            wanted[name] = float(np.mean(own))
        told = {"capacity_per_s": capacity, "wanted": wanted, "accepted": accepted}
        return told | _tell(outcomes, play.watch)


def play_overload(stage: Stage) -> dict[str, Any]:
    """Twice what a replica can do, each request with a deadline."""
    deadline_ms = 4000
    with stage.deploy("overload") as play:
        capacity = _find_capacity(play)
        body = f'{{"deadline_ms": {deadline_ms}}}'
        outcomes = play.send(
            "overload", f"poisson:{2 * capacity:.1f}", 90, extra_body=body
        )
    answered = [one for one in outcomes if one.is_ok]
    late = [one for one in answered if one.waited_ms > deadline_ms]
    late_ms = [one.waited_ms for one in late] or [0.0]
    return {
        "capacity_per_s": capacity,
        "deadline_ms": deadline_ms,
        "requests": len(outcomes),
        "in_time": len(answered) - len(late),
        "late": len(late),
        "late_ms": np.quantile(late_ms, [0.5, 1.0]).tolist(),
        "late_ids": [one.id for one in late],
        "refused": Counter(one.failure for one in outcomes if not one.is_ok),
        "refusals": Counter(
            re.sub(r"\d+", "N", one.detail) for one in outcomes if one.status == 429
        ),
    }


def play_keys(stage: Stage) -> dict[str, Any]:
    """Two keys share a replica; one of them floods it, or asks for what has a seat.

    With the latter nobody waits for a turn: what a first token then takes longer is
    what longer steps take, and no order of turns can do better.
    """
    num_seats = _FLEETS["keys"]["engine.max_num_seqs"]
    file = stage.folder / "keys.json"
    file.unlink(missing_ok=True)
    quiet, flood = (_make_key(file, name) for name in ("quiet", "flood"))
    known = f"http.access.keys_file={file.absolute()}"
    with stage.deploy("keys", quiet, known) as play:

        def ask(
            name: str, load: str, seconds: float, header: str = quiet
        ) -> list[Outcome]:
            return play.send(name, load, seconds, workload="easy", header=header)

        capacity = _find_capacity(play, workload="easy", header=quiet)
        own = f"poisson:{0.2 * capacity:.2f}"
        found = {"alone": ask("keys-alone", own, 90)}
        for name, others in (("seated", 7 * num_seats // 8), ("beside", 120)):
            with ThreadPoolExecutor(1) as other:
                called, load = f"keys-flood-{others}", f"closed:{others}"
                flooding = other.submit(ask, called, load, 110, flood)
                time.sleep(10 * stage.scale)
                found[name] = ask(f"keys-{name}", own, 90)
                found["flood"] = flooding.result()
    told = {name: _count(outcomes) for name, outcomes in found.items()}
    return {"capacity_per_s": capacity} | told


def play_neighbour(stage: Stage) -> dict[str, Any]:
    """Two replicas on a core each; another process comes to one of the cores."""
    with stage.deploy("neighbour") as play:
        assert play.deployment.pid is not None  # We have started it.
        engines = find_victims(play.deployment.pid, "engine")
        for core, engine in enumerate(engines):
            for thread in engine.threads():
                os.sched_setaffinity(thread.id, {core})
        found = {}
        for name in ("alike", "neighbour"):
            with _burn(0) if name == "neighbour" else contextlib.nullcontext():
                # What was on its way, and learnt before, is not to count.
                play.send(f"{name}-before", "closed:12", 20)
                before = count_begun(play.deployment)
                outcomes = play.send(name, "closed:12", 60)
                time.sleep(play.deployment.settle_s)
                after = count_begun(play.deployment)
            counts = sorted(after[r] - before.get(r, 0.0) for r in after)
            found[name] = {
                "requests": len(outcomes),
                "failed": sum(not one.is_ok for one in outcomes),
                "share_of_the_one_with_fewer": counts[0] / sum(counts),
            }
    return found


PARTS: Final[dict[str, Callable[[Stage], dict[str, Any]]]] = {
    "scale": play_scale,
    "idle": play_idle,
    "mix": play_mix,
    "overload": play_overload,
    "keys": play_keys,
    "neighbour": play_neighbour,
}


def _tell(outcomes: Sequence[Outcome], watch: Watch) -> dict[str, Any]:
    def in_flight(at_s: float) -> int:
        return sum(one.sent_s <= at_s < one.end_s for one in outcomes)

    points = [one | {"in_flight": in_flight(one["at_s"])} for one in watch.points]
    return _count(outcomes) | {"timeline": points}


def _count(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ttft_ms = [one.ttft_ms for one in outcomes if one.ttft_ms is not None]
    median, high, most = np.quantile(ttft_ms, [0.5, 0.95, 1.0]).tolist()
    return {
        "requests": len(outcomes),
        "failures": Counter(one.failure for one in outcomes if not one.is_ok),
        "ttft_p50_ms": median,
        "ttft_p95_ms": high,
        "ttft_max_ms": most,
    }


def _find_capacity(play: Play, **more: Any) -> float:
    """Return how many requests a second a full replica answers."""
    play.send("warm-up", "closed:16", 15, **more)
    outcomes = play.send("capacity", "closed:40", 30, **more)
    ends_s = sorted(one.end_s for one in outcomes if one.is_ok)
    # Between the first and the last quarter: neither filling nor draining.
    part = ends_s[len(ends_s) // 4 : 3 * len(ends_s) // 4]
    return (len(part) - 1) / (part[-1] - part[0])


def _make_key(file: Path, name: str) -> str:
    command = [sys.executable, "-m", "serving.cli", "keys", "new", "--file"]
    shown = subprocess.run(
        [*command, str(file), name], check=True, capture_output=True, text=True
    )
    found = _KEY.search(shown.stdout)
    if found is None:
        raise LoadTestError(f"tetris-serve keys showed no key: {shown.stdout}")
    return f"Authorization: Bearer {found[0]}"


@contextlib.contextmanager
def _burn(core: int) -> Iterator[None]:
    """Keep a core busy while the block runs."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setaffinity(process.pid, {core})
            yield
        finally:
            process.kill()
