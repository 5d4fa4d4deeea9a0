"""The Job that fills the cache, and the workers that wait for it."""

import json
import subprocess
import sys

from tests.helm.conftest import PRODUCTION, of_kind, pod_templates, render_example
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


def run_job(folder, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the Job's command with its variables, in a cache and with a hub of ours."""
    (folder / "huggingface_hub.py").write_text(HUB)
    (job,) = of_kind(render_example(PRODUCTION), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {
        variable["name"]: variable["value"].replace(CACHE, str(folder))
        for variable in container["env"]
        if variable["name"].startswith("TETRIS_")
    }
    _, *arguments = container["command"]
    given |= {"PYTHONPATH": str(folder), "ASKED": str(folder / "asked"), **env}
    return subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
    )


def wait_as_a_worker(folder) -> int | None:
    """Run what a worker starts with; None if it still waits after two seconds."""
    worker = pod_templates(render_example(PRODUCTION))["engines"]["spec"]
    (waiting,) = worker["initContainers"]
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
    def names(*values: str) -> tuple[str, str]:
        objects = render_example(PRODUCTION, *values)
        (job,) = of_kind(objects, "Job")
        (waiting,) = pod_templates(objects)["engines"]["spec"]["initContainers"]
        return job["metadata"]["name"], waiting["command"][-1]

    for before, after in zip(names(), names("config.model.target=org/m"), strict=True):
        assert before != after


def test_the_job_fills_the_workers_cache_as_they_would():
    objects = render_example(PRODUCTION)
    (job,) = of_kind(objects, "Job")
    pod = job["spec"]["template"]["spec"]
    worker = pod_templates(objects)["engines"]["spec"]
    (claim,) = [one for one in pod["volumes"] if one["name"] == "model-cache"]
    assert claim in worker["volumes"]
    assert "HF_TOKEN" in {one["name"] for one in pod["containers"][0]["env"]}
