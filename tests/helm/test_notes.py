"""What a release tells its operator: its key, how to reach it, which policy."""

import hashlib
import itertools
import json
import re
import shutil

import pytest
import yaml

from serving.app import settings_from_args
from serving.settings.policy_choice import complete_policy
from tests.helm import chart


@pytest.fixture
def render_notes(tmp_path):
    """Helm shows notes only with a cluster at hand; here they become a manifest."""
    copy = tmp_path / "chart"
    shutil.copytree(chart.FOLDER, copy)
    notes = (copy / "templates" / "NOTES.txt").read_text("utf-8")
    (copy / "templates" / "notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\n'
        'notes: {{ include "notes" . | toJson }}\n'
    )

    def run(*arguments):
        only = ("-s", "templates/notes.yaml", "-n", "llm")
        result = chart.helm("template", "demo", str(copy), *arguments, *only)
        return yaml.safe_load(result.stdout)["notes"]

    return run


def test_the_notes_name_the_policy_that_the_server_chooses(render_notes):
    drafts = [
        (None, {}),
        ("org/small", {}),
        (None, {"method": "ngram"}),
        # Says nothing about drafts.
        (None, {"classes": {"batch": {"weight": 0.5}}}),
    ]
    for device, (draft, policy) in itertools.product(("cpu", "gpu"), drafts):
        config = {
            "model": {"id": "m", "target": "org/m", "draft": draft},
            "policy": dict(policy),
            "engine": {"device": device, "max_model_len": 99},
            "replicas": {"num_gpus": 1},
        }
        given = ("--set-json", f"config={json.dumps(config)}")
        notes = render_notes(*given, "--set", "workerGroups.engines.gpus=1")
        complete_policy(config)
        assert f"serves m with policy {config['policy']['name']}." in notes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), ["get secret demo-tetris-serve-api-keys", "Bearer $key", ":8000/v1/chat"]),
        (
            ("--set", "serve.routePrefix=/llm"),
            ["curl http://127.0.0.1:8000/llm/v1/chat"],
        ),
        (
            chart.options_of("production"),
            [
                "kubectl -n llm port-forward svc/demo-tetris-serve-serve-svc",
                '"model": "qwen3-14b"',
                "helm -n llm test demo",
                "get secret tetris-ray-token",
                "get secret llm-api-keys",
            ],
        ),
    ],
)
def test_the_notes_say_how_to_reach_the_service(render_notes, values, said):
    text = render_notes(*values)
    assert [words for words in said if words not in text] == []
    assert "not authenticated" not in text


@pytest.mark.parametrize("autoscales", [True, False])
def test_an_upgrade_says_how_a_running_cluster_gets_other_numbers(
    render_notes, autoscales
):
    """KubeRay leaves them out of what it compares (`cluster_of` in test_rayservice)."""
    values = ("config.replicas.min=2", "config.replicas.max=8")
    values += (f"autoscaling.enabled={str(autoscales).lower()}",)
    given = chart.options_of("demo-cpu", *values)
    assert "patch raycluster" not in render_notes(*given)
    text = render_notes(*given, "--is-upgrade")
    (patch,) = re.findall(r"patch raycluster .* -p '(.*)'$", text, re.MULTILINE)
    group = chart.demo(*values).cluster["workerGroupSpecs"][0]
    names = ["maxReplicas", "minReplicas", *([] if autoscales else ["replicas"])]
    assert json.loads(patch) == [
        {
            "op": "replace",
            "path": f"/spec/workerGroupSpecs/0/{name}",
            "value": group[name],
        }
        for name in names
    ]


def test_the_default_release_makes_a_key_that_its_fronts_know():
    objects = chart.render()
    (secret,) = objects.of_kind("Secret")
    data = secret["stringData"]
    digest = hashlib.sha256(data["api-key"].encode()).hexdigest()
    assert json.loads(data["keys.json"])["default"]["sha256"] == digest
    arguments = objects.application["args"]
    assert settings_from_args(arguments).http.access.allow_anonymous is None
    pod = objects.pods["engines"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    # The key itself is not in the Pod.
    assert volumes["api-keys"]["secret"] == {
        "secretName": secret["metadata"]["name"],
        "items": [{"key": "keys.json", "path": "keys.json"}],
    }
    mounts = {one["name"]: one for one in pod["containers"][0]["volumeMounts"]}
    folder = mounts["api-keys"]["mountPath"]
    assert arguments["http"]["access"]["keys_file"] == f"{folder}/keys.json"
