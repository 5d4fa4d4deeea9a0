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
    load_settings,
    parse_settings,
)
from serving.settings.sections import POLICIES

pytestmark = pytest.mark.filterwarnings(
    # Torch and Ray warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def minimal(**sections: dict[str, Any]) -> dict[str, Any]:
    """The smallest valid settings, with sections merged into them."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"id": "m", "target": "org/target", "draft": "org/draft"},
        "engine": {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return settings


def problems_of(data: object, **options: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(data, "a.yaml", **options)
    return caught.value.problems


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_every_shipped_deployment_file_is_valid(file: Path) -> None:
    assert load_settings(file).model.id


def test_the_demo_and_three_model_families_are_shipped() -> None:
    methods = {load_settings(file).policy.method for file in SHIPPED}
    targets = " ".join(load_settings(file).model.target for file in SHIPPED)
    assert {"draft_model", "eagle3"} <= methods
    assert "demo-target" in targets
    assert "Llama-3" in targets
    assert "Qwen3" in targets


def test_the_serve_config_file_names_an_existing_deployment_file() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = (ROOT / "configs" / "serve" / "tiny.yaml").read_text()
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = schema.applications
    assert application.import_path == "serving.app:build"
    assert load_settings(application.args["config"]).model.id == "demo"


def test_settings_cannot_be_changed_after_loading() -> None:
    settings = parse_settings(minimal())
    with pytest.raises(ValueError, match="frozen"):
        settings.policy.draft_tokens = 7  # type: ignore[misc]  # that is the point


def test_an_unknown_setting_is_an_error_that_suggests_the_right_one() -> None:
    (problem,) = problems_of(minimal(engine={"max_num_seq": 4}))
    assert (
        problem
        == "a.yaml: engine.max_num_seq: unknown setting; did you mean max_num_seqs?"
    )


def test_an_unknown_section_is_an_error_too() -> None:
    (problem,) = problems_of(minimal(polices={"name": "fixed"}))
    assert "polices: unknown setting; did you mean policy?" in problem


def test_a_number_out_of_range_names_setting_bound_value_and_meaning() -> None:
    (problem,) = problems_of(minimal(replicas={"min": 0}))
    assert problem == (
        "a.yaml: replicas.min: must be ≥ 1 (got 0); set replicas kept when idle"
    )


def test_all_faults_of_a_file_are_reported_together() -> None:
    problems = problems_of(
        minimal(policy={"name": "best"}, http={"port": 0}, engine={"dtype": "int3"})
    )
    assert len(problems) == 3


def test_a_missing_setting_says_that_it_is_required() -> None:
    (problem,) = problems_of({"model": {"id": "m", "target": "t"}, "engine": {}})
    assert problem.startswith("a.yaml: engine.max_model_len: is required")


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_file_that_is_no_mapping_is_refused(data: object) -> None:
    (problem,) = problems_of(data)
    assert "must hold the sections model, policy" in problem


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"model": {"draft": None}, "policy": {"name": "fixed"}},
            "model.draft: is required by policy.method",
        ),
        (
            {"model": {"draft": None}, "policy": {"max_draft_tokens": 4}},
            "model.draft: is required by policy.method",
        ),
        ({"policy": {"method": "ngram"}}, "model.draft: policy.method: ngram drafts"),
        (
            {"engine": {"kv_cache_memory_bytes": None}},
            "engine.kv_cache_memory_bytes: is required on the CPU",
        ),
        ({"replicas": {"num_gpus": 1}}, "replicas.num_gpus: must be 0"),
        ({"engine": {"device": "gpu"}}, "replicas.num_gpus: must be > 0"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.max: must be ≥ replicas.min"),
        ({"http": {"fronts": {"min": 3, "max": 2}}}, "http.fronts.max: must be ≥ http"),
        (
            {"replicas": {"target_ongoing_requests": 90, "max_ongoing_requests": 8}},
            "replicas.target_ongoing_requests: must be ≤",
        ),
        ({"http": {"port": 8265}}, "http: port, dashboard_port and metrics_port"),
        (
            {"engine": {"extra": {"data_parallel_size": 2}}},
            "engine.extra.data_parallel_size: must be 1",
        ),
        (
            {"engine": {"extra": {"pipeline_parallel_size": 2}}},
            "engine.extra.pipeline_parallel_size: must be 1 (got 2) with",
        ),
        (
            {"engine": {"max_num_batched_tokens": 4}},
            "engine.max_num_batched_tokens: must be ≥ engine.max_num_seqs",
        ),
        (
            {"policy": {"extra": {"num_speculative_tokens": 5}}},
            "policy.extra.num_speculative_tokens: is set by the policy section",
        ),
        (
            {
                "engine": {"max_model_len": 16},
                "policy": {"name": "fixed", "draft_tokens": 16},
            },
            "policy.draft_tokens: drafts must be shorter",
        ),
        (
            {"engine": {"max_model_len": 16}, "policy": {"max_draft_tokens": 16}},
            "policy.max_draft_tokens: drafts must be shorter",
        ),
        (
            {"policy": {"name": "tetris", "max_draft_tokens": 2}},
            "policy.max_draft_tokens: must be ≥ policy.draft_tokens (3, got 2)",
        ),
    ],
)
def test_settings_that_contradict_each_other_name_the_one_to_change(
    sections: dict[str, Any], expected: str
) -> None:
    assert problems_of(minimal(**sections))[0].startswith(f"a.yaml: {expected}")


def test_further_engine_arguments_are_checked_against_vllm() -> None:
    assert parse_settings(minimal(engine={"extra": {"block_size": 32}}))
    (problem,) = problems_of(minimal(engine={"extra": {"blok_size": 32}}))
    assert problem == (
        "a.yaml: engine.extra.blok_size: vLLM has no such engine argument; "
        "did you mean block_size?"
    )


def test_an_engine_argument_with_a_setting_of_its_own_is_refused_in_extra() -> None:
    (problem,) = problems_of(minimal(engine={"extra": {"max_num_seqs": 3}}))
    assert "write it as engine.max_num_seqs" in problem
    (problem,) = problems_of(minimal(engine={"extra": {"worker_cls": "x"}}))
    assert "is set by policy" in problem


def test_relative_folders_start_at_the_file_and_hub_ids_pass_through(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sub" / "a.yaml"
    file.parent.mkdir()
    file.write_text(
        yaml.safe_dump(minimal(model={"target": "../target", "draft": "org/draft"}))
    )
    settings = load_settings(file)
    assert settings.model.target == str(tmp_path / "target")
    assert settings.model.draft == "org/draft"


def test_relative_folders_of_inline_settings_start_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = parse_settings(minimal(model={"target": "./target"}))
    assert settings.model.target == str(tmp_path / "target")


def test_a_file_is_found_from_the_project_folder_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings("configs/tiny.yaml").model.id == "demo"


def test_a_missing_file_says_what_to_give() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: no such file; give"):
        load_settings("nowhere.yaml")


def test_broken_yaml_and_keys_given_twice_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {id: [")
    with pytest.raises(SettingsError, match="is not valid YAML"):
        load_settings(file)
    file.write_text("model: {id: a, id: b}")
    with pytest.raises(SettingsError, match="'id' is given twice"):
        load_settings(file)


def test_overrides_replace_values_by_dotted_name() -> None:
    settings = parse_settings(
        minimal(), overrides={"policy.name": "fixed", "engine.extra.block_size": 32}
    )
    assert settings.policy.name == "fixed"
    assert settings.engine.extra == {"block_size": 32}


def test_an_override_without_a_section_is_refused() -> None:
    (problem,) = problems_of(minimal(), overrides={"port": 1})
    assert "name a setting as section.setting=value" in problem


@pytest.mark.parametrize(
    ("policy", "depth"),
    [
        ({"name": "none"}, 0),
        ({"name": "fixed"}, 3),
        ({"name": "tetris"}, 5),
        ({"name": "tetris", "draft_tokens": 1, "max_draft_tokens": 4}, 4),
        ({"name": "goodput"}, 8),
        ({"name": "dynamic", "max_draft_tokens": 4}, 4),
    ],
)
def test_the_draft_depth_follows_the_policy(policy: dict[str, Any], depth: int) -> None:
    settings: Settings = parse_settings(minimal(policy=policy))
    assert settings.policy.num_speculative_tokens == depth


def test_settings_and_planner_know_the_same_policies() -> None:
    assert POLICIES == POLICY_NAMES


def test_a_policy_is_one_of_ours_or_a_class_of_somebody_elses() -> None:
    own = parse_settings(
        minimal(), overrides={"policy.name": "my.own:Planner", "policy.params.x": 1}
    )
    assert (own.policy.name, own.policy.params) == ("my.own:Planner", {"x": 1})
    for name in ("tetriss", "my.own", "my own:Planner", ":Planner"):
        with pytest.raises(SettingsError, match=r"policy\.name.*'goodput', or a plan"):
            parse_settings(minimal(), overrides={"policy.name": name})


def test_the_port_variable_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "9000")
    assert Environment.read().port == 9000
    monkeypatch.setenv("PORT", "")
    assert Environment.read().port is None
    monkeypatch.setenv("PORT", "90000")
    with pytest.raises(SettingsError, match="PORT: must be a port"):
        Environment.read()


def test_faults_of_a_request_class_are_named_with_their_place() -> None:
    classes = {"chat": {"weight": 0}, "bulk": {"wieght": 5}}
    problems = problems_of(minimal(policy={"classes": classes}))
    assert problems == [
        "a.yaml: policy.classes.chat.weight: must be > 0.0 (got 0); set what a token "
        "is worth compared with others",
        "a.yaml: policy.classes.bulk.wieght: unknown setting; did you mean weight?",
    ]


def test_two_classes_cannot_share_a_priority() -> None:
    classes = {"chat": {"priority": 1}, "bulk": {"priority": 1}}
    (problem,) = problems_of(minimal(policy={"classes": classes}))
    assert "policy.classes.bulk.priority: 1 belongs to policy.classes.chat" in problem


def test_priorities_need_the_queue_that_honours_them() -> None:
    (problem,) = problems_of(
        minimal(
            policy={"classes": {"chat": {"priority": 1}}},
            engine={"extra": {"scheduling_policy": "fcfs"}},
        )
    )
    assert "engine.extra.scheduling_policy: must be priority (got fcfs)" in problem
