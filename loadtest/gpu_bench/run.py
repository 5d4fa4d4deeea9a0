"""Measures one part: arm after arm, cell after cell, until its time is up."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from loadtest.demo_pair.pad import pad_target
from loadtest.demo_pair.tasks import TASKS, draw
from loadtest.engine_bench.arm_process import ArmProcess
from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.models import check_model, check_tokenizer, digest_model
from loadtest.engine_bench.plan import Cell
from loadtest.engine_bench.workloads import RequestMaker, Requests, load_render

from .plan import LAW_ARM, MAX_TOKENS, GpuArm, Part, env_of, llm_args
from .results import Results
from .time_limit import TimeLimit

SEED = 7
MIN_REQUESTS = 12
REQUESTS_PER_SLOT = 3

LAW, LAW_CONTROL = "law", "law-control"
LAW_TASK = "codes"
LAW_SAMPLES = 1536
LAW_CONCURRENCY = 64
LAW_TOKENS = 24
"""One prompt many times at temperature 1: what is sampled follows one law, whatever the
engine verifies. A task whose replies are made up, so that there is something to tell
apart."""

LAW_CONTROL_TEMPERATURE = 1.15
"""Of a second sample without speculation, which the comparison must tell from the
first."""

WAITS = "waits"

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


class RequestLists:
    """Every list of requests made once, for all arms."""

    def __init__(self, maker: RequestMaker) -> None:
        """Start without any."""
        self._maker = maker
        self._made: dict[tuple[str, int], Requests] = {}
        self.eos_token_id = maker.eos_token_id

    def make(self, cell: Cell) -> Requests:
        """Return the requests of a cell; temperatures share theirs."""
        key = (cell.workload, cell.concurrency)
        if key not in self._made:
            self._made[key] = self._maker.make(cell, 0)
        return self._made[key]

    def make_warm_up(self) -> Requests:
        """Return requests that are thrown away."""
        key = ("warm-up", _WARM_UP_CONCURRENCY)
        if key not in self._made:
            self._made[key] = self._maker.make_warm_up(_WARM_UP_CONCURRENCY)
        return self._made[key]

    def make_law_prompt(self) -> tuple[int, ...]:
        """Return the prompt whose replies are compared as samples."""
        asked = draw(TASKS[LAW_TASK], random.Random(SEED), held_out=True)
        return tuple(self._maker.render(asked.messages[:-1], asked.needs_tools))


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
            log_file(log_folder, part, arm),
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


def log_file(folder: Path, part: Part, arm: GpuArm) -> Path:
    """Return where an arm's engine writes its log."""
    return folder / f"{part.name}-{arm.name}.log"


def make_models(
    part: Part, target: Path, draft: Path, cache: Path, limit: TimeLimit
) -> tuple[Path, Path]:
    """Return target and draft of a part's size, padded at most once.

    Raises:
        BenchError: If the source models are not there, or there is no time left.
    """
    for option, path in (("--target", target), ("--draft", draft)):
        check_model(option, path)
    check_tokenizer("--target", target)
    cache.mkdir(parents=True, exist_ok=True)
    pair = part.pair
    return (
        _pad(target, pair.target_parameters, pair.target_width, cache, limit),
        _pad(draft, pair.draft_parameters, pair.draft_width, cache, limit),
    )


def _pad(
    source: Path, num_parameters: int, width: int, cache: Path, limit: TimeLimit
) -> Path:
    if not num_parameters:
        return source
    digest = digest_model(source)[:8]
    output = cache / f"{source.name}-{num_parameters}-{width}-{digest}"
    if output.exists():
        return output
    unfinished = output.with_name(f"{output.name}.{os.getpid()}")
    # In a process of its own, which can be ended when the time is up.
    process = get_context("spawn").Process(
        target=pad_target,
        args=(source, unfinished, num_parameters),
        kwargs={"hidden_size": width},
    )
    process.start()
    try:
        process.join(limit.left_s())
        if process.exitcode is None:
            raise BenchError(f"no time left to make {output.name}; give it more")
        if process.exitcode:
            raise BenchError(f"{output.name} could not be made; what it said is above")
        unfinished.rename(output)
    finally:
        process.kill()
        process.join()
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def make_requests(target: Path) -> RequestLists:
    """Return the requests, the same for all arms."""
    render, eos_token_id = load_render(target)
    return RequestLists(
        RequestMaker(render, eos_token_id, SEED, MIN_REQUESTS, REQUESTS_PER_SLOT)
    )


def measure_part(
    part: Part,
    requests: RequestLists,
    start_engine: StartEngine,
    results: Results,
    limit: TimeLimit,
    say: Say,
    on_arm: Callable[[GpuArm], None] = lambda _: None,
) -> bool:
    """Measure what a part still lacks, as far as its time goes.

    Every arm gets an equal share of the time that the arms before it have left over.
    One that fails is left out and named; the others are measured all the same.

    Args:
        part: What to measure.
        requests: The request lists.
        start_engine: Starts an arm's engine within so many seconds.
        results: Where figures go, each as soon as it is there.
        limit: The part's time.
        say: Tells the user.
        on_arm: Called after every arm that was started.

    Returns:
        Whether nothing is lacking any more.
    """
    found = results.read()
    lacking = {
        arm.name: [
            name
            for name in wanted_cells(part, arm)
            if (part.pair.name, arm.name, name) not in found
        ]
        for arm in part.arms
    }
    pending = [arm for arm in part.arms if lacking[arm.name]]
    complete = True
    for index, arm in enumerate(pending):
        share = limit.share(len(pending) - index)
        if not share.fits("start"):
            say(f"{arm.name}: no time left to start it ({share.left_s():.0f} s)")
            complete = False
            continue
        try:
            complete &= _measure_arm(
                part,
                arm,
                lacking[arm.name],
                requests,
                start_engine,
                results,
                share,
                say,
            )
        except BenchError as error:
            say(f"{arm.name} is left out: {error}")
            complete = False
        on_arm(arm)
    return complete


def wanted_cells(part: Part, arm: GpuArm) -> list[str]:
    """Return the names of what is measured of an arm, most wanted first.

    Samples of the law need an arm whose drafts are drawn, and one without drafts to
    compare it with.
    """
    cells = [cell.name for cell in part.cells]
    if LAW_ARM not in part.arms:
        return cells
    if arm == LAW_ARM:
        return [LAW, *cells]
    return [LAW, LAW_CONTROL, *cells] if arm.kind == "none" else cells


def _measure_arm(
    part: Part,
    arm: GpuArm,
    wanted: list[str],
    requests: RequestLists,
    start_engine: StartEngine,
    results: Results,
    limit: TimeLimit,
    say: Say,
) -> bool:
    cells = {cell.name: cell for cell in part.cells}
    started_s = time.monotonic()
    engine = start_engine(arm, limit.left_s())
    limit.note("start", time.monotonic() - started_s)
    say(f"{arm.name}: started, {limit.left_s():.0f} s left")
    try:
        warm_up = _message(requests.make_warm_up().prompts, _WARM_UP_CONCURRENCY, 0.0)
        engine.run(warm_up, limit.left_s())
        for name in wanted:
            if not limit.fits("cell"):
                say(f"{arm.name}: no time left for {name} and what follows")
                return False
            if name in cells:
                cell = cells[name]
                one = requests.make(cell)
                message = _message(one.prompts, cell.concurrency, cell.temperature)
                message["switch_at"] = one.switch_at
            else:
                # A prompt's neighbours in the batch are its own copies, as independent.
                message = _message(
                    (requests.make_law_prompt(),) * LAW_SAMPLES,
                    LAW_CONCURRENCY,
                    LAW_CONTROL_TEMPERATURE if name == LAW_CONTROL else 1.0,
                )
                message |= {"max_tokens": LAW_TOKENS, "keeps_tokens": True}
            cell_start_s = time.monotonic()
            result = engine.run(message, limit.left_s())
            limit.note("cell", time.monotonic() - cell_start_s)
            results.append(part.pair.name, arm.name, name, result)
            say(f"{arm.name} {name}: {result['output_tokens_per_s']:.0f} tokens/s")
    finally:
        engine.close()
    return True


def _message(
    prompts: tuple[tuple[int, ...], ...], concurrency: int, temperature: float
) -> dict[str, Any]:
    return {"prompts": prompts, "concurrency": concurrency, "temperature": temperature}
