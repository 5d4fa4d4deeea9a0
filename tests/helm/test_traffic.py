"""Who reaches the Pods, how far and for how long: routes, budgets and policies."""

from serving.settings.sections import HttpSettings
from tests.helm import chart


def test_bodies_pass_the_ingress_that_are_as_large_as_served():
    ingress = "ingress.enabled=true,ingress.hosts[0].host=llm.example.com"
    words = {"8Mi": "8m", "64k": "64k", "1G": "1g", "5000000": "5000000"}
    sizes = {f"config.http.max_body_bytes={size}": one for size, one in words.items()}
    for values, size in {"": str(HttpSettings().max_body_bytes), **sizes}.items():
        (rendered,) = chart.demo(ingress, *filter(None, [values])).of_kind("Ingress")
        annotations = rendered["metadata"]["annotations"]
        assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == size


def test_budget_policies_and_monitor_select_the_pods_that_are_rendered():
    objects = chart.production(
        "commonLabels.a=b,podLabels.a=c,commonLabels.release=prometheus"
    )
    (job,), (test_pod,) = objects.of_kind("Job"), objects.of_kind("Pod")
    pods = objects.pods | {"download": job["spec"]["template"], "test": test_pod}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}

    def selected(selector):
        wanted = selector["matchLabels"].items()
        return {name for name, given in labels.items() if wanted <= given.items()}

    (budget,) = objects.of_kind("PodDisruptionBudget")
    assert selected(budget["spec"]["selector"]) == {"engines"}
    (monitor,) = objects.of_kind("PodMonitor")
    assert selected(monitor["spec"]["selector"]) >= {"head", "engines"}
    policies = objects.of_kind("NetworkPolicy")
    shut_in = [selected(policy["spec"]["podSelector"]) for policy in policies]
    # Not the download, which has to reach its hub.
    assert shut_in == [{"head"}, {"engines"}]
    for policy in policies:
        # The test is let in as a part of the release.
        peers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]
        assert selected(peers) == set(labels)
    containers = [pod["spec"]["containers"][0] for pod in objects.pods.values()]
    ports = {port["name"] for container in containers for port in container["ports"]}
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
    head, worker = chart.production().of_kind("NetworkPolicy")
    _, local = chart.demo("networkPolicy.enabled=true").of_kind("NetworkPolicy")
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
    for policy in (head, worker):
        peers = [rule.get("to", []) for rule in policy["spec"]["egress"]]
        # NodeLocal DNSCache is no Pod of kube-system's, but an address of the node.
        assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in peers[1]
