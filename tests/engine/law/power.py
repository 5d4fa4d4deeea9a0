"""How surely `test_law` notices what is wrong: `python -m tests.engine.law.power`.

Every case is run once as it is. Then, `TRIALS` times, another token is drawn at every
position from a law that is wrong by so much, with the prefixes as they were, and judged
as in the test. That is the power for prefixes such as these; drawing tokens where an
engine would have gone on from them takes no engine, and so many trials.
"""

import itertools
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from tests.engine.law.campaign import run_case, start
from tests.engine.law.evidence import Evidence, is_alarming
from tests.engine.law.judge import judge
from tests.engine.law.rounds import say
from tests.engine.law.test_law import MIXED, SEED, SPECIAL

TRIALS = 100


def draw_from_draft(share):
    """Return what makes laws wrong at verified positions, as the controls do."""

    def make(one):
        draft = one.drafts * (one.law.target > 0)
        total = draft.sum(dim=-1, keepdim=True)
        mixed = (1 - share) * one.law.target + share * draft / total
        return torch.where(total > 0, mixed, one.law.target)

    return make


def change_temperature(factor):
    """Return what makes all laws those of another temperature."""
    return lambda one: (one.law.target.log() / factor).softmax(dim=-1)


WRONG = {
    "nothing": draw_from_draft(0.0),
    "5 % from the draft": draw_from_draft(0.05),
    "3 % from the draft": draw_from_draft(0.03),
    "2 % from the draft": draw_from_draft(0.02),
    "temperature 10 % too high": change_temperature(1.1),
    "temperature 10 % too low": change_temperature(0.9),
}


def run_all(folder):
    """Run the cases whose evidence is added up in the test."""
    judged = {}
    for drafter, cases in itertools.groupby(MIXED, key=lambda case: case.drafter):
        with start(folder / f"{drafter}-{len(judged)}", drafter) as engine:
            for case in cases:
                outcome = run_case(engine, case, SEED, **SPECIAL.get(case, {}))
                judged[case] = outcome.judged
    return judged


def count_alarms(judged, wrong):
    """Count in how many trials each test fails."""
    alarms = Counter()
    laws = {case: [wrong(one) for one in ones] for case, ones in judged.items()}
    for trial in range(TRIALS):
        torch.manual_seed(trial)
        parts = {}
        for case, ones in judged.items():
            drawn = [
                replace(one, output=torch.multinomial(law, 1)[:, 0].tolist())
                for one, law in zip(ones, laws[case], strict=True)
            ]
            verdict = judge(drawn)
            found = {str(case): verdict.total}
            found |= verdict.by_feature | verdict.by_position
            for name, evidence in found.items():
                parts.setdefault(str(name), Evidence()).add(evidence)
        alarms.update(name for name, one in parts.items() if is_alarming(one))
        alarms["any"] += any(map(is_alarming, parts.values()))
        alarms.update(dict.fromkeys(parts, 0))
    return alarms


def main():
    """Print a table for each thing that may be wrong."""
    with tempfile.TemporaryDirectory() as folder:
        judged = run_all(Path(folder))
    for name, wrong in WRONG.items():
        alarms = count_alarms(judged, wrong)
        say(f"{name}: share of {TRIALS} trials in which a test fails")
        for part, count in alarms.items():
            say(f"  {part}: {count / TRIALS:.2f}")


if __name__ == "__main__":
    main()
