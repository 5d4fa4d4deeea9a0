"""Inside an arm's process: one engine that runs the requests it is told to."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.offline import OfflineEngine

from .closed_loop import Delivery, run_closed_loop
from .measurement import Counters, measure
from .plan import Block
from .watch import Watch

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection, log_file: Path, arguments: Mapping[str, Any]) -> None:
    """Start an engine, and answer messages until the controller ends this process.

    They are arguments of `ArmEngine.run`, answered by what it returns; None tells that
    the engine has started, and a text that it has failed. What this process prints goes
    into the log.
    """
    _end_with_parent()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        own = ArmEngine(arguments)
        connection.send(None)
        while True:
            connection.send(own.run(*connection.recv()))
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """Have the kernel kill this process when the controller ends, stopped or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        sys.exit(1)
    # Not in the group that a terminal's Ctrl-C reaches: the controller ends it.
    os.setpgid(0, 0)


class ArmEngine:
    """Runs blocks of requests on one engine."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine, with the arguments that `serving.offline` makes."""
        self._engine = OfflineEngine(arguments)
        self._watch: Watch | None = None

        def watch(planner: Any) -> Watch:
            self._watch = Watch(planner)
            return self._watch

        self._engine.wrap_planner(watch)

    def run(self, block: Block, trace: Path | None = None) -> dict[str, Any]:
        """Run a block of requests, and return what `measure` and `Counters` found.

        All steps go into the trace, if there is a planner.
        """
        # Takes seconds and reads the environment: not where the controller imports.
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        counters, watch = Counters(self._engine.snapshot), self._watch
        sampling = SamplingParams(
            temperature=block.temperature,
            max_tokens=block.max_tokens,
            stop_token_ids=[block.eos_token_id],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

        def add(index: int) -> None:
            self._engine.add(str(index), block.prompts[index], sampling.clone())

        def on_mark(name: str) -> None:
            counters.mark()
            if watch is not None:
                watch.mark(name)

        gc.collect()
        if watch is not None:
            watch.start_over()
        record = run_closed_loop(
            *(add, self._step, len(block.prompts), block.concurrency),
            on_mark=on_mark,
        )
        if watch is not None and trace is not None:
            watch.save(trace)
        return measure(record) | counters.result()

    def _step(self) -> list[Delivery]:
        return [
            Delivery(int(one.request_id), one.outputs[0].token_ids, one.finished)
            for one in self._engine.step()
        ]
