"""How many streams are computed anew at a time."""

from policies.decisions.refill import Refills


def test_streams_are_computed_anew_as_far_as_there_is_room() -> None:
    refills = Refills()
    # One goes whatever is free: else none ever would.
    assert refills.have_room(900, 0)
    refills.note_opened("a", 900)
    assert not refills.have_room(200, 1_000)
    assert refills.have_room(100, 1_000)
    refills.note_begun("a")
    refills.note_begun("a")
    assert refills.have_room(200, 0)
