"""Serve a few prompts from an engine in a process of its own, and print its figures.

Run as `python -m tests.engine.print_snapshot TARGET DRAFT`; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.engine.checks import complete, draw_prompts, greedy
from tests.engine.conftest import run_engine

# Against the setting of the tests, which keep the engine in their own process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def main() -> None:
    """Ask the engine core for the counters, as a replica does."""
    target, draft = (Path(argument) for argument in sys.argv[1:])
    with run_engine(target, draft, policy="tetris") as engine:
        complete(engine, draw_prompts(4), greedy(16))
        client = engine.llm.llm_engine.engine_core
        values = client.call_utility("tetris_snapshot")
    print(json.dumps({"client": type(client).__name__, "snapshot": values}))  # noqa: T201 - the output is the point


if __name__ == "__main__":
    main()
