"""What operators rely on in the rendered objects: the cases of seen.yaml."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helm import chart

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
    (group,) = objects.cluster["workerGroupSpecs"]
    parts = {"cluster": objects.cluster, "group": group, "serve": objects.serve}
    parts["args"] = objects.application["args"]
    for name, pod in objects.pods.items():
        ray = pod["spec"]["containers"][0]
        parts[name] = pod["spec"] | {"metadata": pod["metadata"], "ray": ray}
    return {one["kind"]: one for one in objects} | parts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_an_operator_sees(case):
    values = case.get("values", {}).items()
    changes = [f"--set-json={name}={json.dumps(value)}" for name, value in values]
    options = chart.options_of(case.get("example", "demo-cpu"))
    roots = roots_of(chart.render(*options, *changes))
    for path, expected in case["seen"].items():
        root, *words = path.split()
        for name in ("head", "engines") if root == "pods" else (root,):
            assert find(roots.get(name), words) == expected, f"{name}: {path}"
