"""Deployment files: what is accepted, and how everything else is explained."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.registry import POLICY_NAMES
from serving.settings.model import (
    Environment,
    Settings,
    SettingsError,
    dump_settings,
    load_settings,
    parse_settings,
    parse_value,
)
from serving.settings.policy_section import POLICIES

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text("utf-8"))


def minimal(**sections: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "model": {"id": "m", "target": "org/target", "draft": "org/draft"},
        "engine": {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return settings


def written(settings: str) -> dict[str, Any]:
    """Read settings as people write them behind `--set`, with blanks in between."""
    pairs = (one.partition("=") for one in settings.split())
    return {name: parse_value(value) for name, _, value in pairs}


def deployment_of(settings: str) -> Settings:
    return parse_settings(minimal(), overrides=written(settings))


def pairs(*rows: str) -> list[list[str]]:
    """Read a table whose rows are written as `left -> right`."""
    return [row.split(" -> ") for row in rows]


def problems_of(data: object, **options: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(data, "a.yaml", **options)
    return caught.value.problems


def test_the_demo_and_three_model_families_are_shipped_and_served_as_a_file_says():
    from ray.serve.schema import ServeDeploySchema

    shipped = [load_settings(file) for file in SHIPPED]
    for one in shipped:
        assert parse_settings(yaml.safe_load(dump_settings(one))) == one
    assert {"draft_model", "eagle3"} <= {one.policy.method for one in shipped}
    targets = " ".join(one.model.target for one in shipped)
    assert all(name in targets for name in ("demo-target", "Llama-3", "Qwen3"))
    text = (ROOT / "configs" / "serve" / "tiny.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "serving.app:build"
    demo = load_settings(application.args["config"])
    assert (demo.model.id, demo.findings) == ("demo", ())
    assert (demo.policy.name, demo.policy.max_draft_tokens) == ("goodput", 8)


def test_all_faults_of_a_file_are_reported_together():
    faults = written("policy.name=best http.port=0 engine.dtype=int3")
    assert len(problems_of(minimal(), overrides=faults)) == 3
    for nothing in (None, [], "text", 3):
        (problem,) = problems_of(nothing)
        assert "must hold the sections model, policy" in problem
        (problem,) = problems_of(minimal() | {"policy": nothing})
        assert problem.startswith("a.yaml: policy: ")
    (problem,) = problems_of(minimal(), overrides={"port": 1})
    assert "name a setting as section.setting=value" in problem
    (problem,) = problems_of({"model": {"id": "m", "target": "t"}, "engine": {}})
    assert problem.startswith("a.yaml: engine.max_model_len: is required")


@pytest.mark.parametrize(("settings", "expected"), REFUSED.items(), ids=REFUSED)
def test_what_is_refused_names_the_setting_to_change_and_the_fix(settings, expected):
    problem = problems_of(minimal(), overrides=written(settings))[0]
    assert problem.startswith(f"a.yaml: {expected}")


def test_relative_folders_start_at_the_file_and_hub_ids_pass_through(
    tmp_path, monkeypatch
):
    file = tmp_path / "sub" / "a.yaml"
    file.parent.mkdir()
    pair = {"target": "../target", "draft": "hf://org/draft"}
    file.write_text(yaml.safe_dump(minimal(model=pair)))
    model = load_settings(file).model
    assert (model.target, model.draft) == (str(tmp_path / "target"), "org/draft")
    # Without a file, at the current folder.
    monkeypatch.chdir(tmp_path)
    inline = parse_settings(minimal(model={"target": "./target"}))
    assert inline.model.target == str(tmp_path / "target")
    # And a file is found from the project's folder as well.
    assert load_settings("configs/tiny.yaml").model.id == "demo"


def test_files_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: no such file; give"):
        load_settings("nowhere.yaml")
    file = tmp_path / "a.yaml"
    for text, reason in (
        ("model: {id: [", "is not valid YAML"),
        ("model: {id: a, id: b}", "'id' is given twice"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=reason):
            load_settings(file)


def test_a_policy_is_one_of_ours_or_a_class_of_somebody_elses():
    assert POLICIES == POLICY_NAMES
    own = parse_settings(
        minimal(), overrides={"policy.name": "my.own:Planner", "policy.params.x": 1}
    )
    assert (own.policy.name, own.policy.params) == ("my.own:Planner", {"x": 1})
    for name in ("tetriss", "my.own", "my own:Planner", ":Planner"):
        with pytest.raises(SettingsError, match=r"policy\.name.*'goodput', or a plan"):
            parse_settings(minimal(), overrides={"policy.name": name})


def test_the_port_variable_is_read_and_checked(monkeypatch):
    for text, port in ("9000", 9000), ("", None):
        monkeypatch.setenv("PORT", text)
        assert Environment.read().port == port
    monkeypatch.setenv("PORT", "90000")
    with pytest.raises(SettingsError, match="PORT: must be a port"):
        Environment.read()
