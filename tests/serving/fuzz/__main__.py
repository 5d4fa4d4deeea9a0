"""Fuzz a server started for it: `python -m tests.serving.fuzz --cases 20000`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.serving.conftest import Server, start_up_command
from tests.serving.fuzz.rounds import fuzz


def visit_sizes(server: Server) -> None:
    """Have passes of all sizes computed, one prompt after the other.

    On a CPU oneDNN keeps what it has compiled for each, of up to 1,024 sizes and
    shapes, some 300 MiB in the end: what comes first would look like a leak.
    """
    for length in range(1, 1000):
        # They differ from the first token on, or their KV would be there already.
        answer = server.complete(prompt=[10 + length] * length, max_tokens=1)
        answer.raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tetris-fuzz-"))
    sys.stderr.write(f"Logs and failing cases: {folder}\n")
    settings = {
        # One replica, so that memory before and after is that of the same processes.
        "replicas.max": 1,
        # Full after the first round; vLLM keeps compiled grammars up to 512 MB.
        "engine.env.VLLM_XGRAMMAR_CACHE_MB": '"8"',
    }
    with start_up_command(folder / "up.log", settings) as server:
        visit_sizes(server)
        record = fuzz(server, arguments.cases, arguments.seed, folder)
    record["schemathesis"] = version("schemathesis")
    file = Path(__file__).with_name("record.json")
    file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
