"""Values that cannot work are refused; those that can reach Serve as they are."""

import json
import re
from pathlib import Path

import pytest
import yaml

from serving.app import llm_config_of
from serving.settings.model import Settings, parse_settings
from tests.helm import chart

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text("utf-8"))
VALUES = yaml.safe_load((chart.FOLDER / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((chart.FOLDER / "values.schema.json").read_text("utf-8"))


def refused(*options):
    """Render values that must not be accepted, and return what helm says."""
    return chart.helm("template", "demo", str(chart.FOLDER), *options, status=1).stderr


@pytest.mark.parametrize(
    ("example", "value", "message"),
    [
        pytest.param(example, *told, id=name)
        for example, cases in REFUSED.items()
        for name, told in cases.items()
    ],
)
def test_values_that_cannot_work_are_refused(example, value, message):
    assert message in refused(*chart.options_of(example, value))


def test_without_a_config_the_demo_is_served_and_with_one_nothing_of_it():
    # Without a cluster, each rendering makes another key.
    alone, demo = (
        [one for one in objects if one["kind"] != "Secret"]
        for objects in (chart.render(), chart.demo())
    )
    assert alone == demo
    own = "config.policy.name=none"
    assert "config: model is required" in refused("--set", own)
    model = "config.model.id=m,config.model.target=org/m,config.engine.device=gpu"
    gpus = "config.replicas.num_gpus=1,workerGroups.engines.gpus=1"
    objects = chart.render("--set", f"{model},config.engine.max_model_len=99,{gpus}")
    args = objects.application["args"]
    assert args["engine"] == {"device": "gpu", "max_model_len": 99}
    assert "policy" not in args


@chart.each_example
def test_serve_gets_a_config_and_settings_that_are_accepted(name):
    from ray.serve.schema import ServeDeploySchema

    objects = chart.example(name)
    schema = ServeDeploySchema.model_validate(objects.serve)
    assert schema.logging_config.encoding == "JSON"
    settings = parse_settings(objects.application["args"], "args")
    given = yaml.safe_load(chart.EXAMPLES[name].read_text("utf-8"))["config"]
    assert settings.model.id == given["model"]["id"]
    # Of the numbers of engines Serve is told as it would be without the chart.
    engines, _ = objects.application["deployments"]
    without = llm_config_of(parse_settings(given, "config")).deployment_config
    assert engines["autoscaling_config"] == without["autoscaling_config"]
    assert settings.http.board == (name == "demo-cpu")


def test_defaults_in_templates_are_those_of_the_settings():
    """A template that reads an absent setting must assume what the server assumes."""
    files = (chart.FOLDER / "templates").glob("*.t*")
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


def test_numbers_reach_serve_as_they_were_written():
    """Helm reads numbers as floats and likes to write large ones with an exponent."""
    given = "--set-json=config.engine.kv_cache_memory_bytes=536870912"
    objects = chart.render(*chart.options_of("demo-cpu"), given)
    assert "kv_cache_memory_bytes: 536870912\n" in objects.service["serveConfigV2"]


def test_latency_targets_are_bucket_bounds_of_vllm():
    from vllm.v1.metrics import buckets

    rules = SCHEMA["properties"]["monitoring"]["properties"]["prometheusRule"]
    latency = rules["properties"]["latency"]["properties"]
    for name, bounds in (
        ("timeToFirstTokenSeconds", buckets.TIME_TO_FIRST_TOKEN_BUCKETS),
        ("interTokenSeconds", buckets.INTER_TOKEN_LATENCY_BUCKETS),
    ):
        assert tuple(latency[name]["enum"]) == bounds


def test_the_chart_has_the_package_s_version_and_its_ray():
    for device in ("cpu", "gpu"):
        lock = chart.ROOT / "configs" / "requirements" / f"{device}.txt"
        assert f"\nray=={VALUES['ray']['version']} ;" in lock.read_text("utf-8")
    about = yaml.safe_load((chart.FOLDER / "Chart.yaml").read_text("utf-8"))
    pyproject = (chart.ROOT / "pyproject.toml").read_text("utf-8")
    assert f'version = "{about["appVersion"]}"' in pyproject


def find_differences(part, values, path=""):
    """Yield names that only the schema or only values.yaml has, but for `config`."""
    if "$ref" in part:
        part = SCHEMA["$defs"][part["$ref"].rpartition("/")[2]]
    known = part.get("properties")
    if known is None or not isinstance(values, dict):
        return
    yield from (f"{path}{name}" for name in set(known) ^ set(values))
    for name in known.keys() & values.keys() - {"config"}:
        yield from find_differences(known[name], values[name], f"{path}{name}.")


def test_the_schema_and_the_values_know_the_same_names():
    # Kubernetes' own fields of a probe, which have good defaults.
    probes = {
        f"probes.{kind}.{name}"
        for kind in ("liveness", "readiness")
        for name in ("initialDelaySeconds", "successThreshold")
    }
    # helm puts `global` into every chart.
    assert set(find_differences(SCHEMA, VALUES)) == {"global", *probes}
    group = SCHEMA["$defs"]["workerGroup"]
    assert not set(find_differences(group, VALUES["workerGroups"]["engines"]))
