"""Keys in the chart: one is made, kept as a hash where it is read, and announced."""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from serving.app import settings_from_args
from tests.helm.conftest import DEMO, render
from tests.helm.test_render import render_notes


def arguments_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (service,) = (one for one in objects if one["kind"] == "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    return dict(config["applications"][0]["args"])


def test_the_default_release_makes_a_key_that_its_fronts_know() -> None:
    objects = render()
    (secret,) = (one for one in objects if one["kind"] == "Secret")
    data = secret["stringData"]
    digest = hashlib.sha256(data["api-key"].encode()).hexdigest()
    assert json.loads(data["keys.json"])["default"]["sha256"] == digest
    arguments = arguments_of(objects)
    assert settings_from_args(arguments).http.access.allow_anonymous is None
    (service,) = (one for one in objects if one["kind"] == "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if one["name"] == "api-keys")
    # The key itself is not in the Pod.
    assert volume["secret"] == {
        "secretName": secret["metadata"]["name"],
        "items": [{"key": "keys.json", "path": "keys.json"}],
    }
    mounts = {one["name"]: one for one in pod["containers"][0]["volumeMounts"]}
    folder = mounts["api-keys"]["mountPath"]
    assert arguments["http"]["access"]["keys_file"] == f"{folder}/keys.json"


def test_a_secret_of_ones_own_or_none_replaces_it() -> None:
    own = render("--set", "apiKeys.existingSecret=mine")
    assert not any(one["kind"] == "Secret" for one in own)
    assert "secretName: mine" in json.dumps(own).replace('"', "")
    anybody = ["-f", str(DEMO), "--set", "config.http.access.allow_anonymous=true"]
    objects = render(*anybody)
    assert not any(one["kind"] == "Secret" for one in objects)
    assert "api-keys" not in json.dumps(objects)
    assert "keys_file" not in arguments_of(objects)["http"]["access"]


def test_the_notes_say_how_to_read_it(tmp_path: Path) -> None:
    notes = render_notes(tmp_path)
    assert "get secret demo-tetris-serve-api-keys" in notes
    assert "Bearer $key" in notes
    assert "not authenticated" not in notes
