"""Keys in the chart: one is made, kept as a hash where it is read, and announced."""

import hashlib
import json
from typing import Any

from serving.app import settings_from_args
from tests.helm.conftest import DEMO, of_kind, pod_templates, render, serve_config
from tests.helm.test_render import render_notes


def arguments_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(serve_config(objects)["applications"][0]["args"])


def test_the_default_release_makes_a_key_that_its_fronts_know():
    objects = render()
    (secret,) = of_kind(objects, "Secret")
    data = secret["stringData"]
    digest = hashlib.sha256(data["api-key"].encode()).hexdigest()
    assert json.loads(data["keys.json"])["default"]["sha256"] == digest
    arguments = arguments_of(objects)
    assert settings_from_args(arguments).http.access.allow_anonymous is None
    pod = pod_templates(objects)["engines"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    # The key itself is not in the Pod.
    assert volumes["api-keys"]["secret"] == {
        "secretName": secret["metadata"]["name"],
        "items": [{"key": "keys.json", "path": "keys.json"}],
    }
    mounts = {one["name"]: one for one in pod["containers"][0]["volumeMounts"]}
    folder = mounts["api-keys"]["mountPath"]
    assert arguments["http"]["access"]["keys_file"] == f"{folder}/keys.json"


def test_a_secret_of_ones_own_or_none_replaces_it():
    own = render("--set", "apiKeys.existingSecret=mine")
    assert not of_kind(own, "Secret")
    assert "secretName: mine" in json.dumps(own).replace('"', "")
    anybody = ["-f", str(DEMO), "--set", "config.http.access.allow_anonymous=true"]
    objects = render(*anybody)
    assert not of_kind(objects, "Secret")
    assert "api-keys" not in json.dumps(objects)
    assert "keys_file" not in arguments_of(objects)["http"]["access"]


def test_the_notes_say_how_to_read_it(tmp_path):
    notes = render_notes(tmp_path)
    assert "get secret demo-tetris-serve-api-keys" in notes
    assert "Bearer $key" in notes
    assert "not authenticated" not in notes
