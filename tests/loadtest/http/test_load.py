"""Shapes, arrivals and workloads."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

import loadtest
from loadtest.client.errors import LoadTestError
from loadtest.compare.chaos import ServerAction, parse_chaos
from loadtest.load.arrivals import arrival_times, parse_load
from loadtest.load.client_chaos import ActionQueue, parse_client_actions
from loadtest.load.workloads import (
    GENERATED,
    make_workload,
    read_conversations,
)


@pytest.mark.parametrize(
    "name",
    [
        "closed:8",
        "closed:ramp:1-32",
        "closed:ladder:4-16x4",
        "poisson:2.5",
        "paced:spike:1-6",
        "gamma=3:diurnal:1-8x2",
    ],
)
def test_a_load_reads_back_from_its_name(name):
    assert parse_load(name).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("closed", "PROCESS:SHAPE"),
        ("closed:2.5", "whole numbers"),
        ("poisson=2:3", "only gamma"),
        ("gamma=20:3", r"\(0, 10\]"),
        ("poisson:0", "above 0"),
        ("poisson:hill:1-2", "PROCESS:SHAPE"),
        ("closed:spike:1-2x3", "only ladder and diurnal"),
        ("closed:ladder:1-4x1", "at least 2 steps"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_with_what_would(text, message):
    with pytest.raises(ValueError, match=message):
        parse_load(text)


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("closed:8", [8, 8, 8, 8, 8]),
        ("closed:ramp:0-8", [0, 2, 4, 6, 8]),
        ("closed:ladder:1-4x4", [1, 2, 3, 4, 4]),
        ("closed:spike:2-32", [2, 2, 32, 2, 2]),
        ("closed:diurnal:2-10", [2, 6, 10, 6, 2]),
        ("closed:diurnal:2-10x2", [2, 10, 2, 10, 2]),
    ],
)
def test_requests_in_flight_follow_the_shape(name, levels):
    load = parse_load(name)
    assert [load.users_at(part / 4) for part in range(5)] == levels


@pytest.mark.parametrize(
    ("name", "cv"), [("paced:5", 0), ("poisson:5", 1), ("gamma=2:5", 2)]
)
def test_arrivals_come_and_vary_as_the_process_says(name, cv):
    load = parse_load(name)
    times = arrival_times(load, 4000, "seed")
    assert times == arrival_times(load, 4000, "seed") == sorted(times)
    assert (times != arrival_times(load, 4000, "other")) is (cv > 0)
    assert 0 <= times[0] < times[-1] < 4000
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(
        cv, abs=0.01 + 0.08 * cv
    )


def test_arrivals_follow_the_shape_at_every_moment():
    times = list(arrival_times(parse_load("paced:spike:1-10"), 100, "seed"))
    during = [time for time in times if 40 <= time < 60]
    assert len(times) == pytest.approx(80 + 200, abs=2)
    assert len(during) == pytest.approx(200, abs=2)


# Workloads


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_workload_depends_on_its_seed_and_number_alone(name):
    one, same, other = (make_workload(name, seed) for seed in ("1", "1", "2"))
    assert one.conversation(7) == same.conversation(7)
    assert one.conversation(7) != one.conversation(8)
    assert one.conversation(7) != other.conversation(7)


def test_every_request_of_a_chat_continues_the_one_before():
    workload = make_workload("chats", "seed")
    for number in range(20):
        prompts = list(workload.conversation(number).prompts())
        assert len(prompts) >= 2
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            assert after[len(before)]["role"] == "assistant"
        assert prompts[-1][-1]["role"] == "user"


def test_chats_share_a_few_long_prefixes():
    workload = make_workload("chats", "seed")
    begins = {str(workload.conversation(n).messages[:3]) for n in range(60)}
    assert len(begins) == 4
    assert all(len(begin) > 50 for begin in begins)


@pytest.mark.parametrize(
    ("name", "fewest", "most"), [("long-context", 1, 2), ("chats", 2, 4)]
)
def test_what_was_answered_long_ago_is_not_asked_again(name, fewest, most):
    workload = make_workload(name, "seed")
    for number in range(20):
        prompts = list(workload.conversation(number).prompts())
        assert fewest <= len(prompts) <= most
        shortest = min(sum(len(m["content"]) for m in p) for p in prompts)
        assert shortest >= {"long-context": 1500, "chats": 500}[name]


@pytest.mark.parametrize("name", ["chats", "long-context"])
def test_the_longest_prompts_fit_the_demo_model(name):
    from transformers import AutoTokenizer

    model = Path(loadtest.__file__).resolve().parents[1] / "configs/models/demo-target"
    tokenizer = AutoTokenizer.from_pretrained(model)
    workload = make_workload(name, "seed")
    chats = [list(workload.conversation(n).messages) for n in range(500)]
    chats.sort(key=lambda chat: sum(len(m["content"]) for m in chat))
    prompts = tokenizer.apply_chat_template(chats[-50:], add_generation_prompt=True)
    assert max(map(len, prompts["input_ids"])) < 1024


def test_long_contexts_are_long():
    lengths = {
        name: statistics.fmean(
            sum(len(str(m["content"])) for m in c.messages)
            for c in map(make_workload(name, "seed").conversation, range(20))
        )
        for name in ("mixed", "long-context")
    }
    assert lengths["long-context"] > 1500 > lengths["mixed"]


SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "begins in the middle"},
            {"from": "human", "value": "one"},
            {"from": "gpt", "value": "two"},
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
EXPECTED = [["one"], ["one", "two", "three"], ["s", "u"], ["plain"]]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
def test_prompts_come_from_files_of_the_user(tmp_path: Path, suffix: str):
    path = tmp_path / f"prompts.{suffix}"
    path.write_text(
        {
            "json": json.dumps(SHAREGPT),
            "jsonl": "\n\n".join(map(json.dumps, SHAREGPT)),
            "txt": "first\n\n second \n",
        }[suffix]
    )
    prompts = [
        [message["content"] for message in prompt]
        for conversation in read_conversations(path)
        for prompt in conversation.prompts()
    ]
    assert prompts == ([["first"], ["second"]] if suffix == "txt" else EXPECTED)


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
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, name: str, text: str, message: str
):
    (tmp_path / name).write_text(text)
    with pytest.raises(LoadTestError, match=message):
        make_workload(str(tmp_path / name), "seed")


def test_every_assistant_of_sharegpt_is_one(tmp_path: Path):
    names = [
        "human",
        "gpt",
        "human",
        "chatgpt",
        "human",
        "bing",
        "human",
        "bard",
        "user",
    ]
    turns = [{"from": name, "value": "text"} for name in names]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": turns}]))
    [conversation] = read_conversations(path)
    expected = [*("user", "assistant") * 4, "user"]
    assert [m["role"] for m in conversation.messages] == expected
    # A workload that is neither a file nor known is told from those there are.
    with pytest.raises(LoadTestError, match="easy, hard, mixed, long-context, chats"):
        make_workload("mixd", "seed")


def test_a_file_is_gone_through_whole_before_anything_comes_again(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join("abcdefgh"))
    workload = make_workload(str(path), "seed")
    laps = [
        [workload.conversation(n).messages[0]["content"] for n in range(lap, lap + 8)]
        for lap in (0, 8)
    ]
    assert sorted(laps[0]) == sorted(laps[1]) == list("abcdefgh")
    assert laps[0] != laps[1]


def test_long_conversations_of_a_file_can_be_left_out(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("short\n" + "long " * 50)
    workload = make_workload(str(path), "seed", max_chars=20)
    contents = {workload.conversation(n).messages[0]["content"] for n in range(5)}
    assert contents == {"short"}
    with pytest.raises(LoadTestError, match="--max-prompt-chars"):
        make_workload(str(path), "seed", max_chars=2)


# Chaos


def test_client_actions_befall_the_next_requests_after_their_moment():
    queue = ActionQueue(parse_client_actions("stall@0.2x2=3,drop@0.5"))
    chosen = [queue.next(part) for part in (0.1, 0.2, 0.3, 0.4, 0.6, 0.7)]
    assert [action and action.misbehaviour.name for action in chosen] == [
        *(None, "stall", "stall", None, "drop", None)
    ]
    assert chosen[1] is not None
    assert chosen[1].misbehaviour.stall_s == 3


def test_chaos_is_split_into_what_befalls_server_and_clients():
    server, clients = parse_chaos("redeploy@0.7, drop@0.5x2,kill-engine@0.3")
    assert server == (ServerAction("kill-engine", 0.3), ServerAction("redeploy", 0.7))
    assert clients == "drop@0.5x2"


@pytest.mark.parametrize("text", ["kill@0.5", "stall@2", "kill-engine@1.5", "burn@0.1"])
def test_chaos_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"part of the run"):
        parse_chaos(text)
