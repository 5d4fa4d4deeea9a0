"""One release with several models: the chart once for each, and none sees another's."""

import shutil

import pytest
import yaml

from tests.helm.conftest import CHART, helm, of_kind

UMBRELLA = CHART.parent / "several-models"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """What its values render to."""
    folder = tmp_path_factory.mktemp("charts")
    for chart in (CHART, UMBRELLA):
        shutil.copytree(chart, folder / chart.name)
    built = helm("dependency", "build", str(folder / UMBRELLA.name))
    assert built.returncode == 0, built.stderr
    settings = [
        f"--set={model}.{name}=true"
        for model in ("small", "large")
        for name in ("networkPolicy.enabled", "podDisruptionBudget.enabled")
    ]
    rendered = helm("template", "llms", str(folder / UMBRELLA.name), *settings)
    assert rendered.returncode == 0, rendered.stderr
    return [one for one in yaml.safe_load_all(rendered.stdout) if one]


def test_each_model_is_a_ray_service_of_its_own(objects):
    configs = {
        service["metadata"]["name"]: yaml.safe_load(service["spec"]["serveConfigV2"])
        for service in of_kind(objects, "RayService")
    }
    ids = {
        name: config["applications"][0]["args"]["model"]["id"]
        for name, config in configs.items()
    }
    assert ids == {"llms-small": "small", "llms-large": "large"}
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))


def test_budgets_and_policies_hold_for_one_model_alone(objects):
    pods = {}
    for service in of_kind(objects, "RayService"):
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
        pods[service["metadata"]["name"]] = head["metadata"]["labels"]
    selectors = [
        one["spec"].get("podSelector", one["spec"].get("selector"))["matchLabels"]
        for kind in ("NetworkPolicy", "PodDisruptionBudget")
        for one in of_kind(objects, kind)
    ]
    assert len(selectors) >= 4
    by_instance = "app.kubernetes.io/instance"
    for selector in selectors:
        chosen = [
            n for n, own in pods.items() if own[by_instance] == selector[by_instance]
        ]
        assert len(chosen) == 1
