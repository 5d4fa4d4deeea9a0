"""Play all cases on the V2 runner: `make law`. Triton has to be in `PYTHONPATH`."""

# ruff: noqa: I001 - the order is the point

import sys

import tests.gpu_adapter.interpreted.plugin  # noqa: F401 - before vLLM

from tests.engine.law.cases import Case, combine_all, pair_up_policies
from tests.engine.law.rounds import Control, Game, main
from tests.gpu_adapter.interpreted.law import (
    DRAFTER,
    draw_some_from_draft,
    run_case,
    score_by_drawn_token,
    start,
)

if __name__ == "__main__":
    controls = [
        Control(one, draw_some_from_draft, 6) for one in pair_up_policies(DRAFTER)
    ]
    controls.append(Control(Case("perfect", "tetris"), score_by_drawn_token, 16))
    sys.exit(main(Game("v2", start, run_case, combine_all([DRAFTER]), 1, controls)))
