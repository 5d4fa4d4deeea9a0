"""vLLM's V2 runner and ours at work: Triton's interpreter takes the GPU's place.

The checks under `interpreted/` start engines whose runner is the one that GPUs have.
They run in a process of their own, because Triton must be there when vLLM is imported
and must not be in any other test.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import run

TRITON = Path(sys.prefix) / "triton"
PLUGIN = "tests.gpu_adapter.interpreted.plugin"
CHECKS = sorted(Path(__file__).parent.glob("interpreted/check_*.py"))

MAX_SECONDS = 1800


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.patient
@pytest.mark.timeout(MAX_SECONDS + 60)
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton: run `.ci/extras`")
def test_the_gpus_runner_under_the_interpreter(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider"]
    command += ["--basetemp", tmp_path / "inside", *CHECKS]
    env = os.environ | {"PYTHONPATH": str(TRITON)}
    said = run(*command, env=env, timeout=MAX_SECONDS).stdout
    assert " passed" in said
    assert " skipped" not in said
