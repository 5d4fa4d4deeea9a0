"""Plays all cases with a new seed, and adds what comes out to a file."""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine.law.evidence import Evidence, is_alarming
from tests.engine.law.ledger import Ledger, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tests.engine.law.campaign import Bias, Outcome
    from tests.engine.law.cases import Case
    from tests.engine.law.engines import LawEngine

EVIDENCE = Path(__file__).parent / "evidence.json"


@dataclass(frozen=True)
class Control:
    """A case that must be rejected under a bias, in a round of its own."""

    case: Case
    bias: Bias
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
    start: Callable[[Path, str], AbstractContextManager[LawEngine]]
    run_case: Callable[..., Outcome]
    cases: Sequence[Case]
    num_each: int
    controls: Sequence[Control] = ()

    def play(self, ledger: Ledger, folder: Path) -> bool:
        """Play a round.

        Args:
            ledger: What is known; taken into it is what comes out.
            folder: For models, empty.

        Returns:
            Whether the controls were rejected.
        """
        seed, total = ledger.next_seed(self.runner), Evidence()
        done, num_turns = 0, len(self.cases) + len(self.controls)
        all_rejected = True
        turns = [
            *((case, None) for case in self.cases),
            *((control.case, control) for control in self.controls),
        ]
        by_drafter = itertools.groupby(turns, key=lambda turn: turn[0].drafter)
        for number, (drafter, own) in enumerate(by_drafter):
            with self.start(folder / str(number), drafter) as engine:
                for case, control in own:
                    begin_s = time.monotonic()
                    bias = None if control is None else control.bias
                    num_each = self.num_each if control is None else control.num_each
                    outcome = self.run_case(
                        engine, case, seed, bias=bias, num_each=num_each
                    )
                    evidence = outcome.verdict.total
                    if control is None:
                        ledger.add(self.runner, str(case), outcome.verdict)
                        total.add(evidence)
                    elif not is_alarming(evidence, num_tests=1):
                        all_rejected = False
                    done += 1
                    say(
                        f"{self.runner} seed {seed} [{done}/{num_turns}] {case}"
                        f"{'' if control is None else ' CONTROL'}: "
                        f"{describe(evidence)}, {time.monotonic() - begin_s:.0f} s"
                    )
        ledger.rounds.append(
            {
                "runner": self.runner,
                "seed": seed,
                "num_tokens": total.num_tokens,
                "log10_e": round(ledger.log_e_value / math.log(10), 3),
            }
        )
        return all_rejected


def main(game: Game) -> int:
    """Play rounds from the command line; the status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="each with a new seed")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="file")
    args = parser.parse_args()
    for _ in range(args.rounds):
        ledger = Ledger.read(args.evidence)
        with tempfile.TemporaryDirectory() as folder:
            all_rejected = game.play(ledger, Path(folder))
        ledger.write(args.evidence)
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


def say(line: str) -> None:
    """Tell whoever waits."""
    print(line, flush=True)  # noqa: T201 - a command's output
