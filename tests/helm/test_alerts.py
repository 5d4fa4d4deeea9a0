"""Alert rules, as the chart renders them, in the hands of the real promtool."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.conftest import CHART, DEMO, ROOT, of_kind, render, require

TEST_FILE = Path(__file__).with_name("alerts_test.yaml")

# What the PodMonitor and the Prometheus operator put on everything they scrape.
OURS = 'namespace="default",ray_io_cluster="demo-tetris-serve-x2c4v"'


def rules(*arguments: str) -> dict[str, Any]:
    """Render the rules and return their groups."""
    enabled = ("--set", "monitoring.prometheusRule.enabled=true")
    (rule,) = of_kind(render("-f", str(DEMO), *enabled, *arguments), "PrometheusRule")
    return dict(rule["spec"])


def alerts() -> list[dict[str, Any]]:
    """Return all alerts."""
    groups = rules()["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool(
    folder: Path, content: dict[str, Any], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run promtool on rules, which lie in a folder as rules.yaml."""
    program = require("promtool", "run .ci/extras, or put it on PATH")
    (folder / "rules.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_promtool_accepts_the_rules_and_would_refuse_a_broken_one(tmp_path):
    """`check rules` tries the templates in annotations too."""
    content, check = rules(), ("check", "rules", "rules.yaml")
    result = promtool(tmp_path, content, *check)
    assert result.returncode == 0, result.stdout + result.stderr
    broken = content["groups"][-1]["rules"][-1]
    broken["annotations"]["summary"] = "{{ $labels.x | humanise }}"
    result = promtool(tmp_path, content, *check)
    assert result.returncode != 0
    assert "humanise" in result.stderr


def read_cases() -> dict[str, Any]:
    """Read the input of `promtool test rules` for our own release."""
    text = TEST_FILE.read_text("utf-8").replace("{...,", f"{{{OURS},")
    content = dict(yaml.safe_load(text))
    del content["ours"]
    for case in content["tests"]:
        for series in case["input_series"]:
            # YAML takes promtool's 0x30, thirty zeros, for a hexadecimal number.
            assert isinstance(series["values"], str), f"write 0+0x: {series}"
    return content


def test_every_alert_fires_when_it_should_and_only_then(tmp_path):
    content = rules()
    for group in content["groups"]:
        for rule in group["rules"]:
            # promtool would compare the texts to the letter.
            rule.pop("annotations", None)
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(read_cases()), "utf-8")
    result = promtool(tmp_path, content, "test", "rules", "cases.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_tests_know_every_alert():
    content = read_cases()
    fired, quiet = set(), set()
    for case in content["tests"]:
        for expectation in case["alert_rule_test"]:
            seen = fired if expectation["exp_alerts"] else quiet
            seen.add(expectation["alertname"])
    names = {alert["alert"] for alert in alerts()}
    assert fired == names
    assert quiet == names


def test_every_alert_says_what_to_do():
    for alert in alerts():
        assert alert["labels"]["severity"] in {"page", "ticket"}, alert["alert"]
        assert len(alert["annotations"]["runbook"]) > 80, alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]


def test_alerts_read_metrics_that_we_export():
    sources = [ROOT / "serving" / part / "metrics.py" for part in ("replica", "front")]
    text = "".join(source.read_text("utf-8") for source in sources)
    known = set(re.findall(r'"(tetris_\w+)"', text))
    read = set(re.findall(r"ray_(tetris_\w+)", str(alerts())))
    assert read
    assert read <= known


def test_every_alert_can_be_left_out():
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    monitoring = schema["properties"]["monitoring"]["properties"]
    disabled = monitoring["prometheusRule"]["properties"]["disabled"]
    assert disabled["items"]["enum"] == [alert["alert"] for alert in alerts()]
    left_out = rules("--set", "monitoring.prometheusRule.disabled={TetrisFallbacks}")
    assert "TetrisFallbacks" not in str(left_out)
    assert "TetrisNoCapacity" in str(left_out)


@pytest.mark.parametrize("target", ["1", "0.5"])
def test_targets_reach_rules_and_pick_an_existing_bucket(target):
    path = "monitoring.prometheusRule.latency.timeToFirstTokenSeconds"
    text = str(rules("--set-json", f"{path}={target}"))
    assert f"{target} * group by (namespace, ray_io_cluster)" in text
    (pattern,) = set(
        re.findall(r'first_token_seconds_bucket\{[^}]*, le=~"([^"]+)"\}\[5m', text)
    )
    pattern = pattern.replace("\\\\", "\\")
    assert re.fullmatch(pattern, str(float(target)))


def test_rules_read_nothing_but_their_own_release():
    """Two releases have one Prometheus; `absent` and pages must not cross over."""
    ours = '{namespace="default", ray_io_cluster=~"demo-tetris-serve-[a-z0-9]+"'
    for group in rules()["groups"]:
        for rule in group["rules"]:
            expression = rule["expr"]
            metrics = re.findall(r"\b(?:ray_(?!io_)|tetris:|up(?={))\w*", expression)
            assert metrics
            assert expression.count(ours) == len(metrics), expression
