"""Play all cases on the V1 runner: `make law`."""

import sys

from tests.engine.law.campaign import NUM_EACH, draw_some_from_draft, run_case, start
from tests.engine.law.cases import combine_all, pair_up
from tests.engine.law.rounds import Control, Game, main

if __name__ == "__main__":
    controls = [Control(case, draw_some_from_draft, NUM_EACH) for case in pair_up()]
    sys.exit(main(Game("v1", start, run_case, combine_all(), NUM_EACH, controls)))
