"""Play all cases on the runner V1 or V2, with new seeds: `make law`.

For V2 Triton has to be in `PYTHONPATH`.
"""

# ruff: noqa: E402 - the V2 runner's plugin has to come first

import argparse
import sys
import tempfile
from pathlib import Path

EVIDENCE = Path(__file__).parent / "evidence.json"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("runner", choices=["v1", "v2"])
parser.add_argument("--rounds", type=int, default=1, help="each with a new seed")
parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="file")
args = parser.parse_args()

if args.runner == "v2":
    import tests.gpu_adapter.interpreted.plugin  # noqa: F401 - before vLLM
    from tests.gpu_adapter.interpreted import law
else:
    from tests.engine.law import campaign as law

from tests.engine.law.cases import Case, combine_all, pair_up, pair_up_policies
from tests.engine.law.rounds import Ledger, Turn, play

bias = law.draw_some_from_draft
if args.runner == "v2":
    turns = [Turn(case, 1) for case in combine_all([law.DRAFTER])]
    turns += [Turn(case, 4, bias) for case in pair_up_policies(law.DRAFTER)]
    turns.append(Turn(Case("perfect", "tetris"), 16, law.score_by_drawn_token))
else:
    turns = [Turn(case, law.NUM_EACH) for case in combine_all()]
    turns += [Turn(case, law.NUM_EACH, bias) for case in pair_up()]

for _ in range(args.rounds):
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(args.evidence)
        wrong = play(args.runner, law.start, law.run_case, turns, ledger, Path(folder))
    if wrong:
        sys.exit(wrong)
