"""What the chart renders is accepted: by helm, by Kubernetes and by KubeRay's CRD."""

import copy
import os
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helm import chart

CRD_VARIABLE = "KUBERAY_RAYSERVICE_CRD"
CRD_DEFAULT = chart.ROOT.parent / "shared" / "data" / "ray.io_rayservices.crd.yaml"

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
    "everything on": """
        gcsFaultTolerance.enabled=true gcsFaultTolerance.redisAddress=redis:6379
        gcsFaultTolerance.passwordSecret.name=redis
        gcsFaultTolerance.usernameSecret.name=redis
        networkPolicy.enabled=true networkPolicy.monitoring=null
        ingress.enabled=true ingress.controller=none
        ingress.hosts[0].host=llm.example.com ingress.annotations.a=b
        gateway.enabled=true gateway.parentRefs[0].name=public
        gateway.hostnames[0]=llm.example.com
        modelCache.enabled=true modelCache.storageClassName=fast
        monitoring.podMonitor.enabled=true monitoring.prometheusRule.enabled=true
        monitoring.dashboards.enabled=true monitoring.grafana.host=http://grafana:3000
        monitoring.grafana.iframeHost=https://grafana.example.com
        monitoring.prometheus.host=http://prometheus:9090 serve.tracing.enabled=true
        serve.tracing.endpoint=http://collector:4317
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
    "incremental upgrade": """
        upgrade.type=NewClusterWithIncrementalUpgrade gateway.enabled=false
        autoscaling.enabled=true upgrade.incremental.gatewayClassName=istio
    """,
    "no upgrade, someone else's cache": """
        upgrade.type=None modelCache.enabled=true modelCache.existingClaim=models
    """,
    "a file of a package": """
        modelCache.enabled=true modelCache.accessModes={ReadWriteMany}
        modelCache.download.enabled=true config.model.target=package:a/x.gguf
    """,
}
"""Values that replace those of an example."""


def strict(schema):
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


def check_kubernetes(objects):
    for document in objects:
        kind = document["kind"]
        if kind in CUSTOM_KINDS:
            jsonschema.validate(document["spec"], strict(CUSTOM_KINDS[kind]))
        elif kind != "RayService":
            for version in KUBERNETES_VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)


@pytest.fixture(scope="module")
def kuberay():
    """What checks a RayService, with all that is nested in it, by KubeRay's own CRD.

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
    schema = strict(version["schema"]["openAPIV3Schema"])
    # The top level is the API server's, as for every kind.
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def test_the_chart_and_its_examples_pass_a_strict_lint():
    for values in ([], *map(chart.options_of, chart.EXAMPLES)):
        result = chart.helm("lint", "--strict", str(chart.FOLDER), *values)
        assert "[WARNING]" not in result.stdout


@pytest.mark.parametrize("toggles", TOGGLES.values(), ids=TOGGLES)
@chart.each_example
def test_kubernetes_and_kuberay_accept_every_switch_in_every_example(
    name, toggles, request
):
    objects = chart.example(name, *toggles.split())
    check_kubernetes(objects)
    # Last, as it skips the test where nobody has provided the definition.
    request.getfixturevalue("kuberay").validate(*objects.of_kind("RayService"))


@chart.each_example
def test_no_rule_of_the_crd_in_cel_is_about_what_the_chart_sets(name, kuberay):
    """Else a library would have to try it: they are about owners and back ends."""
    met = {"x-kubernetes-validations": lambda *_: [jsonschema.ValidationError("met")]}
    look = jsonschema.validators.extend(type(kuberay), met)(kuberay.schema)
    (service,) = chart.example(name).of_kind("RayService")
    assert list(look.iter_errors(service)) == []
    managed = service["spec"] | {"managedBy": "ray.io/kuberay-operator"}
    (error,) = look.iter_errors(service | {"spec": managed})
    assert [*error.path] == ["spec", "managedBy"]


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
RULES = "PrometheusRule/demo-tetris-serve"
NAMES = {
    "demo-cpu": f"{ALWAYS} {KEYS}",
    "one-gpu": f"{ALWAYS} {KEYS} {CACHE}",
    "many-gpus-eagle3": f"{ALWAYS} {KEYS} {CACHE} {MONITORING} {RULES}",
    "production": f"""{ALWAYS} {CACHE} {ELSEWHERE}
        HTTPRoute/demo-tetris-serve {RULES}
        NetworkPolicy/demo-tetris-serve-head NetworkPolicy/demo-tetris-serve-worker
    """,
}


def test_a_long_name_leaves_room_for_what_kuberay_and_kubernetes_allow():
    """KubeRay keeps 50 characters of the head's account, a Job's name may have 63."""
    values = (
        "modelCache.accessModes={ReadWriteMany}",
        "modelCache.download.enabled=true",
    )
    given = chart.options_of("one-gpu", *values)
    objects = chart.render(*given, name="a" * 53)
    assert len(objects.pods["head"]["spec"]["serviceAccountName"]) <= 50
    (job,) = objects.of_kind("Job")
    assert len(job["metadata"]["name"]) <= 63
    assert len(objects.of_kind("RayService")[0]["metadata"]["name"]) == 45


@chart.each_example
def test_names_stay_what_they_are(name):
    """A changed name deletes and recreates the object on the next `helm upgrade`."""
    names = [
        f"{one['kind']}/{one['metadata']['name']}"
        for one in chart.example(name)
        # A Job cannot be changed, so that another Pod has it take another name.
        if one["kind"] != "Job"
    ]
    assert sorted(names) == sorted(NAMES[name].split())


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
    (document,) = copy.deepcopy(chart.production().of_kind(kind))
    document["spec"][field] = 1
    with pytest.raises(
        (kubernetes_validate.ValidationError, jsonschema.ValidationError), match=field
    ):
        check_kubernetes([document])


def test_the_crd_check_notices_a_misspelt_field(kuberay):
    (service,) = copy.deepcopy(chart.demo().of_kind("RayService"))
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["imagePullPolcy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolcy"):
        kuberay.validate(service)
