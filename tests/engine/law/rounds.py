"""Plays all cases with a new seed, and adds what comes out to a file.

After every case: a round that was broken off goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.engine.law.evidence import ALARM, SERIES, STAKES, Evidence, is_alarming

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.engine.law.cases import Case
    from tests.engine.law.judge import Verdict

BETS = f"{', '.join(SERIES)} at {STAKES}"


class Turn(NamedTuple):
    """A case, or a control: under a bias, by which it must be rejected."""

    case: Case
    num_each: int
    bias: Any = None

    def __str__(self) -> str:
        return f"{self.case} CONTROL" if self.bias else str(self.case)


class Ledger:
    """What is known about each case, kind of request and draft position.

    Attributes:
        rounds: What was played: runner, seed, tokens, and where the evidence stood; of
            one under way, what of it is done.
        evidence: By runner and name; parts of the same tokens stand beside each other.
    """

    def __init__(self, path: Path) -> None:
        """Read a file, if there is one."""
        content = {"bets": BETS, "rounds": [], "evidence": {}}
        if path.exists():
            content = json.loads(path.read_text())
        assert content["bets"] == BETS, f"{path} has other bets: move it away"
        self._path = path
        self.rounds: list[dict[str, Any]] = content["rounds"]
        self.evidence = {
            name: Evidence(np.array(values.pop("log_e")), **values)
            for name, values in content["evidence"].items()
        }

    def write(self) -> None:
        """Write it, a line for each part, whole or not at all."""
        rounds = ",\n".join(f"    {json.dumps(one)}" for one in self.rounds)
        parts = ",\n".join(
            f"    {json.dumps(name)}: "
            + json.dumps(vars(one) | {"log_e": one.log_e.round(6).tolist()})
            for name, one in sorted(self.evidence.items())
        )
        new = self._path.with_suffix(".new")
        new.write_text(
            f'{{\n  "bets": {json.dumps(BETS)},\n  "rounds": [\n{rounds}\n  ],\n'
            f'  "evidence": {{\n{parts}\n  }}\n}}\n'
        )
        new.replace(self._path)

    def take_up(self, runner: str) -> dict[str, Any]:
        """Return the round under way, or begin one with a new seed."""
        own = [one for one in self.rounds if one["runner"] == runner]
        if not own or "done" not in own[-1]:
            seed = 1 + max((one["seed"] for one in own), default=0)
            own.append({"runner": runner, "seed": seed, "num_tokens": 0, "done": []})
            self.rounds.append(own[-1])
        return own[-1]

    def add(self, runner: str, case: Case, verdict: Verdict) -> None:
        """Take in what a case brought."""
        parts = {f"case {case}": verdict.total}
        parts |= {f"kind {name}": one for name, one in verdict.by_feature.items()}
        parts |= {f"position {name}": one for name, one in verdict.by_position.items()}
        for name, evidence in parts.items():
            self.evidence.setdefault(f"{runner} {name}", Evidence()).add(evidence)

    @property
    def log_e_value(self) -> float:
        """Logarithm of the mean of all e-values, which is one itself."""
        values = [one.log_e_value for one in self.evidence.values()]
        return float(np.logaddexp.reduce(values)) - math.log(len(values))


def play(
    runner: str,
    start: Callable[..., Any],
    run_case: Callable[..., Any],
    turns: Sequence[Turn],
    ledger: Ledger,
    folder: Path,
) -> str | None:
    """Play a round, or what is left of one; return what is wrong, None if nothing is.

    Args:
        runner: Its name.
        start: Starts the engine of a drafter; models go to a folder.
        run_case: Runs a case on it.
        turns: Those of one drafter stand together.
        ledger: Taken into it is what comes out.
        folder: For models, empty.
    """
    current = ledger.take_up(runner)
    left = [turn for turn in turns if str(turn) not in current["done"]]
    by_drafter = itertools.groupby(left, key=lambda turn: turn.case.drafter)
    for number, (drafter, own) in enumerate(by_drafter):
        with start(folder / str(number), drafter) as engine:
            for turn in own:
                case, num_each, bias = turn
                options = {"bias": bias, "num_each": num_each}
                verdict = run_case(engine, case, current["seed"], **options).verdict
                say(
                    f"{runner} seed {current['seed']} {turn}: {describe(verdict.total)}"
                )
                if bias is None:
                    ledger.add(runner, case, verdict)
                    current["num_tokens"] += verdict.total.num_tokens
                elif not is_alarming(verdict.total, num_tests=1):
                    return "A control was not rejected: the test has lost its power"
                current["done"].append(str(turn))
                ledger.write()
    del current["done"]
    current["log10_e"] = round(ledger.log_e_value / math.log(10), 3)
    ledger.write()
    say(f"log10(e) of everything: {current['log10_e']}; most in")
    worst = sorted(ledger.evidence.items(), key=lambda part: -part[1].log_e_value)[:5]
    for name, evidence in worst:
        say(f"  {name}: {describe(evidence)}")
    # That it ever came so far has a probability of 1e-4 if all is well.
    is_wrong = ledger.log_e_value > math.log(ALARM)
    return "ALARM: tokens do not follow the target's law" if is_wrong else None


def describe(evidence: Evidence) -> str:
    """Say in a line how many tokens there were and what they prove."""
    return (
        f"{evidence.num_tokens} tokens, {evidence.num_verified} verified, "
        f"{evidence.num_impossible} impossible, "
        f"log10(e) {evidence.log_e_value / math.log(10):.1f}"
    )


def say(line: str) -> None:
    """Tell whoever waits."""
    print(line, flush=True)  # noqa: T201 - a command's output
