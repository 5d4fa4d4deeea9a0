"""The controller: run after run, each in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.engine.models import find_method, size_kv_cache
from loadtest.environment import describe_machine, describe_piece, describe_versions
from loadtest.interrupts import interruptible
from loadtest.load.workloads import Conversation
from loadtest.model_files import describe_model
from loadtest.progress import Progress
from loadtest.result_folder import ResultFolder, read_tail
from serving.offline import start_arguments

from .grid import Arm, Task, make_tasks

MAX_MODEL_LEN = 2048
"""As in the paper's scripts; longer prompts are left out."""

_RUN_TIMEOUT_S = 3600.0
_ENV = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}


class Store(ResultFolder):
    """An output folder, with a record for each run."""

    records_file = "runs.jsonl"
    output_files = ("results.json", "runs.csv", "results.md", "results.png")
    folders = ("logs",)
    error = LoadTestError


@dataclass(frozen=True, slots=True)
class Experiment:
    """A grid on a pair of models.

    Attributes:
        grid: A preset of `grid.yaml`.
        target: Folder of the target.
        draft: Folder of the draft.
        temperature: Of all requests.
        acceptance: Chances with which drafts are accepted whatever they are, each of
            a position and all before it; None lets the target judge.
        arms: Patterns of the names of arms that are measured now.
        gpu: Name of the GPU; None on the CPU.
    """

    grid: Mapping[str, Any]
    target: Path
    draft: Path
    temperature: float = 0.0
    acceptance: Sequence[float] | None = None
    arms: Sequence[str] = ("*",)
    gpu: str | None = None

    def measure(
        self,
        store: Store,
        prompts: Mapping[str, Sequence[Conversation]],
        minutes: float | None = None,
    ) -> bool:
        """Measure what is missing; every finished run is kept.

        Args:
            store: Where runs go.
            prompts: Of each dataset.
            minutes: Begin nothing new after this long; None for no limit.

        Returns:
            Whether everything has been measured.

        Raises:
            LoadTestError: If the folder holds what was measured under other
                conditions, or a run fails.
        """
        models = {"target": self.target, "draft": self.draft}
        described = {role: describe_model(path) for role, path in models.items()}
        machine, versions = describe_machine(self.gpu), describe_versions()
        # Runs are left out: more of them may be added later.
        grid = {name: v for name, v in self.grid.items() if name != "runs"}
        store.check_conditions(
            grid
            | {"temperature": self.temperature, "acceptance": self.acceptance}
            | {role: one["digest"] for role, one in described.items()}
            | {f"version of {name}": one for name, one in versions.items()}
            | {"cpu": machine["cpu"], "gpu": self.gpu, "datasets": sorted(prompts)}
        )
        done = {(r["run"], r["dataset"], r["cap"], r["arm"]) for r in store.records()}
        tasks = [
            task
            for task in make_tasks(self.grid, list(prompts), self.arms)
            if task.key not in done
        ]
        if not tasks:
            return True
        pieces = [*store.environment().get("pieces", []), describe_piece()]
        store.write_environment(
            {"machine": machine, "models": described}
            | {"versions": versions, "pieces": pieces}
        )
        tokens, eos_token_id = self._tokenize(prompts)
        deadline_s = time.monotonic() + 60 * (minutes or math.inf)
        progress = Progress(len(tasks))
        for task in tasks:
            progress.expect(f"{task.cap}", 1)
        with interruptible():
            for task in tasks:
                if time.monotonic() > deadline_s:
                    return False
                place = f"run {task.run} {task.dataset} cap {task.cap} {task.arm.name}"
                progress.show(place)
                began_s = time.monotonic()
                job = self._job(task, tokens[task.dataset], eos_token_id)
                found = self._run(task, job, store.folder / "logs")
                record = {"run": task.run, "dataset": task.dataset, "cap": task.cap}
                store.append_record(record | {"arm": task.arm.name} | found)
                speed = sum(found["num_tokens"]) / found["seconds"]
                told = f"{place}: {speed:.0f} tokens/s"
                progress.advance(f"{task.cap}", time.monotonic() - began_s, told)
        return True

    def _tokenize(
        self, prompts: Mapping[str, Sequence[Conversation]]
    ) -> tuple[dict[str, list[list[int]]], int]:
        """Return token ids of the prompts that are short enough, and the end's."""
        # Takes seconds, which only who measures shall wait for.
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer, found = load_tokenizer(self.target), {}
        longest = MAX_MODEL_LEN - self.grid["max_tokens"] - 16
        for name, conversations in prompts.items():
            rendered = (
                render(tokenizer, [*one.messages], with_tools=False, reply_follows=True)
                for one in conversations
            )
            short = [ids for ids in rendered if len(ids) <= longest]
            if not short:
                raise LoadTestError(f"{name}: no prompt has {longest} tokens or fewer")
            found[name] = short
        return found, int(tokenizer.eos_token_id)

    def _job(
        self, task: Task, tokens: Sequence[Sequence[int]], eos_token_id: int
    ) -> dict[str, Any]:
        count = self.grid["requests"]
        # Other prompts in each run, the same for all arms.
        first = (task.run - 1) * count
        asked = [tokens[number % len(tokens)] for number in range(first, first + count)]
        return {
            "prompts": asked,
            "max_tokens": self.grid["max_tokens"],
            "temperature": self.temperature,
            "eos_token_id": eos_token_id,
        }

    def _deployment(self, arm: Arm, cap: int) -> dict[str, Any]:
        model = {"id": "paper", "target": str(self.target.absolute())}
        policy = arm.policy()
        if arm.method != "none":
            model["draft"] = str(self.draft.absolute())
            policy["method"] = find_method(self.draft)
            if self.acceptance is not None:
                depth = arm.draft_tokens + arm.extra
                rates = [*self.acceptance, *[0.0] * depth][:depth]
                policy["extra"] = {
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": rates,
                }
        engine: dict[str, Any] = {
            "device": "cpu" if self.gpu is None else "gpu",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": cap,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False,
        }
        found = {"model": model, "policy": policy, "engine": engine}
        if self.gpu is not None:
            return found | {"replicas": {"num_gpus": 1}}
        engine |= {
            "enforce_eager": True,
            "cpu_threads": len(os.sched_getaffinity(0)),
            "kv_cache_memory_bytes": size_kv_cache(
                self.target, self.draft, "bfloat16", cap, MAX_MODEL_LEN // 2, 1
            ),
        }
        return found

    def _run(self, task: Task, job: dict[str, Any], logs: Path) -> dict[str, Any]:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{task.cap}-{task.arm.name.replace(' ', '-')}.log"
        try:
            arguments, env = start_arguments(self._deployment(task.arm, task.cap))
        except ValueError as error:
            raise LoadTestError(f"{task.arm.name}: {error}") from None
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "loadtest.paper.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | env | _ENV,
                text=True,
                # A terminal's Ctrl-C is for the controller, which ends it.
                start_new_session=True,
            )
            try:
                told = json.dumps(job | {"arguments": arguments})
                output, _ = process.communicate(told, timeout=_RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                output = ""
            finally:
                process.kill()
                process.wait()
        try:
            found: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            raise LoadTestError(
                f"the engine of {task.arm.name} failed; the end of {log}:\n"
                f"{read_tail(log)}"
            ) from None
        return found
