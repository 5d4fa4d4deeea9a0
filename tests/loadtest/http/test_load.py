"""Shapes, arrivals and workloads: what is sent when."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import loadtest
from loadtest.errors import LoadTestError
from loadtest.load.arrivals import arrival_times, parse_load
from loadtest.load.options import LoadOptions
from loadtest.load.workloads import GENERATED, make_workload, read_conversations


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("closed:8", [8, 8, 8, 8, 8]),
        ("closed:ramp:0-8", [0, 2, 4, 6, 8]),
        ("closed:spike:2-32", [2, 2, 32, 2, 2]),
        ("closed:diurnal:2-10", [2, 6, 10, 6, 2]),
    ],
)
def test_requests_in_flight_follow_the_shape(name, levels):
    load = parse_load(name)
    assert load.name == name
    assert [load.users_at(part / 4) for part in range(5)] == levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("closed", "PROCESS:SHAPE"),
        ("closed:2.5", "whole numbers"),
        ("poisson=2:3", "PROCESS:SHAPE"),
        ("gamma=20:3", r"\(0, 10\]"),
        ("poisson:0", "above 0"),
        ("poisson:hill:1-2", "PROCESS:SHAPE"),
        ("closed:1-2", "PROCESS:SHAPE"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_with_what_would(text, message):
    with pytest.raises(ValueError, match=message):
        parse_load(text)


@pytest.mark.parametrize(
    ("name", "cv"), [("paced:5", 0), ("poisson:5", 1), ("gamma:5", 2), ("gamma=3:5", 3)]
)
def test_arrivals_come_and_vary_as_the_process_says(name, cv):
    load = parse_load(name)
    times = arrival_times(load, 4000, "seed")
    assert times == arrival_times(load, 4000, "seed") == sorted(times)
    assert (times != arrival_times(load, 4000, "other")) is (cv > 0)
    assert 0 <= times[0] < times[-1] < 4000
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) / mean == pytest.approx(cv, abs=0.01 + 0.1 * cv)


def test_arrivals_follow_the_shape_at_every_moment():
    times = arrival_times(parse_load("paced:spike:1-10"), 100, "seed")
    during = [time for time in times if 40 <= time < 60]
    assert len(times) == pytest.approx(80 + 200, abs=2)
    assert len(during) == pytest.approx(200, abs=2)


def num_chars(messages: list[dict[str, Any]]) -> int:
    return sum(len(str(message["content"])) for message in messages)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_workload_depends_on_its_seed_and_number_alone(name):
    one, same, other = (make_workload(name, seed) for seed in ("1", "1", "2"))
    assert one.conversation(7) == same.conversation(7)
    assert one.conversation(7) not in (one.conversation(8), other.conversation(7))


@pytest.mark.parametrize(
    ("name", "fewest", "most", "shortest"),
    [("long-context", 1, 2, 1500), ("chats", 2, 4, 500)],
)
def test_chats_go_on_behind_shared_turns_and_fit_the_demo_model(
    name, fewest, most, shortest
):
    from transformers import AutoTokenizer

    workload = make_workload(name, "seed")
    chats = [workload.conversation(number) for number in range(500)]
    for chat in chats[:20]:
        # What was answered long ago is not asked again.
        prompts = list(chat.prompts())
        assert fewest <= len(prompts) <= most
        assert min(map(num_chars, prompts)) >= shortest
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            assert after[len(before)]["role"] == "assistant"
        assert prompts[-1][-1]["role"] == "user"
    if name == "chats":
        assert len({str(chat.messages[:3]) for chat in chats[:60]}) == 4
    model = Path(loadtest.__file__).resolve().parents[1] / "configs/models/demo-target"
    tokenizer = AutoTokenizer.from_pretrained(model)
    longest = sorted((list(chat.messages) for chat in chats), key=num_chars)[-50:]
    asked = tokenizer.apply_chat_template(longest, add_generation_prompt=True)
    assert max(map(len, asked["input_ids"])) < 1024


SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "begins in the middle"},
            {"from": "human", "value": "one"},
            {"from": "bing", "value": "two"},
            {"from": "human", "value": "three"},
        ],
    },
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
        ]
    },
    {"prompt": "plain"},
]
TEXTS = [["one"], ["one", "two", "three"], ["s", "u"], ["plain"]]


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        ("json", json.dumps(SHAREGPT), TEXTS),
        ("jsonl", "\n\n".join(map(json.dumps, SHAREGPT)), TEXTS),
        ("txt", "first\n\n second \n", [["first"], ["second"]]),
    ],
)
def test_prompts_come_from_files_of_the_user(tmp_path, suffix, text, expected):
    path = tmp_path / f"prompts.{suffix}"
    path.write_text(text)
    prompts = [
        [message["content"] for message in prompt]
        for conversation in read_conversations(path)
        for prompt in conversation.prompts()
    ]
    assert prompts == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "{}", "must hold a list"),
        ("a.jsonl", '{"prompt": "a"}\n{"pro', "line 2: is not JSON"),
        ("a.jsonl", '{"question": "a"}', "line 1: must have `conversations`"),
        ("a.json", '[{"messages": [{"role": "user"}]}]', "entry 0, turn 0: must have"),
        ("a.json", '[{"conversations": ["hello"]}]', "entry 0, turn 0: must be an"),
        (
            "a.json",
            '["a", {"conversations": [{"from": "human", "value": "a"}, '
            '{"from": "observation", "value": "b"}]}]',
            "entry 1, turn 1: 'observation' is no role; there are .*human.*bard",
        ),
        ("a.txt", "\n", "holds no prompt"),
        ("mixd", None, "easy, hard, mixed, long-context, chats"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(
    tmp_path, name, text, message
):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LoadTestError, match=message):
        make_workload(str(tmp_path / name), "seed")


def test_a_file_is_gone_through_whole_before_anything_comes_again(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(["abcdefgh" * 5, *"abcdefgh"]))
    workload = make_workload(str(path), "seed", max_chars=20)
    first, second = (
        [workload.conversation(n).messages[0]["content"] for n in range(lap, lap + 8)]
        for lap in (0, 8)
    )
    assert sorted(first) == sorted(second) == list("abcdefgh")
    assert first != second
    with pytest.raises(LoadTestError, match="--max-prompt-chars"):
        make_workload(str(path), "seed", max_chars=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_body": '{"n": 2}'}, r"n must be 1 \(got 2\)"),
        ({"extra_body": "[]"}, "JSON object"),
        ({"header": "secret"}, "NAME: VALUE"),
        *(
            ({"host": host}, "must be an address")
            for host in ("127.0.0.1:8000", "ftp://host", "http://")
        ),
        ({"duration": 0.0}, "above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    LoadOptions("http://x", extra_body='{"n": 1}').check()
    with pytest.raises(LoadTestError, match=message):
        LoadOptions(**({"host": "http://x"} | changes)).check()
