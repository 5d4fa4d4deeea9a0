"""Inside a run's process: an engine answers requests that all came at once.

``python -m loadtest.paper.worker`` reads a job as JSON from standard input and writes
what it measured as the last line of standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serving.offline import OfflineEngine

STAGES = ("score", "verify", "draft", "select", "rest")
"""Where a run's time goes: the target's pass, judging drafts, the drafter's passes,
the policy, and everything else."""

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 24


class _Clock:
    """Stands between engine and planner, and adds up what steps say they took."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.spent_ms: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def observe_timing(self, timing: Any) -> None:
        self.spent_ms["score"] += timing.target_ms
        self.spent_ms["verify"] += timing.sample_ms
        self.spent_ms["draft"] += timing.draft_first_ms + timing.draft_next_ms
        self._planner.observe_timing(timing)


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine, send it everything at once, and measure until all is answered.

    Args:
        job: `arguments` of the engine, `prompts` as token ids, `max_tokens`,
            `temperature` and `eos_token_id`.

    Returns:
        Plain values: seconds and tokens of the run; of each request the times to the
        first and the last token, s, and its tokens; what was counted; ms by stage,
        None where no policy ran.
    """
    engine = OfflineEngine(job["arguments"])
    clocks: list[_Clock] = []

    def watch(planner: Any) -> _Clock:
        clocks.append(_Clock(planner))
        return clocks[-1]

    engine.wrap_planner(watch)
    warm_up = {**job, "max_tokens": _WARM_UP_TOKENS}
    _answer(engine, warm_up, job["prompts"][:_WARM_UP_REQUESTS], "warm-up")
    before = engine.snapshot()
    for clock in clocks:
        clock.spent_ms.clear()
    found = _answer(engine, job, job["prompts"], "request")
    after = engine.snapshot()
    engine.shutdown()
    counters = stages = None
    if before is not None and after is not None:
        counters = _subtract(after, before)
        spent = dict(clocks[-1].spent_ms)
        spent["select"] = 1e3 * counters["planning_seconds_total"]
        spent["rest"] = 1e3 * found["seconds"] - sum(spent.values())
        stages = {name: spent.get(name, 0.0) for name in STAGES}
    return found | {"counters": counters, "stages_ms": stages}


def _answer(
    engine: OfflineEngine,
    job: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    name: str,
) -> dict[str, Any]:
    # Takes seconds and reads the environment: not where the controller imports.
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=job["temperature"],
        max_tokens=job["max_tokens"],
        stop_token_ids=[job["eos_token_id"]],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    num_tokens: Counter[str] = Counter()
    num_steps = num_done = 0
    began_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(f"{name}-{number}", prompt, sampling.clone())
    while num_done < len(prompts):
        outputs = engine.step()
        now_s = time.perf_counter() - began_s
        num_steps += 1
        for one in outputs:
            tokens = len(one.outputs[0].token_ids)
            if tokens:
                first_s.setdefault(one.request_id, now_s)
                last_s[one.request_id] = now_s
                num_tokens[one.request_id] += tokens
            num_done += one.finished
    ids = list(num_tokens)
    return {
        "seconds": time.perf_counter() - began_s,
        "num_steps": num_steps,
        "first_s": [round(first_s[one], 6) for one in ids],
        "last_s": [round(last_s[one], 6) for one in ids],
        "num_tokens": [num_tokens[one] for one in ids],
    }


def _subtract(after: Any, before: Any) -> Any:
    """Subtract numbers, in lists too; leave out everything else."""
    if isinstance(after, Mapping):
        both = {k: _subtract(v, before.get(k)) for k, v in after.items() if k in before}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(after, list):
        return [_subtract(a, b) for a, b in zip(after, before, strict=True)]
    if isinstance(after, (int, float, np.number)) and not isinstance(after, bool):
        return after - before
    return None


def main() -> int:
    """Run the job on standard input."""
    sys.stdout.write(json.dumps(run(json.load(sys.stdin))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
