"""Inside an arm's process: one engine that runs the requests it is told to."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.offline import OfflineEngine

from .loop import Delivery, LoopRecord, run_loop
from .measurement import Counters, digest_replies, list_deliveries, measure, subtract
from .plan import Block
from .watch import Watch

STAGES = ("score", "verify", "draft", "select", "rest")
"""Where a run's time goes: the target's pass, judging drafts, the drafter's passes,
the policy, and everything else."""

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection, log_file: Path, start: Callable[[], Any]) -> None:
    """Start an engine, and answer messages until the controller ends this process.

    They are the name of a method of what `start` returns, and its arguments, answered
    by what it returns; None tells that the engine has started, and a text that it has
    failed. What this process prints goes into the log.
    """
    _end_with_parent()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        own = start()
        connection.send(None)
        while True:
            name, *told = connection.recv()
            connection.send(getattr(own, name)(*told))
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

    def __init__(
        self, arguments: Mapping[str, Any], *, hold_at_zero: bool = False
    ) -> None:
        """Start the engine as `serving.offline` says; held, it drafts nothing."""
        self._engine = OfflineEngine(arguments)
        self._watch: Watch | None = None
        self._hold_at_zero = hold_at_zero
        self._engine.wrap_planner(self._put_before)

    def _put_before(self, planner: Any) -> Any:
        """Return who is asked in a planner's place."""
        self._watch = Watch(planner, hold_at_zero=self._hold_at_zero)
        return self._watch

    def run(self, block: Block, trace: Path | None = None) -> dict[str, Any]:
        """Run a block of requests, and return what `measure` and `Counters` found.

        All steps go into the trace, if there is a planner.
        """
        counters, watch = Counters(self._engine.snapshot), self._watch

        def on_mark(name: str) -> None:
            if name != "switch":
                counters.mark()
                if watch is not None:
                    watch.mark(name)

        record = self._answer(block, trace, on_mark)[0]
        return measure(record) | counters.result()

    def answer(self, block: Block, trace: Path | None = None) -> dict[str, Any]:
        """Answer a block of requests to the last one; all steps go into the trace.

        Returns:
            Plain values: seconds from the first moment to the last token, and steps;
            of each request when it was due and was handed to the engine, when it
            brought its first and its last token, s from that moment on, its tokens and
            a digest of its reply; what was counted, and ms by stage, None where no
            policy ran; and the share of the machine that others used meanwhile.
        """
        before, others = self._engine.snapshot(), Counters(lambda: None)
        others.mark()
        record, added_s = self._answer(block, trace, lambda _: None)
        others.mark()
        seconds = record.steps[-1][0] - record.began_s
        counters = stages = None
        if self._watch is not None:
            counters = subtract(self._engine.snapshot(), before)
            spent = self._watch.add_up_stages()
            spent["select"] = 1e3 * counters["planning_seconds_total"]
            spent["rest"] = 1e3 * seconds - sum(spent.values())
            stages = {name: spent[name] for name in STAGES}
        # Groups are in the order of requests.
        by_request = list_deliveries(record).groupby("request")
        times = by_request["end_s"].agg(["first", "last"]) - record.began_s
        return {
            "seconds": seconds,
            "num_steps": len(record.steps),
            "due_s": list(block.due_s or [0.0] * len(block.prompts)),
            "added_s": [round(one - record.began_s, 6) for one in added_s],
            "first_s": times["first"].round(6).tolist(),
            "last_s": times["last"].round(6).tolist(),
            "num_tokens": by_request["tokens"].sum().tolist(),
            "digests": digest_replies(by_request["token_ids"].sum()),
            "counters": counters,
            "stages_ms": stages,
            "other_cpu_share": others.result()["other_cpu_share"],
        }

    def _answer(
        self, block: Block, trace: Path | None, on_mark: Callable[[str], None]
    ) -> tuple[LoopRecord, list[float]]:
        """Return what happened, and when each request was handed to the engine."""
        sampling, added_s = _make_sampling(block), list[float]()

        def add(index: int) -> None:
            added_s.append(time.perf_counter())
            params = sampling.clone()
            if block.limits:
                params.max_tokens = block.limits[index]
            priority = block.priorities[index] if block.priorities else 0
            self._engine.add(str(index), block.prompts[index], params, priority)

        if self._watch is not None:
            self._watch.start_over()
        gc.collect()
        record = run_loop(
            *(add, self._step, len(block.prompts), block.concurrency),
            on_mark=on_mark,
            switch_at=block.switch_at,
            due_s=block.due_s,
        )
        if self._watch is not None and trace is not None:
            self._watch.save(trace)
        return record, added_s

    def _step(self) -> list[Delivery]:
        return [
            Delivery(int(one.request_id), one.outputs[0].token_ids, one.finished)
            for one in self._engine.step()
        ]


def _make_sampling(block: Block) -> Any:
    # Takes seconds and reads the environment: not where the controller imports.
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=block.temperature,
        max_tokens=block.max_tokens,
        stop_token_ids=[block.eos_token_id],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
