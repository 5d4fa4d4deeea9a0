"""The Job that fills the cache, and the workers that wait for it."""

import json
import subprocess
import sys

from tests.helm import chart
from tests.serving.conftest import clean_environment

CACHE = "/var/cache/tetris"

# The hub, as far as the Job asks it; what it is asked for is written down.
HUB = """
import json, os
FILES = {"Qwen/Qwen3-14B": ["a.safetensors", "a.bin"], "Qwen/Qwen3-0.6B": ["b.bin"]}
def list_repo_files(model):
    return FILES[model]
def snapshot_download(model, ignore_patterns):
    if model == os.environ.get("BROKEN"):
        raise OSError("gone")
    with open(os.environ["ASKED"], "a") as file:
        print(json.dumps([model, "*.bin" in (ignore_patterns or [])]), file=file)
"""


def download_and_wait(*values):
    """Return the specification of the Job's Pod, and a worker's that waits for it."""
    objects = chart.production(*values)
    (job,) = objects.of_kind("Job")
    return job["spec"]["template"]["spec"], objects.pods["engines"]["spec"]


def run_job(folder, **env):
    """Run the Job's command with its variables, in a cache and with a hub of ours."""
    (folder / "huggingface_hub.py").write_text(HUB)
    (container,) = download_and_wait()[0]["containers"]
    given = {
        variable["name"]: variable["value"].replace(CACHE, str(folder))
        for variable in container["env"]
        if variable["name"].startswith("TETRIS_")
    }
    given |= {"PYTHONPATH": str(folder), "ASKED": str(folder / "asked"), **env}
    return subprocess.run(
        [sys.executable, *container["command"][1:]],
        env=clean_environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
    )


def wait_as_a_worker(folder):
    """Run what a worker starts with; None if it still waits after two seconds."""
    (waiting,) = download_and_wait()[1]["initContainers"]
    command = [part.replace(CACHE, str(folder)) for part in waiting["command"]]
    try:
        return subprocess.run(command, timeout=2).returncode
    except subprocess.TimeoutExpired:
        return None


def test_workers_start_once_all_models_are_there(tmp_path):
    assert run_job(tmp_path, BROKEN="Qwen/Qwen3-0.6B").returncode != 0
    assert wait_as_a_worker(tmp_path) is None
    (tmp_path / "asked").unlink()
    result = run_job(tmp_path)
    assert result.returncode == 0, result.stderr
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    # Weights that vLLM would not load are left where they are.
    assert asked == [["Qwen/Qwen3-14B", True], ["Qwen/Qwen3-0.6B", False]]
    assert wait_as_a_worker(tmp_path) == 0


def test_another_model_is_another_job_and_another_thing_to_wait_for():
    def names(*values):
        (job,) = chart.production(*values).of_kind("Job")
        (waiting,) = download_and_wait(*values)[1]["initContainers"]
        return job["metadata"]["name"], waiting["command"][-1]

    for before, after in zip(names(), names("config.model.target=org/m"), strict=True):
        assert before != after


def test_the_job_fills_the_workers_cache_as_they_would():
    pod, worker = download_and_wait()
    (claim,) = [one for one in pod["volumes"] if one["name"] == "model-cache"]
    assert claim in worker["volumes"]
    assert "HF_TOKEN" in {one["name"] for one in pod["containers"][0]["env"]}
