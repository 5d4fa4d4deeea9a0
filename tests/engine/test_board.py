"""What the board's recorder takes down, and that it costs nothing unwatched."""

from types import SimpleNamespace

import numpy as np
import pytest

from serving.engine.shared.board import MAX_REQUESTS, MAX_ROWS, WATCH_S, BoardRecorder


@pytest.fixture
def clock():
    """A clock that the test moves."""
    return SimpleNamespace(now_s=100.0)


@pytest.fixture
def board(clock):
    return BoardRecorder(lambda: clock.now_s)


def record_step(board, clock):
    board.start_step()
    confidence = np.array([[0.9, 0.5, 0.4], [0.25, 0.0, 0.0]])
    board.note_drafts({"x": (5, 6, 7), "y": (8,)}, confidence, [2, 0])
    clock.now_s += 0.01
    emitted = [("x", 1, 2), ("y", 0, 1), ("z", 0, 1)]
    board.note_outcome(emitted, budget=2, depth=3, running=["x", "y", "z"], waiting=4)


def test_a_step_tells_what_became_of_every_draft(board, clock):
    board.watch(0, with_ids=True)
    record_step(board, clock)
    seen = board.watch(0, with_ids=True)

    (step,) = seen["steps"]
    x, y, z = step["requests"]
    counted = {"drafted": 3, "admitted": 2, "accepted": 1, "emitted": 2}
    known = {**counted, "survival": [0.9, 0.45, 0.18], "draft_ids": [5, 6, 7]}
    assert x.items() >= known.items()
    assert (y["drafted"], y["admitted"], y["survival"]) == (1, 0, [0.25])
    assert (z["drafted"], z["survival"], z["emitted"]) == (0, [], 1)
    assert len({x["number"], y["number"], z["number"]}) == 3
    known = {"budget": 2, "depth": 3, "running": 3, "waiting": 4, "step_ms": 10.0}
    assert step.items() >= known.items()
    assert seen["totals"]["emitted"] == 4
    assert board.watch(step["step"])["steps"] == []


def test_recording_ends_when_nobody_looks_and_begins_anew(board, clock):
    assert not board.is_watched
    board.watch(0)
    for step in range(MAX_ROWS):
        if step % 100 == 0:
            board.watch(step)
        record_step(board, clock)
    # The newest are kept, and requests keep their numbers.
    seen = board.watch(0)
    assert (len(seen["steps"]), seen["totals"]["steps"]) == (MAX_ROWS // 3, MAX_ROWS)
    requests = [one for step in seen["steps"] for one in step["requests"]]
    assert len({one["number"] for one in requests}) == 3
    assert not any(one["draft_ids"] for one in requests)
    assert board.is_watched
    clock.now_s += WATCH_S
    record_step(board, clock)
    assert not board.is_watched
    assert board.watch(0)["totals"]["steps"] == 0
    assert board.is_watched


def end_step(board, ids):
    board.start_step()
    emitted = [(one, 0, 1) for one in ids]
    board.note_outcome(emitted, budget=0, depth=0, running=ids, waiting=0)


def test_a_fast_engine_shows_every_step_of_a_lone_request(board):
    board.watch(0)
    for _ in range(100):
        end_step(board, ["x"])
    steps = board.watch(0)["steps"]
    assert [one["step"] for one in steps] == list(range(1, 101))
    assert all(len(one["requests"]) == 1 for one in steps)
    # Steps of nobody, an engine's that only reads prompts, take room too.
    for _ in range(2 * MAX_ROWS):
        end_step(board, [])
    assert len(board.watch(0)["steps"]) == MAX_ROWS


def test_a_step_tells_how_many_requests_it_does_not_show(board):
    board.watch(0)
    end_step(board, [str(one) for one in range(MAX_REQUESTS + 5)])
    end_step(board, ["x"])
    steps = board.watch(0)["steps"]
    assert [one["left_out"] for one in steps] == [5, 0]
    assert [len(one["requests"]) for one in steps] == [MAX_REQUESTS, 1]
