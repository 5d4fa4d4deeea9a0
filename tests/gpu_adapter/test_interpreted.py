"""vLLM's V2 runner and ours at work: Triton's interpreter takes the GPU's place.

The checks under `interpreted/` start engines whose runner is the one that GPUs have.
They run in processes of their own, because Triton must be there when vLLM is imported
and must not be in any other test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix) / "triton"
PLUGIN = "tests.gpu_adapter.interpreted.plugin"
FOLDER = Path(__file__).parent / "interpreted"
CHECKS = sorted(FOLDER.glob("check_*.py"))

MAX_SECONDS = 1800


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton: run `.ci/extras`")
@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_the_gpus_runner_under_the_interpreter(check, tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider"]
    command += ["--basetemp", str(tmp_path / "inside"), str(check)]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(TRITON)},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout
