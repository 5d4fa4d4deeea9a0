"""Values that cannot work are refused, with the name of the value and the fix."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from serving.settings.model import Settings, parse_settings
from tests.helm.conftest import (
    CHART,
    DEMO,
    PRODUCTION,
    ROOT,
    examples,
    helm,
    ray_service,
    refused,
    render,
    render_example,
    serve_config,
)

GPU = CHART / "examples" / "many-gpus-eagle3.yaml"

REFUSED = {
    DEMO: {
        "a typo": "podDisruptionBudgett.enabled=true -> podDisruptionBudgett",
        "a typo in a setting": "config.policy.nme=fixed -> property nme",
        "a typo in a group": "workerGroups.engines.gpu=1 -> property gpu ",
        "an unknown policy": "config.policy.name=best -> config.policy.name",
        "no size": "config.http.max_body_bytes=4 apples -> max_body_bytes",
        "a zero": "config.replicas.max=0 -> config.replicas.max",
        "no model": "config.model=null -> config.model: Invalid type",
        "a relative model": "config.model.target=./m -> absolute path",
        "bounds the wrong way": "config.replicas.min=5 -> config.replicas.max",
        "an invalid digest": "image.digest=latest -> image.digest",
        "a relative route": "serve.routePrefix=v1 -> serve.routePrefix",
        "too few workers": "workerGroups.engines.maxReplicas=1 -> raise maxReplicas",
        "too few CPUs": "workerGroups.engines.resources.requests.cpu=1 -> "
        "a Pod has 1 Ray CPUs and 0 GPUs, too little for one replica",
        "replicas without CPUs": "config.replicas.num_cpus=0 -> all replicas on",
        "more on a Pod than Ray places": "workerGroups.engines.enginesPerPod=2 -> "
        "workerGroups.engines.enginesPerPod: Ray places 1 replicas",
        "a group of nothing": "workerGroups.bare.gpus=0 -> "
        "workerGroups.bare.resources: is incomplete",
        "two groups with all bounds each": "workerGroups.more.resources.limits.cpu=2,"
        "workerGroups.more.resources.limits.memory=6Gi -> "
        "Replicas: is required where there are several groups",
        "a budget in percent": "podDisruptionBudget.minAvailable=50% -> "
        "podDisruptionBudget.minAvailable",
        "a budget that blocks every drain": "podDisruptionBudget.minAvailable=1 -> "
        "give at most 0 or leave it null",
        "a label to select Pods by": r"commonLabels.app\.kubernetes\.io/part-of=x"
        " -> commonLabels.app.kubernetes.io/part-of: is set by the chart",
        "a label of KubeRay's": r"workerGroups.engines.podLabels.ray\.io/cluster=x -> "
        "workerGroups.engines.podLabels.ray.io/cluster: is set by",
        "a port of the metrics": "config.http.port=8080 -> belongs to metrics",
        "a port Ray may take": "config.http.port=10500 -> such as 8000",
        "an address that nothing reads": "config.http.host=127.0.0.1 -> "
        "config.http.host: has no effect in a cluster; remove it",
        "a port that nothing reads": "config.http.metrics_port=9000 -> "
        "config.http.metrics_port: has no effect",
        "streams cut": "drain.terminationGracePeriodSeconds=30 -> would be cut",
        "a download of nothing": "modelCache.enabled=true,"
        "modelCache.download.enabled=true -> names nothing from a hub and no GGUF file",
        "no time to end in": "drain.terminationGracePeriodSeconds=95 -> "
        "half a minute for Ray to end",
        "streams cut by an upgrade": "upgrade.clusterDeletionDelaySeconds=10 -> "
        "the old cluster's streams would be cut",
        "a proxy where nobody asks": "serve.proxyLocation=HeadOnly -> proxyLoc",
        # Secrets come by reference only; there is no value that would take one.
        "a password": "gcsFaultTolerance.password=x -> property password",
        "an upgrade through no gateway": "upgrade.type=NewClusterWithIncrementalUpgrade"
        " -> name a GatewayClass",
        "a password among Ray's options": "head.rayStartParams.redis-password=x -> "
        "head.rayStartParams.redis-password: KubeRay refuses it",
        "labels among Ray's options": "workerGroups.engines.rayStartParams.labels=a=b"
        " -> workerGroups.engines.rayStartParams.labels: KubeRay refuses it",
        "an unknown upgrade": "upgrade.type=Rolling -> upgrade.type",
        "Redis nowhere": "gcsFaultTolerance.enabled=true -> give host:port",
        "traces to nowhere": "serve.tracing.enabled=true -> tracing.endpoint",
        "an ingress for no host": "ingress.enabled=true -> ingress.hosts",
        "a route of no gateway": "gateway.enabled=true -> gateway.parentRefs",
        "a name too long": f"fullnameOverride={48 * 'a'} -> fullnameOverride",
        "a name KubeRay rejects": "fullnameOverride=1a -> begins with a letter",
        "an alert that is none": "monitoring.prometheusRule.disabled={TetrisFalbacks}"
        " -> TetrisFallbacks",
        "a target between buckets": "monitoring.prometheusRule.latency."
        "timeToFirstTokenSeconds=3 -> timeToFirstTokenSeconds",
    },
    GPU: {
        "too few GPUs": "config.engine.tensor_parallel_size=16 -> or gpus",
        "fewer on a Pod than Ray places": "workerGroups.engines.enginesPerPod=4 -> "
        "Ray places 8 replicas on a Pod with 64 Ray CPUs and 8 GPUs (got 4)",
        "no GPU": "config.replicas.num_gpus=0 -> set it to 1",
        "a download to nowhere": "modelCache.enabled=false,"
        "modelCache.download.enabled=true -> set modelCache.enabled: true",
        "a download to one node alone": "modelCache.download.enabled=true,"
        "modelCache.accessModes={ReadWriteOnce} -> use ReadWriteMany",
    },
    PRODUCTION: {
        "a size nginx cannot read": "config.http.max_body_bytes=1.5Gi,"
        "ingress.enabled=true,ingress.hosts[0].host=x -> "
        "write a whole number of k, M or G for nginx, such as 4Mi (got 1.5Gi)",
    },
}
"""By example: a value, and a part of why it is refused."""


@pytest.mark.parametrize(
    ("example", "value", "message"),
    [
        pytest.param(example, *told.split(" -> "), id=name)
        for example, cases in REFUSED.items()
        for name, told in cases.items()
    ],
)
def test_values_that_cannot_work_are_refused(example, value, message):
    assert message in refused("-f", str(example), "--set", value)


def test_the_chart_alone_serves_the_demo():
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr
    # Without a cluster, each rendering makes another key.
    alone, demo = (
        [one for one in render(*given) if one["kind"] != "Secret"]
        for given in ((), ("-f", str(DEMO)))
    )
    assert alone == demo


def test_a_config_of_one_s_own_has_nothing_of_the_demo():
    assert "config: model is required" in refused("--set", "config.policy.name=none")
    model = "config.model.id=m,config.model.target=org/m,config.engine.device=gpu"
    gpus = "config.replicas.num_gpus=1,workerGroups.engines.gpus=1"
    objects = render("--set", f"{model},config.engine.max_model_len=99,{gpus}")
    args = serve_config(objects)["applications"][0]["args"]
    assert args["engine"] == {"device": "gpu", "max_model_len": 99}
    assert "policy" not in args


def test_schema_and_dashboards_are_what_they_are_written_from():
    script = ROOT / ".ci" / "chart.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@examples
def test_serve_gets_a_config_and_settings_that_are_accepted(example):
    from ray.serve.schema import ServeDeploySchema

    config = serve_config(render_example(example))
    schema = ServeDeploySchema.model_validate(config)
    assert schema.logging_config.encoding == "JSON"
    (application,) = config["applications"]
    settings = parse_settings(application["args"], "args")
    given = yaml.safe_load(example.read_text("utf-8"))["config"]
    assert settings.model.id == given["model"]["id"]
    assert settings.replicas.max == given["replicas"]["max"]
    assert settings.http.board == (example.stem == "demo-cpu")


def test_defaults_in_templates_are_those_of_the_settings():
    """A template that reads an absent setting must assume what the server assumes."""
    files = [*(CHART / "templates").glob("*.tpl"), CHART / "templates" / "NOTES.txt"]
    text = "".join(file.read_text("utf-8") for file in files)
    uses = re.findall(
        r'setting" \(list (?:\.|\$root) "(\w+)" "(\w+)" "?([\w.]+)"?\)', text
    )
    assert len(uses) > 10
    for section, name, default in uses:
        section_type = Settings.model_fields[section].annotation
        expected = section_type.model_fields[name].default
        if default == "dict":
            assert expected == {}, f"{section}.{name}"
            continue
        assert type(expected)(default) == expected, f"{section}.{name}"


def test_numbers_reach_serve_as_they_were_written(tmp_path):
    """Helm reads numbers as floats and likes to write large ones with an exponent."""
    values = tmp_path / "values.yaml"
    values.write_text("config: {engine: {kv_cache_memory_bytes: 536870912}}", "utf-8")
    for objects, written in (
        (render("-f", str(DEMO), "-f", str(values)), "536870912"),
        (render_example(DEMO), "512Mi"),
    ):
        text = ray_service(objects)["serveConfigV2"]
        assert f"kv_cache_memory_bytes: {written}\n" in text


def test_latency_targets_are_bucket_bounds_of_vllm():
    from vllm.v1.metrics import buckets

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    latency = schema["properties"]["monitoring"]["properties"]["prometheusRule"][
        "properties"
    ]["latency"]["properties"]
    first, between = (
        latency[name]["enum"]
        for name in ("timeToFirstTokenSeconds", "interTokenSeconds")
    )
    assert tuple(first) == buckets.TIME_TO_FIRST_TOKEN_BUCKETS
    assert tuple(between) == buckets.INTER_TOKEN_LATENCY_BUCKETS


def find_differences(schema, part, values, path):
    """Yield names that only the schema or only values.yaml has, but for `config`."""
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    known = part.get("properties")
    if known is None or not isinstance(values, dict):
        return
    yield from (f"{path}{name}" for name in set(known) ^ set(values))
    for name in known.keys() & values.keys() - {"config"}:
        yield from find_differences(schema, known[name], values[name], f"{path}{name}.")


def test_the_schema_and_the_values_know_the_same_names():
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    # Kubernetes' own fields of a probe, which have good defaults.
    probes = {
        f"probes.{kind}.{name}"
        for kind in ("liveness", "readiness")
        for name in ("initialDelaySeconds", "successThreshold")
    }
    # helm puts `global` into every chart.
    assert set(find_differences(schema, schema, values, "")) == {"global", *probes}
    group = schema["$defs"]["workerGroup"]
    engines = values["workerGroups"]["engines"]
    assert not set(find_differences(schema, group, engines, ""))


def test_the_chart_has_the_package_s_version_and_its_ray():
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for device in ("cpu", "gpu"):
        lock = ROOT / "configs" / "requirements" / f"{device}.txt"
        assert f"\nray=={values['ray']['version']} ;" in lock.read_text("utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'version = "{chart["appVersion"]}"' in pyproject
