"""The Job that fills the cache, and the workers that wait for it."""

import hashlib
import json
import subprocess
import sys

from serving.settings.gguf_models import MANIFEST, folder_for
from tests.helm.conftest import PRODUCTION, of_kind, pod_templates, render_example
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


def run_job(
    folder, values: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the Job's command with its variables, in a cache and with a hub of ours."""
    (folder / "huggingface_hub.py").write_text(HUB)
    (job,) = of_kind(render_example(PRODUCTION, *values), "Job")
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


def wait_as(pod: str, folder, values: tuple[str, ...] = ()) -> int | None:
    """Run what a Pod starts with; None if it still waits after two seconds."""
    templates = pod_templates(render_example(PRODUCTION, *values))
    (waiting,) = templates[pod]["spec"]["initContainers"]
    command = [part.replace(CACHE, str(folder)) for part in waiting["command"]]
    try:
        return subprocess.run(command, timeout=2).returncode
    except subprocess.TimeoutExpired:
        return None


def test_workers_start_once_all_models_are_there(tmp_path):
    assert wait_as("engines", tmp_path) is None
    result = run_job(tmp_path)
    assert result.returncode == 0, result.stderr
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    # Weights that vLLM would not load are left where they are.
    assert asked == [["Qwen/Qwen3-14B", True], ["Qwen/Qwen3-0.6B", False]]
    assert wait_as("engines", tmp_path) == 0


def test_workers_go_on_waiting_where_one_model_is_missing(tmp_path):
    result = run_job(tmp_path, BROKEN="Qwen/Qwen3-0.6B")
    assert result.returncode != 0
    assert wait_as("engines", tmp_path) is None


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
    # Policies do not shut it in: it has to reach the hub.
    labels = job["spec"]["template"]["metadata"]["labels"].items()
    for policy in of_kind(objects, "NetworkPolicy"):
        assert not policy["spec"]["podSelector"]["matchLabels"].items() <= labels


def test_the_job_converts_what_a_package_carries_before_the_head_looks_for_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TETRIS_CACHE", str(tmp_path / "cache"))
    result = run_job(tmp_path, GGUF)
    assert result.returncode != 0
    assert "the package carries is not installed" in result.stderr
    assert wait_as("head", tmp_path, GGUF) is None

    package = tmp_path / "carries"
    package.mkdir()
    (package / "x.gguf").write_bytes(b"GGUF")
    # One was converted before, which takes no time.
    folder = folder_for(package / "x.gguf")
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"config.json": DIGEST_OF_NOTHING}))
    (folder / "config.json").touch()
    result = run_job(tmp_path, GGUF)
    assert result.returncode == 0, result.stderr
    assert f"package:carries/x.gguf: {folder}" in result.stdout
    # Twice, because the first Job got as far as that.
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [json.loads(line) for line in asked] == [["org/m", False]] * 2
    for pod in ("head", "engines"):
        assert wait_as(pod, tmp_path, GGUF) == 0


def test_the_head_sees_what_the_job_converted_and_waits_for_nothing_else():
    objects = render_example(PRODUCTION, *GGUF)
    head, worker = (pod_templates(objects)[name] for name in ("head", "engines"))
    assert head["spec"]["initContainers"] == worker["spec"]["initContainers"]
    claim = {"claimName": "demo-tetris-serve-models"}
    volumes = {one["name"]: one for one in head["spec"]["volumes"]}
    assert volumes["model-cache"]["persistentVolumeClaim"] == claim
    for values in ((), ("config.model.target=/var/cache/tetris/folder",)):
        head = pod_templates(render_example(PRODUCTION, *values))["head"]
        assert "initContainers" not in head["spec"]


def test_a_file_in_the_claim_is_converted_there():
    file = "/var/cache/tetris/x.gguf"
    (job,) = of_kind(render_example(PRODUCTION, f"config.model.target={file}"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (models,) = [e["value"] for e in container["env"] if e["name"] == "TETRIS_MODELS"]
    assert json.loads(models) == ["Qwen/Qwen3-0.6B", file]
