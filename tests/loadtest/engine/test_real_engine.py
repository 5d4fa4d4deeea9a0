"""The whole benchmark once, on real engines with the demo's draft."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loadtest.bench_command import EXIT_INTERRUPTED
from loadtest.models.recipe import DRAFT_DIR

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Seconds on a machine of one's own, minutes on a busy one.
RUN_TIMEOUT_S = 900.0
EXIT_TIMEOUT_S = 300.0
POLICIES = ("cold:2", "tetris:1+1")


def bench(output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serving.cli", "bench", "engine"]
    options = {
        "--preset": "smoke",
        "--output": str(output),
        # Twice the same: every draft is accepted, which the results must show.
        "--target": str(DRAFT_DIR),
        "--draft": str(DRAFT_DIR),
        "--policies": ",".join(POLICIES),
        # So many that an interrupt at the first result is never too late.
        "--workloads": "mixed,hard,easy,chats",
        "--temperatures": "0",
        "--concurrency": "2",
        "--rounds": "1",
        "--max-tokens": "16",
    }
    arguments = [part for option in options.items() for part in option]
    return subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)


def test_an_interrupted_run_leaves_no_process_and_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "results"
    kept = folder / "measurements.jsonl"
    with bench(folder) as run:
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while not kept.exists():
            assert run.poll() is None, run.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        message = run.communicate(timeout=EXIT_TIMEOUT_S)[1]

    assert len(children) >= len(POLICIES)
    assert run.returncode == EXIT_INTERRUPTED, message
    assert "goes on from there" in message
    assert not psutil.wait_procs(children, timeout=EXIT_TIMEOUT_S)[1]
    first = kept.read_text()

    with bench(folder) as run:
        message = run.communicate(timeout=RUN_TIMEOUT_S)[1]

    assert run.returncode == 0, message
    assert "Warning" not in message
    assert kept.read_text().startswith(first)
    _check_results(folder)


def _check_results(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    rows = {(row["workload"], row["policy"]): row for row in results["rows"]}
    cold, tetris = (rows["mixed", policy] for policy in POLICIES)
    assert cold["acceptance_length"] == 1.0
    assert cold["verified_per_step"] == 0.0
    assert cold["verification_success_rate"] is None
    assert tetris["planning_us_per_step"] > 0.0
    # Two drafts a request, one of them verified on average, all of them right but for
    # near-ties that bf16 rounds differently in the draft's own batches.
    assert tetris["verification_success_rate"] > 0.8
    assert tetris["acceptance_length"] > 1.5
    assert tetris["num_output_tokens"] == cold["num_output_tokens"]
    assert tetris["fallbacks"] == {}
    assert tetris["output_tokens_per_s"]["median"] > 0.0
    environment = results["environment"]
    assert len(environment["pieces"]) == 2
    assert {"python", "torch", "ray", "locust"} <= environment["versions"].keys()
    assert {ratio["against"] for ratio in results["ratios"]} == {"cold:2"}
    # What the first block of each cell was.
    assert len(list((folder / "traces").rglob("*.npz"))) == 4 * 2
    assert (folder / "results.png").exists()
    assert "## hard, temperature 0" in (folder / "results.md").read_text()
