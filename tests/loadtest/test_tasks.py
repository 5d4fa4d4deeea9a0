"""The demo pair's tasks: what they draw, what they accept, what training sees."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from loadtest.models.tasks import (
    TASKS,
    draw,
    generate_chat,
    is_held_out,
    parse_call,
)

each_task = pytest.mark.parametrize(
    "task", [pytest.param(task, id=name) for name, task in TASKS.items()]
)


@each_task
def test_equal_seeds_draw_equal_exchanges_and_training_sees_no_held_out_one(task):
    drawn, again = (draw(task, random.Random(7)) for _ in range(2))
    rng = random.Random(0)
    seen = {draw(task, rng).prompt for _ in range(300)}
    held_out = {draw(task, rng, held_out=True).prompt for _ in range(30)}

    assert drawn.messages == again.messages
    assert not seen & held_out
    assert all(map(is_held_out, held_out))
    assert len(held_out) >= 5


@each_task
def test_checkers_accept_the_reference_answer_and_reject_others(task):
    rng = random.Random(0)
    for _ in range(50):
        drawn = draw(task, rng)
        assert drawn.accepts(drawn.answer), drawn.prompt
        assert drawn.accepts(f"{drawn.answer}\n"), "outer white space does not matter"

    drawn = draw(task, random.Random(0))
    for wrong in ("", drawn.answer[: len(drawn.answer) // 2]):
        assert not drawn.accepts(wrong)
    assert not task.one_right_answer or not drawn.accepts("#" + drawn.answer[1:])


def test_chats_depend_on_their_seed_and_call_tools_only_where_they_list_them():
    tasks = tuple(TASKS.values())
    one, same, other = (generate_chat(tasks, random.Random(n)) for n in (1, 1, 2))
    assert one.messages == same.messages != other.messages
    rng = random.Random(0)
    for _ in range(200):
        chat = generate_chat(tasks, rng)
        assert chat.with_tools or "<tool_call>" not in str(chat.messages)


def test_every_difficulty_has_tasks_with_long_replies():
    for difficulty in ("easy", "mixed", "hard"):
        tasks = [task for task in TASKS.values() if task.difficulty == difficulty]
        rng = random.Random(0)
        longest = max(len(draw(t, rng).answer) for t in tasks for _ in range(20))
        assert longest > 150, difficulty


@pytest.mark.parametrize(
    "reply", ["", "no call", "<tool_call>\n{broken\n</tool_call>", '{"name": "x"}']
)
def test_text_without_a_valid_tool_call_parses_to_none(reply):
    assert parse_call(reply) is None


def test_training_texts_are_those_that_the_shipped_pair_has_learnt():
    tasks = tuple(TASKS.values())
    chats = [generate_chat(tasks, random.Random(n)).messages for n in range(200)]
    digest = hashlib.sha256(json.dumps(chats).encode()).hexdigest()
    assert digest.startswith("89bf4fc6dc34db53")
