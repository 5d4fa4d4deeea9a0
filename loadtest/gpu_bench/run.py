"""Measures one part: arm after arm, cell after cell, until its time is up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from loadtest.engine_bench.arm_process import ArmProcess
from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.models import check_model, check_tokenizer, pad
from loadtest.engine_bench.plan import Cell
from loadtest.engine_bench.workloads import RequestMaker, load_render

from .plan import MAX_TOKENS, GpuArm, Part, cells_of, env_of, llm_args
from .results import Results
from .time_limit import TimeLimit

SEED = 7
MIN_REQUESTS = 12
REQUESTS_PER_SLOT = 3

LAW = "law"
LAW_SAMPLES = 1536
LAW_CONCURRENCY = 32
LAW_TOKENS = 6
"""One prompt many times at temperature 1: outputs of this length are outcomes of one
law, whatever the engine verifies."""

_WARM_UP_CONCURRENCY = 64
_END_TIMEOUT_S = 20.0

Say = Callable[[str], None]


class Engine(Protocol):
    """An arm's engine, started."""

    def run(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run requests and return their figures."""
        ...

    def close(self) -> None:
        """End it."""
        ...


StartEngine = Callable[[GpuArm, float], Engine]


class ArmEngine:
    """An engine in a process of its own."""

    def __init__(
        self,
        part: Part,
        arm: GpuArm,
        models: tuple[Path, Path],
        log_folder: Path,
        eos_token_id: int,
        timeout_s: float,
    ) -> None:
        """Start it and wait until it is ready.

        Raises:
            BenchError: If it does not start in time.
        """
        log_folder.mkdir(parents=True, exist_ok=True)
        self._process = ArmProcess(
            arm.name,
            [sys.executable, "-m", "loadtest.gpu_bench.worker", str(os.getpid())],
            {**os.environ, **env_of(part)},
            log_folder / f"{part.pair.name}-{arm.name}.log",
            group=0,
        )
        try:
            self._process.send(
                {
                    "do": "start",
                    "llm": llm_args(arm, *models),
                    "eos_token_id": eos_token_id,
                    "max_tokens": MAX_TOKENS,
                }
            )
            self._process.receive(timeout_s)
        except BaseException:
            self._process.kill()
            raise

    def run(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run requests and return their figures.

        Raises:
            BenchError: If the engine fails or does not answer in time.
        """
        self._process.send({"do": "run", **message})
        while True:
            answer = self._process.receive(timeout_s)
            if answer["event"] == "done":
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        """End it, with its place on the GPU."""
        self._process.ask_to_end()
        self._process.wait_for_end(_END_TIMEOUT_S)


def make_models(
    part: Part, target: Path, draft: Path, cache: Path
) -> tuple[Path, Path]:
    """Return target and draft of a part's size, padded at most once.

    Raises:
        BenchError: If the source models are not there.
    """
    for option, path in (("--target", target), ("--draft", draft)):
        check_model(option, path)
    check_tokenizer("--target", target)
    cache.mkdir(parents=True, exist_ok=True)
    wanted = (part.pair.target_parameters, part.pair.draft_parameters)
    made = [
        pad(source, num_parameters, cache) if num_parameters else source
        for source, num_parameters in zip((target, draft), wanted, strict=True)
    ]
    return made[0], made[1]


def make_requests(target: Path) -> RequestMaker:
    """Return the maker of requests, the same for all arms."""
    render, eos_token_id = load_render(target)
    return RequestMaker(render, eos_token_id, SEED, MIN_REQUESTS, REQUESTS_PER_SLOT)


def measure_part(
    part: Part,
    requests: RequestMaker,
    start_engine: StartEngine,
    results: Results,
    limit: TimeLimit,
    say: Say,
) -> bool:
    """Measure what a part still lacks, as far as its time goes.

    An arm that fails is left out and named; the others are measured all the same.

    Args:
        part: What to measure.
        requests: Makes the request lists.
        start_engine: Starts an arm's engine within so many seconds.
        results: Where figures go, each as soon as it is there.
        limit: The part's time.
        say: Tells the user.

    Returns:
        Whether nothing is lacking any more.
    """
    complete = True
    for arm in part.arms:
        done = {
            cell
            for pair, name, cell in results.read()
            if (pair, name) == (part.pair.name, arm.name)
        }
        wanted = [cell for cell in cells_of(part) if cell.name not in done]
        if not wanted and LAW in done:
            continue
        if not limit.fits("start"):
            say(f"{arm.name}: no time left to start it ({limit.left_s():.0f} s)")
            complete = False
            continue
        try:
            complete &= _measure_arm(
                part,
                arm,
                wanted,
                LAW in done,
                requests,
                start_engine,
                results,
                limit,
                say,
            )
        except BenchError as error:
            say(f"{arm.name} is left out: {error}")
            complete = False
    return complete


def _measure_arm(
    part: Part,
    arm: GpuArm,
    wanted: list[Cell],
    has_law: bool,
    requests: RequestMaker,
    start_engine: StartEngine,
    results: Results,
    limit: TimeLimit,
    say: Say,
) -> bool:
    started_s = time.monotonic()
    engine = start_engine(arm, limit.left_s())
    limit.note("start", time.monotonic() - started_s)
    say(f"{arm.name}: started, {limit.left_s():.0f} s left")
    try:
        warm_up = requests.make_warm_up(_WARM_UP_CONCURRENCY)
        engine.run(_message(warm_up.prompts, _WARM_UP_CONCURRENCY, 0.0), limit.left_s())
        for cell in wanted:
            if not limit.fits("cell"):
                say(f"{arm.name}: no time left for {cell.name} and what follows")
                return False
            one = requests.make(cell, 0)
            message = _message(one.prompts, cell.concurrency, cell.temperature)
            cell_start_s = time.monotonic()
            result = engine.run({**message, "switch_at": one.switch_at}, limit.left_s())
            limit.note("cell", time.monotonic() - cell_start_s)
            results.append(part.pair.name, arm.name, cell.name, result)
            say(f"{arm.name} {cell.name}: {result['output_tokens_per_s']:.0f} tokens/s")
        if not has_law:
            if not limit.fits("cell"):
                return False
            # A prompt's neighbours in the batch are its own copies, as independent.
            prompt = warm_up.prompts[0]
            message = _message((prompt,) * LAW_SAMPLES, LAW_CONCURRENCY, 1.0)
            result = engine.run({**message, "max_tokens": LAW_TOKENS}, limit.left_s())
            results.append(part.pair.name, arm.name, LAW, result)
    finally:
        engine.close()
    return True


def _message(
    prompts: tuple[tuple[int, ...], ...], concurrency: int, temperature: float
) -> dict[str, Any]:
    return {"prompts": prompts, "concurrency": concurrency, "temperature": temperature}
