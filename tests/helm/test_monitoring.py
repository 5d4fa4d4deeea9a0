"""Alerts in the hands of the real promtool, and dashboards as Grafana gets them."""

import json
import re
from pathlib import Path

import yaml

from tests.conftest import run
from tests.helm import chart

DASHBOARDS = sorted((chart.FOLDER / "dashboards").glob("*.json"))
CASES = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text("utf-8"))

# What the PodMonitor and the Prometheus operator put on everything they scrape.
OURS = {"namespace": "default", "ray_io_cluster": "demo-tetris-serve-x2c4v"}
PAGES = {
    "TetrisTimeToFirstTokenBurn",
    "TetrisInterTokenLatencyBurn",
    "TetrisNoCapacity",
    "TetrisQueueSaturated",
}

METRIC = re.compile(r"\b(?:ray_(?!io_)|tetris:|up(?={))\w*")


def rules(*options):
    enabled = chart.options_of("demo-cpu", "monitoring.prometheusRule.enabled=true")
    (rule,) = chart.render(*enabled, *options).of_kind("PrometheusRule")
    return rule["spec"]


def alerts():
    groups = rules()["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool(folder, content, *arguments):
    """Run promtool on rules, which lie in a folder as rules.yaml."""
    program = chart.require("promtool", "run .ci/extras, or put it on PATH")
    (folder / "rules.yaml").write_text(yaml.safe_dump(content), "utf-8")
    run(program, *arguments, cwd=folder)


def expect(name, labels):
    severity = "page" if name in PAGES else "ticket"
    shared = OURS | {"rayservice": "demo-tetris-serve", "severity": severity}
    sets = [shared | own for own in labels]
    sets = [{n: v for n, v in one.items() if v is not None} for one in sets]
    return {"alertname": name, "exp_alerts": [{"exp_labels": one} for one in sets]}


def test_every_alert_fires_when_it_should_and_only_then(tmp_path):
    quiet = {alert["alert"]: [] for alert in alerts()}
    ours = "{" + ",".join(f'{name}="{value}"' for name, value in OURS.items())
    tests, fired = [], set()
    for case in CASES:
        series = case["series"]
        # YAML takes promtool's 0x30, thirty zeros, for hexadecimal: write 0+0x30.
        assert all(isinstance(values, str) for values in series.values())
        inputs = [
            {"series": name.replace("{...", ours), "values": values}
            for name, values in series.items()
        ]
        checks = [
            {"eval_time": time, **expect(name, labels)}
            for time, expected in case["alerts"].items()
            for name, labels in (quiet if expected == "nothing" else expected).items()
        ]
        fired |= {one["alertname"] for one in checks if one["exp_alerts"]}
        known = {"name": case["name"], "interval": "1m"}
        tests.append(known | {"input_series": inputs, "alert_rule_test": checks})
    assert fired == set(quiet)
    content = rules()
    # Which tries the templates in annotations too.
    promtool(tmp_path, content, "check", "rules", "rules.yaml")
    for rule in (rule for group in content["groups"] for rule in group["rules"]):
        # promtool would compare the texts to the letter.
        rule.pop("annotations", None)
    cases = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases), "utf-8")
    promtool(tmp_path, content, "test", "rules", "cases.yaml")


def test_every_alert_says_what_to_do_and_can_be_left_out():
    schema = json.loads((chart.FOLDER / "values.schema.json").read_text("utf-8"))
    monitoring = schema["properties"]["monitoring"]["properties"]
    disabled = monitoring["prometheusRule"]["properties"]["disabled"]
    assert disabled["items"]["enum"] == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert len(alert["annotations"]["runbook"]) > 80, alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]
    left_out = rules("--set", "monitoring.prometheusRule.disabled={TetrisFallbacks}")
    assert "TetrisFallbacks" not in str(left_out)
    assert "TetrisNoCapacity" in str(left_out)


def test_alerts_and_dashboards_read_metrics_that_we_export():
    sources = (chart.ROOT / "serving").rglob("*.py")
    text = "".join(source.read_text("utf-8") for source in sources)
    known = set(re.findall(r'"(tetris_\w+)"', text))
    panels = "".join(file.read_text("utf-8") for file in DASHBOARDS)
    read = set(re.findall(r"ray_(tetris_\w+)", panels + str(alerts())))
    assert len(read) > 15
    assert read <= known


def test_rules_and_panels_read_nothing_but_their_own_release():
    """Two releases have one Prometheus; `absent` and pages must not cross over."""
    boards = [json.loads(file.read_text("utf-8")) for file in DASHBOARDS]
    panels = [panel for board in boards for panel in board["panels"]]
    targets = [one for panel in panels for one in panel.get("targets", [])]
    alarms = [rule for group in rules()["groups"] for rule in group["rules"]]
    for filtered, ours in (
        (targets, '{ray_io_cluster=~"$Cluster"'),
        (alarms, '{namespace="default", ray_io_cluster=~"demo-tetris-serve-[a-z0-9]+"'),
    ):
        for expression in (one["expr"] for one in filtered):
            metrics = METRIC.findall(expression)
            assert metrics, expression
            assert expression.count(ours) == len(metrics), expression


def test_the_dashboards_of_releases_live_side_by_side_as_they_were_written():
    """Grafana has an id and a title once; its sidecar has one folder of files."""
    given = {"enabled": True, "namespace": "grafana"}
    shared = f"monitoring.dashboards={json.dumps(given)}"
    own, taken = {"uid": "", "title": ""}, []
    for name, namespace in (("one", "a"), ("one", "b"), ("two", "b")):
        options = ("--namespace", namespace, "--set-json", shared)
        maps = chart.render(*options, name=name).of_kind("ConfigMap")
        for config_map, file in zip(maps, DASHBOARDS, strict=True):
            assert config_map["metadata"]["namespace"] == "grafana"
            assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
            # A ConfigMap holds at most a mebibyte.
            assert len(yaml.safe_dump(config_map)) < 1 << 20
            ((place, text),) = config_map["data"].items()
            shipped = json.loads(text)
            uid, title = shipped["uid"], shipped["title"]
            # Grafana's own limit.
            assert len(uid) <= 40
            taken += [config_map["metadata"]["name"], place, uid, title]
            written = json.loads(file.read_text("utf-8"))
            # Nobody looks at another release by looking at all clusters.
            for board in (shipped, written):
                one_of = {one["name"]: one for one in board["templating"]["list"]}
                choice = one_of["Cluster"]
                choices = choice.pop("definition"), choice.pop("query")["query"]
                ours = (
                    f'{{namespace="{namespace}", '
                    f'ray_io_cluster=~"{name}-tetris-serve-[a-z0-9]+"}}'
                )
                assert [ours in query for query in choices] == [board is shipped] * 2
                assert ("allValue" in choice) == (board is written)
                choice.pop("allValue", None)
            assert shipped | own == written | own
    assert len(set(taken)) == len(taken) == 4 * 3 * len(DASHBOARDS)
