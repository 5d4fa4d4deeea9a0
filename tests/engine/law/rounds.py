"""Plays all cases with a new seed, and adds what comes out to a file.

After every case: a round that was broken off goes on where it stopped.
"""

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engine.law.cases import Case
from tests.engine.law.evidence import is_alarming
from tests.engine.law.ledger import Ledger, describe

EVIDENCE = Path(__file__).parent / "evidence.json"


@dataclass(frozen=True)
class Control:
    """A case that must be rejected under a bias, in a round of its own."""

    case: Case
    bias: Callable
    num_each: int


@dataclass(frozen=True)
class Game:
    """What is played on one runner.

    Attributes:
        runner: Its name.
        start: Starts the engine of a drafter; models go to a folder.
        run_case: Runs a case on it.
        cases: Those of one drafter stand together.
        num_each: Requests of each kind in a case.
        controls: Played after the cases.
    """

    runner: str
    start: Callable
    run_case: Callable
    cases: Sequence[Case]
    num_each: int
    controls: Sequence[Control] = ()

    def play(self, ledger, folder):
        """Play a round, or what is left of one; models go to an empty folder.

        Returns:
            Whether the controls were rejected. Those that were not are left to play.
        """
        current = ledger.take_up(self.runner)
        seed = current["seed"]
        turns = {str(case): (case, None, self.num_each) for case in self.cases}
        for one in self.controls:
            turns[f"{one.case} CONTROL"] = one.case, one.bias, one.num_each
        left = [name for name in turns if name not in current["done"]]
        by_drafter = itertools.groupby(left, key=lambda name: turns[name][0].drafter)
        for number, (drafter, names) in enumerate(by_drafter):
            with self.start(folder / str(number), drafter) as engine:
                for name in names:
                    begin_s = time.monotonic()
                    case, bias, num_each = turns[name]
                    how = {"bias": bias, "num_each": num_each}
                    verdict = self.run_case(engine, case, seed, **how).verdict
                    if bias is None:
                        ledger.add(self.runner, name, verdict)
                        current["num_tokens"] += verdict.total.num_tokens
                    if bias is None or is_alarming(verdict.total, num_tests=1):
                        current["done"].append(name)
                        ledger.write()
                    say(
                        f"{self.runner} seed {seed} "
                        f"[{len(current['done'])}/{len(turns)}] {name}: "
                        f"{describe(verdict.total)}, {time.monotonic() - begin_s:.0f} s"
                    )
        if len(current["done"]) < len(turns):
            return False
        del current["done"]
        current["log10_e"] = round(ledger.log_e_value / math.log(10), 3)
        ledger.write()
        return True


def main(game):
    """Play rounds from the command line; the status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="each with a new seed")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="file")
    args = parser.parse_args()
    for _ in range(args.rounds):
        ledger = Ledger.read(args.evidence)
        with tempfile.TemporaryDirectory() as folder:
            all_rejected = game.play(ledger, Path(folder))
        say(f"log10(e) of everything: {ledger.log_e_value / math.log(10):.2f}; most in")
        for line in ledger.name_worst():
            say(f"  {line}")
        if ledger.is_alarming:
            say("ALARM: tokens do not follow the target's law")
            return 1
        if not all_rejected:
            say("A control was not rejected: the test has lost its power")
            return 1
    return 0


def say(line):
    """Tell whoever waits."""
    print(line, flush=True)  # noqa: T201 - a command's output
