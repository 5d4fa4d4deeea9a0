"""Evidence that adds up over rounds, in a file."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.law.evidence import ALARM, SERIES, STAKES, Evidence

BETS = f"{', '.join(SERIES)} at {STAKES}"


@dataclass
class Ledger:
    """What is known about each case, kind of request and draft position.

    Attributes:
        path: The file, written after every case.
        rounds: What was played: runner, seed, tokens, and where the evidence stood; of
            one under way, what of it is done.
        evidence: By runner and name; parts of the same tokens stand beside each other.
    """

    path: Path
    rounds: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, Evidence] = field(default_factory=dict)

    @classmethod
    def read(cls, path):
        """Read a file; an empty ledger if there is none.

        Raises:
            ValueError: If other bets were made in it.
        """
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text())
        if content["bets"] != BETS:
            raise ValueError(
                f"{path} has evidence of other bets than {BETS}: move it away to begin "
                "anew"
            )
        evidence = {
            name: Evidence(np.array(values.pop("log_e")), **values)
            for name, values in content["evidence"].items()
        }
        return cls(path, content["rounds"], evidence)

    def write(self):
        """Write it, a line for each part, whole or not at all."""
        rounds = ",\n".join(f"    {json.dumps(one)}" for one in self.rounds)
        parts = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(_to_plain(self.evidence[name]))}"
            for name in sorted(self.evidence)
        )
        new = self.path.with_suffix(".new")
        new.write_text(
            f'{{\n  "bets": {json.dumps(BETS)},\n  "rounds": [\n{rounds}\n  ],\n'
            f'  "evidence": {{\n{parts}\n  }}\n}}\n'
        )
        new.replace(self.path)

    def take_up(self, runner):
        """Return the round under way, or begin one with a new seed."""
        own = [one for one in self.rounds if one["runner"] == runner]
        if not own or "done" not in own[-1]:
            seed = 1 + max((one["seed"] for one in own), default=0)
            own.append({"runner": runner, "seed": seed, "num_tokens": 0, "done": []})
            self.rounds.append(own[-1])
        return own[-1]

    def add(self, runner, case, verdict):
        """Take in what a case brought."""
        parts = {f"case {case}": verdict.total}
        parts |= {f"kind {name}": one for name, one in verdict.by_feature.items()}
        parts |= {f"position {name}": one for name, one in verdict.by_position.items()}
        for name, evidence in parts.items():
            self.evidence.setdefault(f"{runner} {name}", Evidence()).add(evidence)

    @property
    def log_e_value(self):
        """Logarithm of the mean of all e-values, which is one itself."""
        values = [one.log_e_value for one in self.evidence.values()]
        if not values:
            return 0.0
        return float(np.logaddexp.reduce(values)) - math.log(len(values))

    @property
    def is_alarming(self):
        """Whether it ever came so far has a probability of 1e-4 if all is well."""
        return self.log_e_value > math.log(ALARM)

    def name_worst(self):
        """Describe the five parts with the most evidence against them."""
        evidence = self.evidence.items()
        worst = sorted(evidence, key=lambda part: -part[1].log_e_value)[:5]
        return [f"{name}: {describe(one)}" for name, one in worst]


def describe(evidence):
    """Say in a line how many tokens there were and what they prove."""
    text = (
        f"{evidence.num_tokens} tokens, {evidence.num_verified} verified, "
        f"log10(e) {evidence.log_e_value / math.log(10):.1f}"
    )
    if evidence.num_impossible:
        text += f", {evidence.num_impossible} impossible"
    return text


def _to_plain(evidence):
    counts = dict(vars(evidence))
    rows = counts.pop("log_e").tolist()
    return counts | {"log_e": [[round(value, 6) for value in row] for row in rows]}
