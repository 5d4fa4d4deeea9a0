"""What operators rely on in the rendered RayService."""

import copy
import json

import pytest

from serving.app import front_options_of, settings_from_args
from serving.settings.live import read_live
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

POD_NAMES = ("head", "engines")
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


def test_what_may_change_live_is_handed_to_engines_and_fronts():
    live = {"policy": {"name": "fixed", "draft_tokens": 2}}
    values = ("--set-json", f"live={json.dumps(live)}")
    objects = render("-f", str(DEMO), "--set", "config.model.id=a/b.c", *values)
    (application,) = serve_config(objects)["applications"]
    assert application["deployments"] == [
        {"name": name, "user_config": live}
        for name in ("TetrisEngine:a--b_c", "TetrisFront")
    ]
    assert read_live(live).policy.draft_tokens == 2


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
    ("bounds", "num_cpus", "expected"),
    # Of two CPUs; 0.3 and 0.1 are none that a float has exactly.
    [
        # One for the front.
        ((0, 2), 2, (1, 2)),
        ((1, 2), 2, (1, 2)),
        ((1, 2), 1.5, (1, 2)),
        ((3, 16), 0.25, (1, 2)),
        ((9, 17), 0.25, (2, 3)),
        ((20, 20), 0.1, (1, 1)),
        ((6, 7), 0.3, (1, 2)),
    ],
)
def test_workers_follow_the_bounds_of_serve_and_what_a_replica_reserves(
    bounds, num_cpus, expected
):
    replicas = {"min": bounds[0], "max": bounds[1], "num_cpus": num_cpus}
    objects = render(
        *("-f", str(DEMO), "--set-json", f"config.replicas={json.dumps(replicas)}")
    )
    group = worker_group(objects)
    assert (group["minReplicas"], group["maxReplicas"]) == expected
    assert group["replicas"] == expected[0]


def test_workers_go_to_zero_where_fronts_are_on_the_head():
    place = {"ray.io/node-group": "headgroup"}
    objects = render(
        *("-f", str(DEMO), "--set", "config.replicas.min=0"),
        *("--set-json", f"config.http.fronts.label_selector={json.dumps(place)}"),
    )
    assert worker_group(objects)["minReplicas"] == 0
    (application,) = serve_config(objects)["applications"]
    options = front_options_of(settings_from_args(application["args"]))
    assert options["ray_actor_options"]["label_selector"] == place


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
    # What nobody has asked for is not limited.
    assert "cpu" not in resources["limits"]
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_the_head_and_a_worker_share_no_claim_and_one_machine_is_enough():
    objects = render_example(CHART / "examples" / "one-gpu.yaml")
    head, engines = (pod_templates(objects)[name]["spec"] for name in POD_NAMES)
    assert {"name": "model-cache", "emptyDir": {}} in head["volumes"]
    claim = {"claimName": "demo-tetris-serve-models"}
    assert {"name": "model-cache", "persistentVolumeClaim": claim} in engines["volumes"]
    assert head["tolerations"] == engines["tolerations"]
    # But the head checks the settings, and must see a folder that they name.
    objects = render_example(
        DEMO, "modelCache.enabled=true,config.model.target=/var/cache/tetris/m"
    )
    volumes = pod_templates(objects)["head"]["spec"]["volumes"]
    assert {"name": "model-cache", "persistentVolumeClaim": claim} in volumes


@pytest.mark.parametrize("autoscales", ["true", "false"])
def test_a_collector_finds_the_logs_in_one_volume(autoscales):
    objects = render_example(DEMO, f"autoscaling.enabled={autoscales}")
    cluster = ray_service(objects)["rayClusterConfig"]
    mount = {"name": "ray-logs", "mountPath": "/tmp/ray"}
    for template in pod_templates(objects).values():
        assert mount in template["spec"]["containers"][0]["volumeMounts"]
    if autoscales == "true":
        # KubeRay adds a volume of its own where none is mounted.
        assert mount in cluster["autoscalerOptions"]["volumeMounts"]


def test_what_is_named_twice_is_written_once_and_the_last_one_counts():
    objects = render_example(
        DEMO,
        "secretEnv.TOKEN.name=hub,secretEnv.TOKEN.key=token,extraEnv[0].name=TOKEN",
        "extraEnv[0].value=general,extraEnv[1].name=RAY_USAGE_STATS_ENABLED",
        "extraEnv[1].value=yes,extraEnv[2].name=B,extraEnv[2].value=general",
        "workerGroups.engines.extraEnv[0].name=B",
        "workerGroups.engines.extraEnv[0].value=own",
        "extraVolumes[0].name=tmp,extraVolumes[0].emptyDir.sizeLimit=1Gi",
        "extraVolumeMounts[0].name=tmp,extraVolumeMounts[0].mountPath=/tmp",
    )
    for pod, expected in (("head", "general"), ("engines", "own")):
        spec = pod_templates(objects)[pod]["spec"]
        container = spec["containers"][0]
        for items, field in (
            (container["env"], "name"),
            (container["volumeMounts"], "mountPath"),
            (spec["volumes"], "name"),
        ):
            names = [item[field] for item in items]
            assert len(set(names)) == len(names)
        env = environment(objects, pod)
        assert env["B"]["value"] == expected
        assert env["TOKEN"] == {"name": "TOKEN", "value": "general"}
        assert env["RAY_USAGE_STATS_ENABLED"]["value"] == "yes"
        assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in spec["volumes"]


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
