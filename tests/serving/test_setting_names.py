"""Other people's names, sizes, old names, and what is chosen where nothing is said."""

import re
import string
from typing import Any

import pytest
import yaml
from generated import find_outdated
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.settings.model import (
    Settings,
    SettingsError,
    dump_settings,
    parse_settings,
)
from serving.settings.names import FOREIGN_NAMES
from serving.settings.sizes import read_size, show_size
from tests.serving.test_settings import minimal, pairs, problems_of, written

PLACES = [
    (section, ours, theirs)
    for section, field in Settings.model_fields.items()
    for ours in getattr(field.annotation, "model_fields", {})
    for theirs in FOREIGN_NAMES.get(ours, {})
]


def findings_of(data: dict[str, Any]) -> list[str]:
    return [f"{one.severity}: {one}" for one in parse_settings(data).findings]


@pytest.mark.parametrize(("section", "ours", "theirs"), PLACES)
def test_names_of_ray_and_vllm_are_read_but_not_beside_ours(section, ours, theirs):
    data = minimal(policy={"name": "fixed"})
    plain = parse_settings(data)
    value = getattr(getattr(plain, section), ours)
    data.setdefault(section, {}).pop(ours, None)
    data[section][theirs] = value
    # An unknown name would be refused.
    assert parse_settings(data).model_dump() == plain.model_dump()

    data[section][ours] = value
    assert problems_of(data) == [
        f"a.yaml: {section}.{ours}: is {theirs} by another name, and both are given; "
        "remove one"
    ]


def test_the_reference_and_the_chart_are_those_of_these_settings():
    assert not [str(file) for file, _ in find_outdated()]
    assert {ours for _, ours, _ in PLACES} == FOREIGN_NAMES.keys()


@given(num_bytes=st.integers(0, 1 << 60), text=st.text(string.printable, max_size=8))
def test_a_size_shown_is_the_size_read_and_any_text_is_one_or_refused(num_bytes, text):
    assert int(read_size(show_size(num_bytes))) == num_bytes
    size, problem = 0, "512Mi"
    try:
        size = read_size(text)
    except ValueError as error:
        problem = str(error)
    assert size >= 0
    assert "512Mi" in problem


def test_sizes_are_read_with_their_unit_wherever_bytes_are_set():
    units = {"Mi": 1 << 20, "Gi": 1 << 30, "G": 10**9, "MB": 10**6, " GiB": 1 << 30}
    assert {unit: read_size(f"7{unit}") / 7 for unit in units} == units
    sizes = {"engine.kv_cache_memory_bytes": "1.5Gi", "http.max_body_bytes": "2M"}
    parsed = parse_settings(minimal(), overrides=sizes)
    assert parsed.engine.kv_cache_memory_bytes == 3 << 29
    assert type(parsed.engine.kv_cache_memory_bytes) is int
    assert parsed.http.max_body_bytes == 2_000_000
    for text, reason in (
        ("2 apples", "bytes, or a size such as 512Mi, 4Gi or 1G (got '2 apples')"),
        ("5k", "≥ 1048576 (got 5k)"),
    ):
        (problem,) = problems_of(minimal(engine={"kv_cache_memory_bytes": text}))
        where = "a.yaml: engine.kv_cache_memory_bytes: must be "
        assert problem.startswith(where + reason)


FIXED = (
    "warning: policy.draft_tokens: is a fixed length; for goodput write "
    "max_draft_tokens"
)
OLD = "warning: policy.extra_draft_tokens: is an old name; write max_draft_tokens: 4"


def test_what_would_do_nothing_is_told():
    data = minimal(engine={"max_num_seqs": 100}, policy={"name": "fixed"})
    told = (
        "warning: replicas.max_ongoing_requests: lets 64 requests to an engine of 100 "
        "seats (engine.max_num_seqs); set it to 200"
    )
    assert findings_of(data) == [told]
    data = minimal(policy={"name": "fixed", "max_draft_tokens": 8})
    told = (
        "warning: policy.max_draft_tokens: has no use for fixed, which drafts "
        "policy.draft_tokens; write that"
    )
    assert findings_of(data) == [told]


@pytest.mark.parametrize(
    ("policy", "lengths", "told"),
    [
        ("name=goodput draft_tokens=5", (3, 5), f"{FIXED}: 5"),
        ("name=goodput num_speculative_tokens=5", (3, 5), f"{FIXED}: 5"),
        ("name=tetris draft_tokens=2 extra_draft_tokens=2", (2, 4), OLD),
        ("name=tetris extra_draft_tokens=1", (3, 4), OLD),
        (
            "name=goodput draft_tokens=2 max_draft_tokens=6",
            (3, 6),
            "note: policy.draft_tokens: has no use for goodput, which goes by "
            "policy.max_draft_tokens (6)",
        ),
    ],
)
def test_old_names_of_draft_lengths_are_read_and_told(policy, lengths, told):
    data = minimal(policy=written(policy))
    parsed = parse_settings(data).policy
    assert (parsed.draft_tokens, parsed.max_draft_tokens) == lengths
    assert findings_of(data) == [told]


@pytest.mark.parametrize(
    ("policy", "problem"),
    pairs(
        "max_draft_tokens=4 extra_draft_tokens=2 -> "
        "extra_draft_tokens: is given beside max_draft_tokens, its new form; rem",
        "draft_tokens=2 num_speculative_tokens=2 max_draft_tokens=6 -> "
        "draft_tokens: is num_speculative_tokens by another name",
        "extra_draft_tokens=x -> extra_draft_tokens: must be a number",
        "extra_draft_tokens=[] -> extra_draft_tokens: must be a number",
    ),
)
def test_two_names_of_a_length_or_none_of_a_number_are_refused(policy, problem):
    (found,) = problems_of(minimal(policy=written(f"name=tetris {policy}")))
    assert found.startswith(f"a.yaml: policy.{problem}")


def test_what_replaces_a_setting_may_have_another_name():
    data = minimal(
        policy={"name": "tetris", "max_draft_tokens": 8},
        replicas={"max": 3},
        http={"fronts": {"max_replicas": 3}},
    )
    given = "replicas.max_replicas=5 http.fronts.max=4 policy.extra_draft_tokens=1"
    parsed = parse_settings(data, overrides=written(given))
    assert (parsed.replicas.max, parsed.http.fronts.max) == (5, 4)
    assert parsed.policy.max_draft_tokens == 4


ON_GPU = "engine.device=gpu replicas.num_gpus=1"


@pytest.mark.parametrize(
    ("settings", "policy", "told"),
    [
        ("", ("goodput", 8), "$"),
        (ON_GPU, ("fixed", 3), "note: policy.name: fixed: plain vLLM, for goodput has"),
        (f"{ON_GPU} policy.name=goodput", ("goodput", 8), "$"),
        ("model.draft=null", ("none", 0), "note: .*: there is no drafter; name one as"),
    ],
)
def test_where_no_policy_is_named_it_is_the_one_that_fits_and_says_why(
    settings, policy, told
):
    parsed = parse_settings(minimal(), overrides=written(settings))
    assert (parsed.policy.name, parsed.policy.num_speculative_tokens) == policy
    assert re.match(told, "".join(f"{one.severity}: {one}" for one in parsed.findings))


@settings(max_examples=200)
@example(policy={"name": "fixed", "max_draft_tokens": 3}, cache=2**28)
@given(
    policy=st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["none", "fixed", "tetris", "goodput"]),
            "draft_tokens": st.integers(-1, 40),
            "num_speculative_tokens": st.integers(-1, 40),
            "max_draft_tokens": st.integers(-1, 70),
            "extra_draft_tokens": st.integers(-1, 40) | st.text(),
            "latency_target_ms": st.floats(),
        },
    ),
    cache=st.integers() | st.text(max_size=6),
)
def test_any_file_is_read_alike_once_written_down_or_refused_in_words(policy, cache):
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
    # What is idle under `fixed` is said however it is written; old names are not.
    warnings = [one for one in again.findings if one.severity == "warning"]
    assert all("has no use for fixed" in str(one) for one in warnings)


def test_a_front_may_still_be_named_if_it_is_the_only_one_there_is():
    data = minimal(http={"front": "fleet", "port": 81})
    assert parse_settings(data).http.port == 81
    (told,) = findings_of(data)
    assert told == "warning: http.front: fleet is all there is; remove the setting"
    (problem,) = problems_of(minimal(http={"front": "ray"}))
    assert problem.startswith("a.yaml: http.front: ray is gone, and fronts answer all")
