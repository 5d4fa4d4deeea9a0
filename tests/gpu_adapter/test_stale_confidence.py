"""Confidences kept from step to step, a slot per request."""

import numpy as np

from serving.engine.gpu.stale_confidence import UNKNOWN, StaleConfidence


def note(kept, req_id, values):
    """Note one request's confidences, all of them new."""
    kept.note([req_id], np.array([values]), np.array([len(values)]))


def test_positions_that_were_not_drafted_keep_what_they_had():
    kept = StaleConfidence(3)
    rows = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]
    kept.note(["a", "b"], np.array(rows, dtype=np.float32), np.array([3, 3]))
    kept.note(["b", "a"], np.array([[0.1] * 3, [0.2] * 3]), np.array([0, 2]))
    rows[0][:2] = [0.2, 0.2]
    np.testing.assert_allclose(kept.guess(["a", "b"], 3), rows, rtol=1e-6)


def test_what_is_unknown_is_taken_from_the_others_then_from_all():
    kept = StaleConfidence(3)
    assert kept.guess(["a", "b"], 2).tolist() == [[UNKNOWN] * 2] * 2
    note(kept, "a", [0.8])
    note(kept, "b", [0.6])
    guess = kept.guess(["a", "b", "new"], 2)
    np.testing.assert_allclose(guess, [[0.8, 0.7], [0.6, 0.7], [0.7, 0.7]])


def test_a_slot_forgets_whom_it_belonged_to():
    kept = StaleConfidence(1, num_slots=1)
    note(kept, "a", [0.9])
    kept.forget("a")
    kept.forget("never seen")
    assert kept.guess(["b"], 1).tolist() == [[UNKNOWN]]


def test_there_is_room_for_more_requests_than_expected():
    kept, rows = StaleConfidence(2, 1), np.random.default_rng(0).uniform(size=(20, 2))
    req_ids = [f"r{index}" for index in range(20)]
    for req_id, row in zip(req_ids, rows, strict=True):
        note(kept, req_id, row.tolist())
    assert len(kept) == 20
    np.testing.assert_array_equal(kept.guess(req_ids, 2), rows)
