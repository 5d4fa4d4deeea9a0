"""The Job that fills the cache, and who waits for it."""

import hashlib
import json
import subprocess
import sys

from serving.settings.gguf_models import MANIFEST, folder_for
from tests.conftest import run
from tests.helm import chart
from tests.serving.conftest import clean_environment

CACHE = "/var/cache/tetris"

# The hub, as far as the Job asks it; what it is asked for is written down.
HUB = """
import json, os
FILES = {"Qwen/Qwen3-14B": ["a.safetensors", "a.bin"]}
def list_repo_files(model):
    return FILES.get(model, ["b.bin"])
def snapshot_download(model, ignore_patterns):
    if model == os.environ.get("BROKEN"):
        raise OSError("gone")
    with open(os.environ["ASKED"], "a") as file:
        print(json.dumps([model, "*.bin" in (ignore_patterns or [])]), file=file)
"""


DIGEST_OF_NOTHING = hashlib.sha256().hexdigest()

# A file that a Python package carries, and that a hub's model drafts for.
GGUF = ("config.model.target=package:carries/x.gguf", "config.model.draft=hf://org/m")


def download_and_wait(*values, pod="engines"):
    objects = chart.production(*values)
    (job,) = objects.of_kind("Job")
    return job["spec"]["template"]["spec"], objects.pods[pod]["spec"]


def run_job(folder, *values, status=0, **env):
    """Run the Job's command with its variables, in a cache and with a hub of ours."""
    (folder / "huggingface_hub.py").write_text(HUB)
    (container,) = download_and_wait(*values)[0]["containers"]
    given = {
        variable["name"]: variable["value"].replace(CACHE, str(folder))
        for variable in container["env"]
        if variable["name"].startswith("TETRIS_")
    }
    given |= {"PYTHONPATH": str(folder), "ASKED": str(folder / "asked"), **env}
    env = clean_environment(**given)
    return run(sys.executable, *container["command"][1:], env=env, status=status)


def wait_as(pod, folder, *values):
    """Run what a Pod starts with; None if it still waits after two seconds."""
    (waiting,) = download_and_wait(*values, pod=pod)[1]["initContainers"]
    command = [part.replace(CACHE, str(folder)) for part in waiting["command"]]
    try:
        return subprocess.run(command, timeout=2).returncode
    except subprocess.TimeoutExpired:
        return None


def test_workers_start_once_all_models_are_there(tmp_path):
    run_job(tmp_path, status=1, BROKEN="Qwen/Qwen3-0.6B")
    assert wait_as("engines", tmp_path) is None
    (tmp_path / "asked").unlink()
    run_job(tmp_path)
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    # Weights that vLLM would not load are left where they are.
    assert asked == [["Qwen/Qwen3-14B", True], ["Qwen/Qwen3-0.6B", False]]
    assert wait_as("engines", tmp_path) == 0


def test_another_model_is_another_job_and_another_thing_to_wait_for():
    def names(*values):
        (job,) = chart.production(*values).of_kind("Job")
        (waiting,) = download_and_wait(*values)[1]["initContainers"]
        return job["metadata"]["name"], waiting["command"][-1]

    for before, after in zip(names(), names("config.model.target=org/m"), strict=True):
        assert before != after


def test_the_job_converts_what_a_package_carries_before_the_head_looks_for_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TETRIS_CACHE", str(tmp_path / "cache"))
    result = run_job(tmp_path, *GGUF, status=1)
    assert "the package carries is not installed" in result.stderr
    assert wait_as("head", tmp_path, *GGUF) is None

    package = tmp_path / "carries"
    package.mkdir()
    (package / "x.gguf").write_bytes(b"GGUF")
    # One was converted before, which takes no time.
    folder = folder_for(package / "x.gguf")
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"config.json": DIGEST_OF_NOTHING}))
    (folder / "config.json").touch()
    result = run_job(tmp_path, *GGUF)
    assert f"package:carries/x.gguf: {folder}" in result.stdout
    # Twice, because the first Job got as far as that.
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [json.loads(line) for line in asked] == [["org/m", False]] * 2
    for pod in ("head", "engines"):
        assert wait_as(pod, tmp_path, *GGUF) == 0


def test_the_head_sees_what_the_job_converted_and_waits_for_nothing_else():
    (_, head), (_, worker) = (
        download_and_wait(*GGUF, pod=pod) for pod in ("head", "engines")
    )
    assert head["initContainers"] == worker["initContainers"]
    claim = {"claimName": "demo-tetris-serve-models"}
    volumes = {one["name"]: one for one in head["volumes"]}
    assert volumes["model-cache"]["persistentVolumeClaim"] == claim
    for values in ((), ("config.model.target=/var/cache/tetris/folder",)):
        _, head = download_and_wait(*values, pod="head")
        assert "initContainers" not in head


def test_a_file_in_the_claim_is_converted_there():
    file = "/var/cache/tetris/x.gguf"
    pod, _ = download_and_wait(f"config.model.target={file}")
    (container,) = pod["containers"]
    (models,) = [e["value"] for e in container["env"] if e["name"] == "TETRIS_MODELS"]
    assert json.loads(models) == ["Qwen/Qwen3-0.6B", file]
