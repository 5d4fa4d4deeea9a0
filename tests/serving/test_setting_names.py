"""Other people's names, sizes, old names, and what is chosen where nothing is said."""

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies

from serving.settings.model import (
    Settings,
    SettingsError,
    dump_settings,
    load_settings,
    parse_settings,
)
from serving.settings.names import FOREIGN_NAMES
from serving.settings.sizes import read_size, show_size
from tests.serving.test_settings import SHIPPED, minimal, problems_of

pytestmark = pytest.mark.filterwarnings(
    # Torch and Ray warn about themselves while they are imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

PLACES = [
    (section, ours, theirs)
    for section, field in Settings.model_fields.items()
    for ours in getattr(field.annotation, "model_fields", {})
    for theirs in FOREIGN_NAMES.get(ours, {})
]
VALUES: dict[str, Any] = {
    "id": "name",
    "target": "org/other",
    "draft_tokens": 4,
    "draft_sampling": "probabilistic",
    "per_request_metrics": "none",
    "min": 2,
    "max": 3,
    "start_attempts": 5,
    "drain_timeout_s": 7.0,
    "metrics_port": 9100,
    "stream_interval_ms": 5.0,
}


def findings_of(data: dict[str, Any]) -> list[str]:
    return [f"{one.severity}: {one}" for one in parse_settings(data).findings]


def foreign(section: str, ours: str, theirs: str) -> dict[str, Any]:
    """Settings with one of them under another name, and under no other."""
    data = minimal(policy={"name": "fixed"}, replicas={"max": 4})
    data.setdefault(section, {}).pop(ours, None)
    data[section][theirs] = VALUES[ours]
    return data


@pytest.mark.parametrize(("section", "ours", "theirs"), PLACES)
def test_names_of_ray_and_vllm_are_read(section: str, ours: str, theirs: str) -> None:
    parsed = parse_settings(foreign(section, ours, theirs))
    assert getattr(getattr(parsed, section), ours) == VALUES[ours]


@pytest.mark.parametrize(("section", "ours", "theirs"), PLACES)
def test_both_names_of_a_setting_are_an_error_that_names_both(
    section: str, ours: str, theirs: str
) -> None:
    data = foreign(section, ours, theirs)
    data[section][ours] = VALUES[ours]
    assert problems_of(data) == [
        f"a.yaml: {section}.{ours}: is {theirs} by another name, and both are given; "
        "remove one"
    ]


def test_every_name_in_the_table_is_of_a_setting() -> None:
    assert {ours for _, ours, _ in PLACES} == FOREIGN_NAMES.keys() == VALUES.keys()


def test_what_replaces_a_setting_may_have_another_name() -> None:
    data = minimal(replicas={"max": 3}, http={"fronts": {"max_replicas": 3}})
    overrides = {"replicas.max_replicas": 5, "http.fronts.max": 4}
    parsed = parse_settings(data, overrides=overrides)
    assert (parsed.replicas.max, parsed.http.fronts.max) == (5, 4)


def test_an_unknown_setting_is_looked_for_in_other_sections_and_languages() -> None:
    (elsewhere,) = problems_of(minimal(replicas={"max_num_seqs": 4}))
    assert elsewhere.endswith("unknown setting; did you mean engine.max_num_seqs?")
    (misspelt,) = problems_of(minimal(replicas={"max_replica": 4}))
    assert misspelt.endswith("unknown setting; did you mean max_replicas?")


@given(num_bytes=strategies.integers(0, 1 << 60))
def test_a_size_shown_is_the_size_read(num_bytes: int) -> None:
    assert int(read_size(show_size(num_bytes))) == num_bytes


@given(
    count=strategies.integers(1, 999),
    unit=strategies.sampled_from(
        [
            ("Mi", 1 << 20),
            ("Gi", 1 << 30),
            ("G", 10**9),
            ("MB", 10**6),
            (" GiB", 1 << 30),
        ]
    ),
)
def test_sizes_are_read_with_their_unit(count: int, unit: tuple[str, int]) -> None:
    assert read_size(f"{count}{unit[0]}") == count * unit[1]


@given(text=strategies.text(string.printable, max_size=8))
def test_any_text_is_a_size_or_an_error_that_shows_one(text: str) -> None:
    try:
        size, problem = read_size(text), "512Mi"
    except ValueError as error:
        size, problem = 0, str(error)
    assert size >= 0
    assert "512Mi" in problem


def test_sizes_are_accepted_wherever_bytes_are_set() -> None:
    parsed = parse_settings(
        minimal(
            engine={"kv_cache_memory_bytes": "1.5Gi"}, http={"max_body_bytes": "2M"}
        )
    )
    assert parsed.engine.kv_cache_memory_bytes == 3 << 29
    assert type(parsed.engine.kv_cache_memory_bytes) is int
    assert parsed.http.max_body_bytes == 2_000_000
    (problem,) = problems_of(minimal(engine={"kv_cache_memory_bytes": "2 apples"}))
    assert problem == (
        "a.yaml: engine.kv_cache_memory_bytes: must be bytes, or a size such as "
        "512Mi, 4Gi or 1G (got '2 apples')"
    )
    (problem,) = problems_of(minimal(engine={"kv_cache_memory_bytes": "5k"}))
    assert "engine.kv_cache_memory_bytes: must be ≥ 1048576 (got 5k)" in problem


@pytest.mark.parametrize(
    ("policy", "lengths", "told"),
    [
        (
            {"name": "goodput", "draft_tokens": 5},
            (3, 5),
            "warning: policy.draft_tokens: is a fixed length; for goodput write "
            "max_draft_tokens: 5",
        ),
        (
            {"name": "dynamic", "num_speculative_tokens": 5},
            (3, 5),
            "warning: policy.draft_tokens: is a fixed length; for dynamic write "
            "max_draft_tokens: 5",
        ),
        (
            {"name": "tetris", "draft_tokens": 2, "extra_draft_tokens": 2},
            (2, 4),
            "warning: policy.extra_draft_tokens: is an old name; write "
            "max_draft_tokens: 4",
        ),
        (
            {"name": "tetris", "extra_draft_tokens": 1},
            (3, 4),
            "warning: policy.extra_draft_tokens: is an old name; write "
            "max_draft_tokens: 4",
        ),
        (
            {"name": "goodput", "draft_tokens": 2, "max_draft_tokens": 6},
            (3, 6),
            "note: policy.draft_tokens: has no use for goodput, which goes by "
            "policy.max_draft_tokens (6)",
        ),
    ],
)
def test_old_names_of_draft_lengths_are_read_and_told(
    policy: dict[str, Any], lengths: tuple[int, int], told: str
) -> None:
    parsed = parse_settings(minimal(policy=policy)).policy
    assert (parsed.draft_tokens, parsed.max_draft_tokens) == lengths
    assert findings_of(minimal(policy=policy)) == [told]


def test_an_old_name_beside_its_new_form_is_an_error() -> None:
    policy = {"name": "tetris", "max_draft_tokens": 4, "extra_draft_tokens": 2}
    assert problems_of(minimal(policy=policy)) == [
        "a.yaml: policy.extra_draft_tokens: is given beside max_draft_tokens, its new "
        "form; remove it"
    ]


def test_an_old_name_replaces_the_new_one_of_a_file() -> None:
    data = minimal(policy={"name": "tetris", "max_draft_tokens": 8})
    parsed = parse_settings(data, overrides={"policy.extra_draft_tokens": 1})
    assert parsed.policy.max_draft_tokens == 4


def test_two_names_of_a_length_are_refused_beside_a_third() -> None:
    policy = {"draft_tokens": 2, "num_speculative_tokens": 2, "max_draft_tokens": 6}
    (problem,) = problems_of(minimal(policy=policy))
    assert "policy.draft_tokens: is num_speculative_tokens by another name" in problem


@pytest.mark.parametrize("word", ["x", [], {}])
def test_an_old_length_that_is_no_number_is_named(word: Any) -> None:
    (problem,) = problems_of(
        minimal(policy={"name": "tetris", "extra_draft_tokens": word})
    )
    assert "policy.extra_draft_tokens: must be a number" in problem


def test_where_no_policy_is_named_it_is_goodput_with_room_to_draft() -> None:
    policy = parse_settings(minimal()).policy
    assert (policy.name, policy.num_speculative_tokens) == ("goodput", 8)
    assert findings_of(minimal()) == []


def test_on_a_gpu_it_is_fixed_with_a_line_that_says_why() -> None:
    data = minimal(engine={"device": "gpu"}, replicas={"num_gpus": 1})
    policy = parse_settings(data).policy
    assert (policy.name, policy.num_speculative_tokens) == ("fixed", 3)
    (told,) = findings_of(data)
    assert told.startswith("note: policy.name: fixed: plain vLLM, for goodput has not")
    data["policy"] = {"name": "goodput"}
    assert parse_settings(data).policy.name == "goodput"
    assert findings_of(data) == []


def test_without_a_drafter_it_is_none() -> None:
    data = minimal(model={"draft": None})
    assert parse_settings(data).policy.name == "none"
    assert findings_of(data) == [
        "note: policy.name: none: there is no drafter; name one as model.draft"
    ]


@pytest.mark.parametrize("policy", [None, [], "goodput", 3])
def test_a_policy_that_is_no_section_is_left_to_the_check(policy: Any) -> None:
    (problem,) = problems_of(minimal() | {"policy": policy})
    assert problem.startswith("a.yaml: policy: ")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_a_deployment_written_down_is_the_same_deployment(
    file: Path, tmp_path: Path
) -> None:
    written = tmp_path / "written.yaml"
    written.write_text(dump_settings(load_settings(file)), "utf-8")
    assert load_settings(written) == load_settings(file)


@settings(max_examples=200, deadline=None)
@given(
    policy=strategies.fixed_dictionaries(
        {},
        optional={
            "name": strategies.sampled_from(["none", "fixed", "tetris", "goodput"]),
            "draft_tokens": strategies.integers(-1, 40),
            "num_speculative_tokens": strategies.integers(-1, 40),
            "max_draft_tokens": strategies.integers(-1, 70),
            "extra_draft_tokens": strategies.integers(-1, 40) | strategies.text(),
            "latency_target_ms": strategies.floats(),
        },
    ),
    cache=strategies.integers() | strategies.text(max_size=6),
)
def test_any_file_is_read_alike_once_written_down_or_refused_in_words(
    policy: dict[str, Any], cache: Any
) -> None:
    data = minimal(policy=policy, engine={"kv_cache_memory_bytes": cache})
    problems: list[str] = []
    try:
        parsed = parse_settings(data, "a.yaml")
    except SettingsError as error:
        problems = error.problems
    assert all(problem.startswith("a.yaml: ") for problem in problems)
    if problems:
        return
    again = parse_settings(yaml.safe_load(dump_settings(parsed)))
    assert again.model_dump() == parsed.model_dump()
    assert [one for one in again.findings if one.severity == "warning"] == []


def test_the_only_front_may_still_be_named_and_is_told_to_be_the_only_one() -> None:
    assert findings_of(minimal(http={"front": "fleet", "port": 81})) == [
        "warning: http.front: fleet is all there is; remove the setting"
    ]
    assert parse_settings(minimal(http={"front": "fleet", "port": 81})).http.port == 81


def test_the_front_that_went_is_an_error() -> None:
    assert problems_of(minimal(http={"front": "ray"})) == [
        "a.yaml: http.front: ray is gone, and fronts answer all requests; remove the "
        "setting"
    ]
