"""Replace all replicas of a running `tetris-serve up`, as a new release would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from loadtest.client.errors import LoadTestError

_TIMEOUT_S = 600.0


def describe_release(up_arguments: Sequence[str], release: str) -> dict[str, Any]:
    """Return the Serve config file of a release, unlike that of any before.

    Serve does nothing when it is given what runs already. So every release has a name
    of its own in the replicas' environment, which Serve has to roll out; all else stays
    as `tetris-serve up` got it.

    Args:
        up_arguments: Of `tetris-serve up`: `--config`, `--policy` and `--set`.
        release: Its name.
    """
    names = {"--config": "config", "--policy": "policy.name"}
    # The server is on a loopback address, which its builder cannot know.
    args: dict[str, Any] = {"http.access.allow_anonymous": True}
    for option, text in zip(up_arguments[::2], up_arguments[1::2], strict=True):
        if option == "--set":
            name, _, value = text.partition("=")
            args[name] = yaml.safe_load(value)
        else:
            args[names[option]] = text
    application = {
        "name": "tetris",
        "route_prefix": "/",
        "import_path": "serving.app:build",
        "runtime_env": {"env_vars": {"LOADTEST_RELEASE": release}},
        "args": args,
    }
    return {"applications": [application]}


def redeploy(dashboard: str, up_arguments: Sequence[str]) -> None:
    """Send a new release to Serve; return before it has replaced anything.

    Raises:
        LoadTestError: Says why Serve did not take it.
    """
    release = describe_release(up_arguments, f"{time.time():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "release.yaml"
        # JSON is YAML too.
        file.write_text(json.dumps(release))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file)]
        finished = subprocess.run(
            [*command, "--address", dashboard],
            # As `up` has it: the token lies where Ray's own commands look for it.
            env={"RAY_AUTH_MODE": "token", **os.environ},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if finished.returncode != 0:
        said = (finished.stdout + finished.stderr).strip().splitlines()
        raise LoadTestError(
            f"serve deploy exited with {finished.returncode} {said[-1:]}"
        )
