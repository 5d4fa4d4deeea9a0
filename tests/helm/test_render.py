"""What the chart renders is accepted: by helm, by Kubernetes and by KubeRay's CRD."""

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from serving.settings.policy_choice import complete_policy
from tests.helm.conftest import (
    CHART,
    DEMO,
    PRODUCTION,
    examples,
    helm,
    of_kind,
    pod_templates,
    render,
    render_example,
)

KUBERNETES_VERSIONS = ("1.27", "1.34", "1.37")

# Schemas of kinds that come with operators; RayService's own definition is at hand.
CUSTOM_KINDS = yaml.safe_load(Path(__file__).with_name("custom_kinds.yaml").read_text())

TOGGLES = {
    "as it is": "",
    "everything off": """
        autoscaling.enabled=false podDisruptionBudget.enabled=false
        serviceAccount.create=false ray.auth.mode=disabled
        head.excludeFromService=false
    """,
    "incremental upgrade": """
        upgrade.type=NewClusterWithIncrementalUpgrade gateway.enabled=false
        autoscaling.enabled=true
        upgrade.incremental.gatewayClassName=istio
    """,
    "no upgrade": "upgrade.type=None",
    "redis": """
        gcsFaultTolerance.enabled=true gcsFaultTolerance.redisAddress=redis:6379
        gcsFaultTolerance.passwordSecret.name=redis
        gcsFaultTolerance.usernameSecret.name=redis
    """,
    "network policy": """
        networkPolicy.enabled=true gcsFaultTolerance.enabled=true
        gcsFaultTolerance.redisAddress=redis:6379 networkPolicy.monitoring=null
        monitoring.prometheus.host=http://prometheus:9090 serve.tracing.enabled=true
        serve.tracing.endpoint=http://collector:4317
    """,
    "own ingress annotations": """
        ingress.enabled=true ingress.controller=none
        ingress.hosts[0].host=llm.example.com ingress.annotations.a=b
    """,
    "gateway": """
        gateway.enabled=true gateway.parentRefs[0].name=public
        gateway.hostnames[0]=llm.example.com
    """,
    "cache": "modelCache.enabled=true modelCache.storageClassName=fast",
    "a file of a package": """
        modelCache.enabled=true modelCache.accessModes={ReadWriteMany}
        modelCache.download.enabled=true config.model.target=package:a/x.gguf
    """,
    "someone else's cache": "modelCache.enabled=true modelCache.existingClaim=models",
    "monitoring": """
        monitoring.podMonitor.enabled=true monitoring.prometheusRule.enabled=true
        monitoring.dashboards.enabled=true monitoring.grafana.host=http://grafana:3000
        monitoring.grafana.iframeHost=https://grafana.example.com
    """,
    "extras": """
        extraEnv[0].name=A extraEnv[0].value=b extraEnvFrom[0].configMapRef.name=more
        extraVolumes[0].name=more extraVolumes[0].emptyDir.medium=Memory
        extraVolumeMounts[0].name=more extraVolumeMounts[0].mountPath=/more
        extraContainers[0].name=logs extraContainers[0].image=fluent-bit
        extraContainers[0].volumeMounts[0].name=tmp
        extraContainers[0].volumeMounts[0].mountPath=/tmp podLabels.team=llm
        podAnnotations.note=x commonLabels.owner=llm commonAnnotations.contact=llm
        head.podAnnotations.only=head workerGroups.engines.runtimeClassName=nvidia
        workerGroups.engines.priorityClassName=high secretEnv.HF_TOKEN.name=hf
        secretEnv.HF_TOKEN.key=token
    """,
}
"""Values that replace those of an example."""


def strict(schema: Any) -> Any:
    """Refuse fields that an OpenAPI schema does not name.

    The API server drops them silently, which hides a typo. `nullable` is OpenAPI's own.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: strict(part) for name, part in schema.items()}
    if "properties" in schema and isinstance(schema.get("type"), str):
        schema.setdefault("additionalProperties", False)
    return schema


def check_kubernetes(objects: Iterable[dict[str, Any]]) -> None:
    """Check every object but the RayService."""
    for document in objects:
        kind = document["kind"]
        if kind in CUSTOM_KINDS:
            jsonschema.validate(document["spec"], strict(CUSTOM_KINDS[kind]))
        elif kind != "RayService":
            for version in KUBERNETES_VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)


def with_rules(schema: Any, value: Any, place: str = "") -> Iterator[str]:
    """Yield where a value has what a schema has rules in CEL for."""
    if "x-kubernetes-validations" in schema:
        yield place
    if isinstance(value, dict):
        for name, part in value.items():
            below = schema.get("properties", {}).get(name) or {}
            yield from with_rules(below, part, f"{place}.{name}")
    elif isinstance(value, list):
        for part in value:
            yield from with_rules(schema.get("items", {}), part, f"{place}[]")


@pytest.fixture(scope="module")
def kuberay(crd_schema: dict[str, Any]) -> Any:
    """What checks a RayService, with all that is nested in it."""
    schema = strict(crd_schema)
    # The top level is the API server's, as for every kind.
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@examples
def test_every_example_passes_a_strict_lint(example):
    result = helm("lint", "--strict", str(CHART), "-f", str(example))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[WARNING]" not in result.stdout


@pytest.mark.parametrize("toggles", TOGGLES.values(), ids=TOGGLES)
@examples
def test_kubernetes_and_kuberay_accept_every_switch_in_every_example(
    example, toggles, request
):
    objects = render_example(example, *toggles.split())
    check_kubernetes(objects)
    # Last, as it skips the test where nobody has provided the definition.
    request.getfixturevalue("kuberay").validate(*of_kind(objects, "RayService"))


def test_the_crd_check_notices_a_misspelt_field(kuberay):
    (service,) = of_kind(render("-f", str(DEMO)), "RayService")
    head = pod_templates([service])["head"]["spec"]["containers"][0]
    head["imagePullPolcy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolcy"):
        kuberay.validate(service)


@examples
def test_no_rule_of_the_crd_in_cel_is_about_what_the_chart_sets(example, crd_schema):
    """Else a library would have to try it: they are about owners and back ends."""
    (service,) = of_kind(render_example(example), "RayService")
    assert list(with_rules(crd_schema, service)) == []
    options = service["spec"] | {"managedBy": "ray.io/kuberay-operator"}
    assert list(with_rules(crd_schema, {"spec": options})) == [".spec.managedBy"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("PodDisruptionBudget", "minAvailble"),
        ("HTTPRoute", "hostname"),
        ("PodMonitor", "podMetricsEndpoint"),
        ("PrometheusRule", "group"),
    ],
)
def test_the_kubernetes_check_notices_a_misspelt_field(kind, field):
    objects = copy.deepcopy(render_example(PRODUCTION))
    of_kind(objects, kind)[0]["spec"][field] = 1
    with pytest.raises(
        (kubernetes_validate.ValidationError, jsonschema.ValidationError), match=field
    ):
        check_kubernetes(objects)


ALWAYS = """
    PodDisruptionBudget/demo-tetris-serve-worker RayService/demo-tetris-serve
    Pod/demo-tetris-serve-test
    ServiceAccount/demo-tetris-serve-head ServiceAccount/demo-tetris-serve-worker
"""
CACHE = "PersistentVolumeClaim/demo-tetris-serve-models"
MONITORING = """
    ConfigMap/demo-tetris-serve-tetris-cluster ConfigMap/demo-tetris-serve-tetris-engine
    ConfigMap/demo-tetris-serve-tetris-speculation PodMonitor/demo-tetris-serve
"""
# Where other namespaces have theirs too.
ELSEWHERE = MONITORING.replace("ConfigMap/", "ConfigMap/default-")
KEYS = "Secret/demo-tetris-serve-api-keys"
NAMES = {
    "demo-cpu": f"{ALWAYS} {KEYS}",
    "one-gpu": f"{ALWAYS} {KEYS} {CACHE}",
    "many-gpus-eagle3": f"{ALWAYS} {KEYS} {CACHE} {MONITORING}",
    "production": f"""{ALWAYS} {CACHE} {ELSEWHERE}
        HTTPRoute/demo-tetris-serve PrometheusRule/demo-tetris-serve
        NetworkPolicy/demo-tetris-serve-head NetworkPolicy/demo-tetris-serve-worker
    """,
}


@examples
def test_names_stay_what_they_are(example):
    """A changed name deletes and recreates the object on the next `helm upgrade`."""
    objects = render_example(example)
    names = [
        f"{one['kind']}/{one['metadata']['name']}"
        for one in objects
        # A Job cannot be changed, so that another Pod has it take another name.
        if one["kind"] != "Job"
    ]
    assert sorted(names) == sorted(NAMES[example.stem].split())


def render_notes(folder: Path, *arguments: str) -> str:
    """Helm shows notes only with a cluster at hand; here they become a manifest."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text("utf-8")
    (chart / "templates" / "notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\n'
        'notes: {{ include "notes" . | toJson }}\n'
    )
    only = ("-s", "templates/notes.yaml", "-n", "llm")
    result = helm("template", "demo", str(chart), *arguments, *only)
    assert result.returncode == 0, result.stderr
    return str(yaml.safe_load(result.stdout)["notes"])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        (None, {}),
        ("org/small", {}),
        (None, {"method": "ngram"}),
        (None, {"classes": {"batch": {"weight": 0.5}}}),
    ],
    ids=["no draft", "a draft", "a method", "nothing about drafts"],
)
def test_the_notes_name_the_policy_that_the_server_chooses(
    device, draft, policy, tmp_path
):
    config = {
        "model": {"id": "m", "target": "org/m", "draft": draft},
        "policy": policy,
        "engine": {"device": device, "max_model_len": 99},
        "replicas": {"num_gpus": 1},
    }
    given = ("--set-json", f"config={json.dumps(config)}")
    notes = render_notes(tmp_path, *given, "--set", "workerGroups.engines.gpus=1")
    complete_policy(config)
    assert f"serves m with policy {config['policy']['name']}." in notes


def test_the_notes_say_how_to_reach_the_service(tmp_path):
    text = render_notes(tmp_path, "-f", str(PRODUCTION))
    assert "kubectl -n llm port-forward svc/demo-tetris-serve-serve-svc" in text
    assert '"model": "qwen3-14b"' in text
    assert "helm -n llm test demo" in text
    assert "get secret tetris-ray-token" in text
    assert "get secret llm-api-keys" in text
    assert "not authenticated" not in text
