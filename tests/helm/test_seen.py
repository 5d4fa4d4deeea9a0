"""What operators rely on in the rendered objects: the cases of seen.yaml."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helm.conftest import (
    CHART,
    pod_templates,
    ray_service,
    render,
    serve_config,
)

CASES = yaml.safe_load(Path(__file__).with_name("seen.yaml").read_text("utf-8"))


def find(node, words):
    """Return what is found below a node by keys, and by the names of lists' items."""
    for word in words:
        if isinstance(node, list):
            found = [
                one
                for index, one in enumerate(node)
                if word in (str(index), one.get("mountPath", one.get("name")))
            ]
            assert len(found) <= 1, f"{word} is there twice"
            node = found[0] if found else None
        elif node is not None:
            node = node.get(word)
    return node


def roots_of(objects):
    """Return what the first word of a path stands for."""
    serve, cluster = serve_config(objects), ray_service(objects)["rayClusterConfig"]
    pods = {
        name: {"metadata": pod["metadata"], "ray": pod["spec"]["containers"][0]}
        | pod["spec"]
        for name, pod in pod_templates(objects).items()
    }
    (group,) = cluster["workerGroupSpecs"]
    (application,) = serve["applications"]
    parts = {"cluster": cluster, "group": group, "serve": serve}
    kinds = {one["kind"]: one for one in objects}
    return kinds | parts | pods | {"args": application["args"]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_an_operator_sees(case):
    example = CHART / "examples" / f"{case.get('example', 'demo-cpu')}.yaml"
    values = case.get("values", {}).items()
    options = [f"--set-json={name}={json.dumps(value)}" for name, value in values]
    roots = roots_of(render("-f", str(example), *options))
    for path, expected in case["seen"].items():
        root, *words = path.split()
        for name in ("head", "engines") if root == "pods" else (root,):
            assert find(roots.get(name), words) == expected, f"{name}: {path}"
