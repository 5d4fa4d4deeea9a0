"""What operators rely on in the rendered RayService."""

import copy
import json

import pytest

from serving.app import front_options_of, settings_from_args
from serving.settings.sections import HttpSettings
from tests.helm.conftest import (
    CHART,
    DEMO,
    PRODUCTION,
    environment,
    examples,
    of_kind,
    pod_templates,
    ray_service,
    render,
    render_example,
    serve_config,
)

pytestmark = pytest.mark.filterwarnings(
    # Torch and Ray warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

OFF_THE_HEAD = {"ray.io/node-group": "!headgroup"}


def worker_group(objects):
    """Return the one worker group."""
    (group,) = ray_service(objects)["rayClusterConfig"]["workerGroupSpecs"]
    return group


@examples
def test_no_replica_is_ever_placed_on_the_head(example):
    objects = render_example(example)
    head = ray_service(objects)["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert ray_service(objects)["excludeHeadPodFromServeSvc"] is True
    (application,) = serve_config(objects)["applications"]
    # Only fronts ask for no CPU; test_drain.py has Ray place them.
    options = front_options_of(settings_from_args(application["args"]))
    assert options["ray_actor_options"]["label_selector"] == OFF_THE_HEAD
    # Options given here would replace the environment that a front needs.
    assert "deployments" not in application


def test_nor_is_one_whatever_is_asked_for():
    objects = render(
        *("-f", str(DEMO), "--set", "config.http.fronts.label_selector.zone=a"),
        *("--set-string", "head.rayStartParams.num-cpus=4"),
    )
    head = ray_service(objects)["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    http = serve_config(objects)["applications"][0]["args"]["http"]
    assert http["fronts"]["label_selector"] == OFF_THE_HEAD | {"zone": "a"}
    assert http["board"] is True


@examples
def test_containers_run_without_privileges_and_have_places_to_write_to(example):
    for name, template in pod_templates(render_example(example)).items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/home/tetris", "/dev/shm", "/var/cache/tetris"} <= mounts
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@examples
def test_only_an_autoscaling_head_gets_a_token_of_the_api_server(example):
    objects = render_example(example)
    templates = pod_templates(objects)
    autoscales = ray_service(objects)["rayClusterConfig"]["enableInTreeAutoscaling"]
    head = templates.pop("head")
    assert head["spec"]["automountServiceAccountToken"] is autoscales
    for template in templates.values():
        assert template["spec"]["automountServiceAccountToken"] is False
    for account in of_kind(objects, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@examples
def test_a_worker_may_live_as_long_as_its_drain_takes(example):
    objects = render_example(example)
    replicas = serve_config(objects)["applications"][0]["args"]["replicas"]
    requests_s = replicas.get("drain_timeout_s", 120)
    pod = worker_group(objects)["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["tetris-serve", "drain-node"]
    deadline_s = int(command[-1])
    assert requests_s < deadline_s < pod["terminationGracePeriodSeconds"]
    assert ray_service(objects)["rayClusterDeletionDelaySeconds"] > requests_s


@pytest.mark.parametrize(
    ("bounds", "per_pod", "expected"),
    [((1, 2), 1, (1, 2)), ((3, 16), 8, (1, 2)), ((9, 17), 8, (2, 3))],
)
def test_workers_follow_the_bounds_of_serve(bounds, per_pod, expected):
    objects = render_example(
        DEMO,
        f"config.replicas.min={bounds[0]},config.replicas.max={bounds[1]}",
        f"workerGroups.engines.enginesPerPod={per_pod}",
    )
    group = worker_group(objects)
    assert (group["minReplicas"], group["maxReplicas"]) == expected
    assert group["replicas"] == expected[0]


def cluster_of(*values):
    """Return all that makes KubeRay start a new Ray cluster if it changes.

    As its GenerateHashWithoutReplicasAndWorkersToDelete has it.
    """
    cluster = copy.deepcopy(ray_service(render_example(DEMO, *values)))
    cluster = cluster["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        for name in ("replicas", "minReplicas", "maxReplicas"):
            del group[name]
    return cluster


@pytest.mark.parametrize(
    ("value", "is_new"),
    [
        ("config.policy.name=goodput", False),
        ("config.replicas.max=5", False),
        ("serve.logging.level=DEBUG", False),
        ("networkPolicy.enabled=true", False),
        ("monitoring.podMonitor.enabled=true", False),
        # Serve would ignore these two.
        ("config.http.keep_alive_timeout_s=30", True),
        ("serve.requestTimeoutSeconds=60", True),
        ("config.http.port=9000", True),
        ("config.replicas.drain_timeout_s=60", True),
        ("image.tag=other", True),
    ],
)
def test_only_what_serve_cannot_change_in_place_starts_a_new_cluster(value, is_new):
    assert (cluster_of(value) != cluster_of()) == is_new


def test_without_an_autoscaler_the_most_workers_are_kept():
    objects = render_example(DEMO, "autoscaling.enabled=false")
    group = worker_group(objects)
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    assert "autoscalerOptions" not in ray_service(objects)["rayClusterConfig"]


def test_gpus_are_requested_and_their_taint_is_tolerated():
    group = worker_group(render_example(CHART / "examples" / "many-gpus-eagle3.yaml"))
    pod = group["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 8
    assert resources["requests"]["nvidia.com/gpu"] == 8
    assert resources["requests"]["cpu"] == "64"
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_extras_reach_every_pod_and_groups_have_their_own():
    objects = render_example(
        DEMO,
        "extraEnv[0].name=A,extraEnv[0].value=everywhere",
        "head.extraEnv[0].name=B,head.extraEnv[0].value=head",
        "extraVolumes[0].name=more,extraVolumes[0].emptyDir.medium=Memory",
        "extraVolumeMounts[0].name=more,extraVolumeMounts[0].mountPath=/more",
        "podLabels.team=llm,podAnnotations.note=x,commonLabels.owner=llm",
        "workerGroups.engines.podLabels.tier=gpu",
        "extraContainers[0].name=logs,extraContainers[0].image=x",
    )
    for name, template in pod_templates(objects).items():
        container, sidecar = template["spec"]["containers"]
        # Ray's must be the first.
        assert container["name"].startswith("ray-")
        assert sidecar["name"] == "logs"
        env = environment(objects, name)
        assert env["A"]["value"] == "everywhere"
        assert ("B" in env) == (name == "head")
        assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert "more" in volumes
        labels = template["metadata"]["labels"]
        assert (labels["team"], labels["owner"]) == ("llm", "llm")
        assert ("tier" in labels) == (name == "engines")
        assert template["metadata"]["annotations"]["note"] == "x"


def test_secrets_are_references():
    objects = render_example(PRODUCTION)
    for name in pod_templates(objects):
        token = environment(objects, name)["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert token == {"name": "hugging-face", "key": "token"}, name
    cluster = ray_service(objects)["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "tetris-ray-token"}
    options = cluster["gcsFaultToleranceOptions"]
    assert options["redisPassword"] == {
        "valueFrom": {"secretKeyRef": {"name": "tetris-redis", "key": "redis-password"}}
    }
    assert not of_kind(objects, "Secret")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((), str(HttpSettings().max_body_bytes)),
        (("config.http.max_body_bytes=8Mi",), "8m"),
        (("config.http.max_body_bytes=64k",), "64k"),
        (("config.http.max_body_bytes=1G",), "1g"),
        (("config.http.max_body_bytes=5000000",), "5000000"),
    ],
)
def test_streams_pass_the_ingress_unbuffered_and_bodies_as_large_as_served(
    values, words
):
    (ingress,) = of_kind(render_example(PRODUCTION, *values), "Ingress")
    annotations = ingress["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io"
    assert annotations[f"{prefix}/proxy-buffering"] == "off"
    assert annotations[f"{prefix}/proxy-read-timeout"] == "3600"
    assert annotations[f"{prefix}/proxy-body-size"] == words
    path = ingress["spec"]["rules"][0]["http"]["paths"][0]
    assert path["backend"]["service"] == {
        "name": "demo-tetris-serve-serve-svc",
        "port": {"name": "serve"},
    }


def test_a_route_of_the_gateway_has_no_time_limit():
    gateway = "gateway.enabled=true,gateway.parentRefs[0].name=public"
    objects = render_example(DEMO, gateway)
    (route,) = of_kind(objects, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["backendRefs"][0]["port"] == 8000


def test_budget_policies_and_monitor_select_the_pods_that_are_rendered():
    objects = render_example(PRODUCTION)
    templates = pod_templates(objects)
    labels = {name: t["metadata"]["labels"] for name, t in templates.items()}

    def selected(selector):
        wanted = selector["matchLabels"].items()
        return {name for name, given in labels.items() if wanted <= given.items()}

    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert selected(budget["spec"]["selector"]) == {"engines"}
    (monitor,) = of_kind(objects, "PodMonitor")
    assert selected(monitor["spec"]["selector"]) == {"head", "engines"}
    head, worker = of_kind(objects, "NetworkPolicy")
    assert selected(head["spec"]["podSelector"]) == {"head"}
    assert selected(worker["spec"]["podSelector"]) == {"engines"}
    ports = {
        port["name"]
        for template in templates.values()
        for port in template["spec"]["containers"][0]["ports"]
    }
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} <= ports


def open_ports(policy, direction):
    """Return (port, number of peers or None for anybody) of each rule."""
    peers = "from" if direction == "ingress" else "to"
    return {
        (port["port"], len(rule[peers]) if peers in rule else None)
        for rule in policy["spec"][direction]
        for port in rule.get("ports", [])
    }


def test_policies_leave_the_paths_that_are_needed():
    head, worker = of_kind(render_example(PRODUCTION), "NetworkPolicy")
    _, local = of_kind(render_example(DEMO, "networkPolicy.enabled=true"), head["kind"])
    wanted = [
        (worker, "ingress", {8000, 8080}),
        (head, "ingress", {8265, 8000, 8080, 44217, 44227}),
        # DNS, API server, Redis, model hub, traces
        (head, "egress", {53, 443, 6443, 6379, 4317}),
        (worker, "egress", {53, 443, 4317}),
        # Local models need no way out.
        (local, "egress", {53}),
    ]
    for policy, direction, ports in wanted:
        assert {port for port, _ in open_ports(policy, direction)} == ports
    assert all(count == 1 for _, count in open_ports(worker, "ingress"))
    assert (8000, None) in open_ports(local, "ingress")


def test_ray_s_dashboard_knows_grafana_and_prometheus():
    env = environment(render_example(PRODUCTION))
    assert env["RAY_GRAFANA_HOST"]["value"] == "http://grafana.monitoring:3000"
    assert env["RAY_GRAFANA_IFRAME_HOST"]["value"] == "https://grafana.example.com"
    prometheus = "http://prometheus-operated.monitoring:9090"
    assert env["RAY_PROMETHEUS_HOST"]["value"] == prometheus
    # But it is not sent to a dashboard that is not there.
    env = environment(render_example(DEMO, "monitoring.grafana.host=http://grafana"))
    assert "RAY_GRAFANA_HOST" in env
    assert "RAY_GRAFANA_DATA_DASHBOARD_UID" not in env


# Ray leaves the file that it generates the dashboard from open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ray_s_metrics_page_embeds_our_dashboard(monkeypatch):
    """Ray reads the id that it embeds, and fills in these two variables."""
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import (
        generate_data_grafana_dashboard,
    )

    env = environment(render_example(PRODUCTION))
    name = "RAY_GRAFANA_DATA_DASHBOARD_UID"
    monkeypatch.setenv(name, env[name]["value"])
    _, uid = generate_data_grafana_dashboard()
    dashboards = [
        json.loads(next(iter(config_map["data"].values())))
        for config_map in of_kind(render_example(PRODUCTION), "ConfigMap")
    ]
    (dashboard,) = [one for one in dashboards if one["uid"] == uid]
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    assert {"datasource", "Cluster"} <= variables
    assert env["RAY_GRAFANA_CLUSTER_FILTER"]["valueFrom"]["fieldRef"] == {
        "fieldPath": "metadata.labels['ray.io/cluster']"
    }


def test_traces_of_serve_and_vllm_go_to_the_same_collector():
    config = serve_config(render_example(PRODUCTION))
    tracing = config["tracing_config"]
    assert tracing["exporter_import_path"] == "serving.tracing:build_span_processors"
    extra = config["applications"][0]["args"]["engine"]["extra"]
    assert extra["otlp_traces_endpoint"] == "http://otel-collector.monitoring:4317"
