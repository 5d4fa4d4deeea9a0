"""The demo pair's tasks: what they draw, and what training sees."""

import hashlib
import json
import random

import pytest

from loadtest.models.tasks import (
    TASKS,
    TRAINING_TASKS,
    draw,
    generate_chat,
    is_held_out,
)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_equal_seeds_draw_equal_exchanges_and_training_sees_no_held_out_one(task):
    drawn, again = (draw(task, random.Random(7)) for _ in range(2))
    rng = random.Random(0)
    seen = {draw(task, rng).prompt for _ in range(300)}
    held_out = {draw(task, rng, held_out=True).prompt for _ in range(30)}

    assert drawn.messages == again.messages
    assert not seen & held_out
    assert all(map(is_held_out, held_out))
    assert len(held_out) >= 5


def test_chats_depend_on_their_seed_and_call_tools_only_where_they_list_them():
    tasks = tuple(TASKS.values())
    one, same, other = (generate_chat(tasks, random.Random(n)) for n in (1, 1, 2))
    assert one.messages == same.messages != other.messages
    rng = random.Random(0)
    for _ in range(200):
        chat = generate_chat(tasks, rng)
        assert chat.with_tools or "<tool_call>" not in str(chat.messages)


def test_training_texts_are_those_that_the_shipped_pair_has_learnt():
    rngs = map(random.Random, range(200))
    chats = [generate_chat(TRAINING_TASKS, rng).messages for rng in rngs]
    digest = hashlib.sha256(json.dumps(chats).encode()).hexdigest()
    assert digest.startswith("6eadeb6fa32dc2b1")
