"""Nothing is compiled while streams wait, on engines that were told to run eagerly."""

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from loadtest.models.recipe import TARGET_DIR
from serving.offline import start_arguments

pytestmark = pytest.mark.vllm

SETTINGS = {
    "model": {"id": "demo", "target": str(TARGET_DIR)},
    "policy": {"name": "none"},
    "engine": {
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": "32Mi",
    },
}
ASK = dedent(
    """
    import json
    import sys
    from vllm import SamplingParams
    from serving.offline import OfflineEngine

    engine = OfflineEngine(json.loads(sys.argv[1]))
    engine.add("one", [1, 2, 3], SamplingParams(max_tokens=3, logprobs=2))
    (output,) = [one for _ in range(3) for one in engine.step() if one.finished]
    assert len(output.outputs[0].logprobs) == 3
    engine.shutdown()
    """
)


def test_the_first_logprobs_wait_for_no_compiler(tmp_path):
    arguments, env = start_arguments(SETTINGS)
    # The compiler's folder, which others have filled.
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ASK, json.dumps(arguments)]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not [*tmp_path.rglob("*.cpp")]
