"""One cell: a block of requests answered in four ways, again and again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.engine.models import size_kv_cache
from loadtest.engine.plan import Block, Cell, deploy, longest_prompt, set_up_cpu
from loadtest.engine.pool import EngineProcess
from loadtest.engine.workloads import RequestMaker

from .engine import AUDITED, HELD, POLICY, AlternatingEngine

PLAIN = "none"
"""In an engine of its own, without a drafter."""

WAYS = (AUDITED, POLICY, HELD, PLAIN)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells have in common.

    Attributes:
        audit: Share of steps that are audited.
        ways: In which every block of requests is answered; some more often than once.
        rounds: How often.
        blocks: Of requests, answered in one go: with short replies one is over in a few
            dozen steps, most of which are its beginning or end.
        warm_up_rounds: Blocks before, under the audited policy alone: what it finds out
            in them, and a trial that it loses, is not measured.
        most: Requests in flight in any cell.
    """

    target: Path
    draft: Path
    arm: Arm
    audit: float
    max_tokens: int
    ways: Sequence[str]
    rounds: int
    blocks: int
    warm_up_rounds: int
    most: int
    logs: Path

    def measure(
        self, cell: Cell, requests: RequestMaker, say: Callable[[str], None]
    ) -> dict[str, Any]:
        """Measure a cell on engines that start anew.

        Returns:
            Tokens per second by way, one for each round; what the audit reports in the
            end; what an audit that began after warming up says.
        """
        engines = {
            AUDITED: EngineProcess(
                self.arm.name,
                self._deploy(self.draft, self.arm.settings() | {"audit": self.audit}),
                self.logs / f"{self.arm.file_name}.log",
                AlternatingEngine,
            )
        }
        if PLAIN in self.ways:
            engines[PLAIN] = EngineProcess(
                PLAIN, self._deploy(None, {"name": PLAIN}), self.logs / "none.log"
            )
        try:
            for engine in engines.values():
                engine.wait_until_ready()
            return self._measure(cell, requests, engines, say)
        finally:
            for engine in engines.values():
                engine.end()

    def _measure(
        self,
        cell: Cell,
        requests: RequestMaker,
        engines: dict[str, EngineProcess],
        say: Callable[[str], None],
    ) -> dict[str, Any]:
        ours, plain = engines[AUDITED], engines.get(PLAIN)
        warm_up = requests.make_warm_up(cell.concurrency)
        if plain is not None:
            plain.answer_all(warm_up)
        for way in (AUDITED, POLICY, HELD):
            ours.ask("run_as", way, warm_up)
        for number in range(self.warm_up_rounds):
            ours.ask("run_as", AUDITED, self._make(requests, cell, 0, number))
        ours.ask("forget")
        report: dict[str, float] = {}
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(self.rounds):
            block = self._make(requests, cell, 1, number)
            for way in random.Random(f"{cell.name} {number}").sample(
                self.ways, len(self.ways)
            ):
                if way == PLAIN and plain is not None:
                    found = plain.answer_all(block)
                    found["num_tokens"] = sum(found["num_tokens"])
                else:
                    found = ours.ask("run_as", way, block)
                if way == AUDITED:
                    report = found["report"]
                speeds[way].append(found["num_tokens"] / found["seconds"])
            told = ", ".join(
                f"{way} {own[-1]:.1f}" for way, own in speeds.items() if own
            )
            say(f"{cell.name} {number + 1}: {told}; {_describe(report)}")
        return {"rounds": self.rounds, "tokens_per_s": speeds, "report": report}

    def _make(
        self, requests: RequestMaker, cell: Cell, kind: int, number: int
    ) -> Block:
        """Put blocks together; `kind` is 0 while warming up."""
        first = self.blocks * number
        parts = [requests.make(cell, kind, first + n) for n in range(self.blocks)]
        prompts = tuple(prompt for part in parts for prompt in part.prompts)
        return replace(parts[0], prompts=prompts)

    def _deploy(self, draft: Path | None, policy: dict[str, Any]) -> dict[str, Any]:
        length = self._longest + self.max_tokens + self.arm.max_depth
        kv_bytes = size_kv_cache(
            self.target, self.draft, "bfloat16", self.most, length, 2
        )
        engine = {
            "device": "cpu",
            "dtype": "bfloat16",
            "max_model_len": length,
            "max_num_seqs": self.most,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False,
        }
        return deploy(self.target, draft, policy, engine | set_up_cpu(kv_bytes))

    @property
    def _longest(self) -> int:
        return longest_prompt("mixed")


def _describe(report: dict[str, float]) -> str:
    wanted = ("gain", "audit", "held")
    return ", ".join(
        f"{name} {value:.4g}"
        for name, value in report.items()
        if any(part in name for part in wanted)
    )


def write_untrained(draft: Path, folder: Path) -> Path:
    """Write a drafter like another one, whose weights nobody has trained."""
    if folder.exists():
        return folder
    # Take seconds, which only who asks for it shall wait for.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
