"""One release with several models: the chart once for each, and none sees another's."""

import shutil

import yaml

from tests.helm import chart

UMBRELLA = chart.FOLDER.parent / "several-models"


def test_each_model_is_a_ray_service_with_budgets_and_policies_of_its_own(tmp_path):
    for source in (chart.FOLDER, UMBRELLA):
        shutil.copytree(source, tmp_path / source.name)
    folder = str(tmp_path / UMBRELLA.name)
    chart.helm("dependency", "build", folder)
    settings = [
        f"--set={model}.{name}.enabled=true"
        for model in ("small", "large")
        for name in ("networkPolicy", "podDisruptionBudget")
    ]
    rendered = chart.helm("template", "llms", folder, *settings)
    objects = chart.Objects(filter(None, yaml.safe_load_all(rendered.stdout)))
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))

    models, instances = {}, []
    for service in objects.of_kind("RayService"):
        one = chart.Objects([service])
        models[service["metadata"]["name"]] = one.application["args"]["model"]["id"]
        labels = one.pods["head"]["metadata"]["labels"]
        instances.append(labels["app.kubernetes.io/instance"])
    assert models == {"llms-small": "small", "llms-large": "large"}
    selectors = [
        one["spec"].get("podSelector", one["spec"].get("selector"))["matchLabels"]
        for kind in ("NetworkPolicy", "PodDisruptionBudget")
        for one in objects.of_kind(kind)
    ]
    assert len(selectors) == 6
    for selector in selectors:
        assert instances.count(selector["app.kubernetes.io/instance"]) == 1
