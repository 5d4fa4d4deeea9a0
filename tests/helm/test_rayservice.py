"""What holds for every RayService, and what its numbers come from."""

import copy
import json

import pytest

from tests.helm import chart


def worker_group(objects):
    (group,) = objects.cluster["workerGroupSpecs"]
    return group


@chart.each_example
def test_containers_run_without_privileges_and_have_places_to_write_to(name):
    for template in chart.example(name).pods.values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
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


@chart.each_example
def test_only_an_autoscaling_head_gets_a_token_of_the_api_server(name):
    objects = chart.example(name)
    for group, template in objects.pods.items():
        autoscales = group == "head" and objects.cluster["enableInTreeAutoscaling"]
        assert template["spec"]["automountServiceAccountToken"] is autoscales
    for account in objects.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@chart.each_example
def test_a_worker_may_live_as_long_as_its_drain_takes(name):
    objects = chart.example(name)
    replicas = objects.application["args"]["replicas"]
    requests_s = replicas.get("drain_timeout_s", 120)
    pod = worker_group(objects)["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["tetris-serve", "drain-node"]
    deadline_s = int(command[-1])
    assert requests_s < deadline_s < pod["terminationGracePeriodSeconds"]
    assert objects.service["rayClusterDeletionDelaySeconds"] > requests_s


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
    given = {"min": bounds[0], "max": bounds[1], "num_cpus": num_cpus}
    replicas = f"--set-json=config.replicas={json.dumps(given)}"
    group = worker_group(chart.render(*chart.options_of("demo-cpu"), replicas))
    assert (group["minReplicas"], group["maxReplicas"]) == expected
    assert group["replicas"] == expected[0]


def cluster_of(*values):
    """Return all that makes KubeRay start a new Ray cluster if it changes.

    As its GenerateHashWithoutReplicasAndWorkersToDelete has it.
    """
    cluster = copy.deepcopy(chart.demo(*values).cluster)
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


# Ray leaves the file that it generates the dashboard from open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ray_s_metrics_page_embeds_our_dashboard(monkeypatch):
    """Ray reads the id that it embeds, and fills in these two variables."""
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import (
        generate_data_grafana_dashboard,
    )

    objects = chart.production()
    variables = objects.pods["head"]["spec"]["containers"][0]["env"]
    env = {variable["name"]: variable for variable in variables}
    name = "RAY_GRAFANA_DATA_DASHBOARD_UID"
    monkeypatch.setenv(name, env[name]["value"])
    _, uid = generate_data_grafana_dashboard()
    maps = objects.of_kind("ConfigMap")
    texts = (text for config_map in maps for text in config_map["data"].values())
    (dashboard,) = [one for one in map(json.loads, texts) if one["uid"] == uid]
    named = {one["name"] for one in dashboard["templating"]["list"]}
    assert {"datasource", "Cluster"} <= named
    assert env["RAY_GRAFANA_CLUSTER_FILTER"]["valueFrom"]["fieldRef"] == {
        "fieldPath": "metadata.labels['ray.io/cluster']"
    }
