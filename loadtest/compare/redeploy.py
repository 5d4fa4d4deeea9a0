"""Replace all replicas of a running `tetris-serve up`, as a new release would.

    python -m loadtest.compare.redeploy --dashboard http://127.0.0.1:8265 \
        --config configs/tiny.yaml --policy tetris --set replicas.max=2

Serve does nothing when it is given what runs already. So every call names a release
of its own in the replicas' environment, which Serve has to roll out; all else stays
as `tetris-serve up` got it. The command returns before Serve has replaced anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def redeploy_command(repo: Path, up_arguments: Sequence[str]) -> str:
    """Return the shell command that redeploys what `up` serves with these arguments.

    In it `{dashboard}` stands for the address of Ray's dashboard.
    """
    command = [sys.executable, "-m", __name__, "--dashboard", "{dashboard}"]
    return f"cd {shlex.quote(str(repo))} && {shlex.join([*command, *up_arguments])}"


def describe_release(
    config: Path, policy: str | None, settings: Sequence[str], release: str
) -> dict[str, Any]:
    """Return the Serve config file of a release, unlike that of any before."""
    args: dict[str, Any] = {"config": str(config.resolve())}
    if policy is not None:
        args["policy.name"] = policy
    for setting in settings:
        name, _, value = setting.partition("=")
        args[name] = yaml.safe_load(value)
    application = {
        "name": "tetris",
        "route_prefix": "/",
        "import_path": "serving.app:build",
        "runtime_env": {"env_vars": {"LOADTEST_RELEASE": release}},
        "args": args,
    }
    return {"applications": [application]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Send a release to Serve; see the module's words."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare.redeploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dashboard", required=True, metavar="URL", help="as `up` prints it")
    add("--config", type=Path, required=True, metavar="FILE")
    add("--policy", metavar="NAME")
    add("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    described = describe_release(
        options.config, options.policy, options.set, f"{time.time():.3f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "release.yaml"
        # JSON is YAML too.
        file.write_text(json.dumps(described))
        deploy = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file)]
        return subprocess.run(
            [*deploy, "--address", options.dashboard],
            # As `up` has it: the token lies where Ray's own commands look for it.
            env={"RAY_AUTH_MODE": "token", **os.environ},
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
