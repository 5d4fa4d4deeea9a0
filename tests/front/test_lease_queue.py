"""The order in which leases are opened."""

from policies.decisions.fairness import OVERDUE_SHARE, Turn
from serving.front.lease_queue import MAX_WAIT_S, LeaseQueue


class Scene:
    """A queue, the places there are, and what was opened."""

    def __init__(self) -> None:
        self.num_places = 0
        self.now_s = 0.0
        self.opened: list[str] = []
        self.queue: LeaseQueue[str] = LeaseQueue(
            self.opened.append,
            lambda _item, num_unsettled: num_unsettled < self.num_places,
            lambda: self.now_s,
        )

    def add(self, name: str, *, first: bool = False, tier: int = 0) -> None:
        self.queue.add(name, Turn("a flow", 1.0, tier=tier), first=first)

    def open(self, count: int) -> list[str]:
        """Let so many have their turn, one after the other."""
        self.opened.clear()
        self.num_places = 1
        self.queue.open_more()
        for _ in range(count - 1):
            self.queue.settle()
        self.num_places = 0
        self.queue.settle()
        return list(self.opened)


def test_replays_go_first_then_what_is_urgent_then_what_came_first():
    scene = Scene()
    scene.add("late", tier=3)
    scene.add("first", tier=1)
    scene.add("second", tier=1)
    scene.add("replay", first=True, tier=3)
    scene.add("urgent replay", first=True, tier=0)
    assert len(scene.queue) == 5
    assert scene.open(5) == ["urgent replay", "replay", "first", "second", "late"]
    assert not len(scene.queue)


def test_no_more_are_open_than_may_be():
    scene = Scene()
    scene.num_places = 2
    for name in "abcd":
        scene.add(name)
    assert scene.opened == ["a", "b"]
    scene.queue.settle()
    assert scene.opened == ["a", "b", "c"]
    scene.num_places = 3
    scene.queue.open_more()
    assert scene.opened == ["a", "b", "c", "d"]


def test_what_is_overdue_gets_one_place_in_a_few():
    """Sustained urgent load must not let others wait for ever, nor the reverse."""
    scene = Scene()
    for n in range(3):
        scene.add(f"old {n}", tier=9)
    scene.now_s = MAX_WAIT_S + 1.0
    for n in range(4 * OVERDUE_SHARE):
        scene.add(f"urgent {n}")
    opened = scene.open(2 * OVERDUE_SHARE)
    assert [name for name in opened if name.startswith("old")] == ["old 0", "old 1"]
    scene.add("replay", first=True)
    assert scene.open(1) == ["replay"]
