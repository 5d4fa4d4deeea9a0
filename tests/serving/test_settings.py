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


@pytest.mark.parametrize(
    ("settings", "expected"),
    pairs(
        "engine.max_num_seq=4 -> "
        "engine.max_num_seq: unknown setting; did you mean max_num_seqs?",
        "polices.name=fixed -> polices: unknown setting; did you mean policy?",
        "replicas.max_num_seqs=4 -> "
        "replicas.max_num_seqs: unknown setting; did you mean engine.max_num_seqs?",
        "replicas.max_replica=4 -> "
        "replicas.max_replica: unknown setting; did you mean max_replicas?",
        "replicas.max=0 -> "
        "replicas.max: must be ≥ 1 (got 0); set replicas at the highest load",
        "engine.extra.blok_size=32 -> engine.extra.blok_size: vLLM has no such "
        "engine argument; did you mean block_size?",
        "policy.classes.a.weight=0 -> policy.classes.a.weight: must be > 0.0 "
        "(got 0); set what a token is worth compared with others",
        "policy.classes.a.wieght=5 -> "
        "policy.classes.a.wieght: unknown setting; did you mean weight?",
    ),
)
def test_a_fault_names_setting_bound_value_and_fix(settings, expected):
    assert problems_of(minimal(), overrides=written(settings)) == [
        f"a.yaml: {expected}"
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    pairs(
        "model.draft=null policy.name=fixed -> model.draft: is required by policy.",
        "model.draft=null policy.max_draft_tokens=4 -> model.draft: is required by",
        "policy.method=ngram -> model.draft: policy.method: ngram drafts",
        "engine.kv_cache_memory_bytes=null -> engine.kv_cache_memory_bytes: is requ",
        "replicas.num_gpus=1 -> replicas.num_gpus: must be 0",
        "engine.device=gpu -> replicas.num_gpus: must be > 0",
        "replicas.min=3 replicas.max=2 -> replicas.max: must be ≥ replicas.min",
        "http.fronts.min=3 http.fronts.max=2 -> http.fronts.max: must be ≥ http",
        "replicas.target_ongoing_requests=90 replicas.max_ongoing_requests=8 -> "
        "replicas.target_ongoing_requests: must be ≤",
        "http.port=8265 -> http: port, dashboard_port and metrics_port",
        "engine.extra.data_parallel_size=2 -> engine.extra.data_parallel_size: must",
        "engine.extra.pipeline_parallel_size=2 -> "
        "engine.extra.pipeline_parallel_size: must be 1 (got 2) with",
        "engine.extra.max_num_seqs=3 -> "
        "engine.extra.max_num_seqs: write it as engine.max_num_seqs",
        "engine.extra.worker_cls=x -> engine.extra.worker_cls: is set by policy",
        "engine.max_num_batched_tokens=4 -> "
        "engine.max_num_batched_tokens: must be ≥ engine.max_num_seqs",
        "policy.extra.num_speculative_tokens=5 -> "
        "policy.extra.num_speculative_tokens: is set by the policy section",
        "engine.max_model_len=16 policy.name=fixed policy.draft_tokens=16 -> "
        "policy.draft_tokens: drafts must be shorter",
        "engine.max_model_len=16 policy.max_draft_tokens=16 -> "
        "policy.max_draft_tokens: drafts must be shorter",
        "policy.name=tetris policy.max_draft_tokens=2 -> "
        "policy.max_draft_tokens: must be ≥ policy.draft_tokens (3, got 2)",
        "policy.classes.a.priority=1 policy.classes.b.priority=1 -> "
        "policy.classes.b.priority: 1 belongs to policy.classes.a",
        "policy.classes.a.priority=1 engine.extra.scheduling_policy=fcfs -> "
        "engine.extra.scheduling_policy: must be priority (got fcfs)",
    ),
)
def test_settings_that_contradict_each_other_name_the_one_to_change(settings, expected):
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
