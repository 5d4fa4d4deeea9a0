"""The order in which leases are opened; how many at once is in test_fleet_client."""

from policies.decisions.fairness import OVERDUE_SHARE, Turn
from serving.front.lease_queue import MAX_WAIT_S, LeaseQueue


def test_replays_go_first_then_what_is_urgent_and_what_is_overdue_now_and_then():
    """Sustained urgent load must not let others wait for ever, nor the reverse."""
    now_s, num_places = 0.0, 0
    opened: list[str] = []
    queue: LeaseQueue[str] = LeaseQueue(
        opened.append,
        lambda _, num_unsettled: num_unsettled < num_places,
        lambda: now_s,
    )

    def add(name: str, *, first: bool = False, tier: int = 0) -> None:
        queue.add(name, Turn("a flow", 1.0, tier=tier), first=first)

    for n in range(3):
        add(f"old {n}", tier=9)
    now_s = MAX_WAIT_S + 1.0
    add("less urgent", tier=3)
    for n in range(4 * OVERDUE_SHARE):
        add(f"urgent {n}")
    add("replay", first=True, tier=3)
    add("urgent replay", first=True)
    assert not opened
    num_places = 2 + 2 * OVERDUE_SHARE
    queue.open_more()
    assert opened[:2] == ["urgent replay", "replay"]
    rest = opened[2:]
    assert [name for name in rest if name.startswith("old")] == ["old 0", "old 1"]
    urgent = [name for name in rest if name.startswith("urgent")]
    assert urgent == [f"urgent {n}" for n in range(len(rest) - 2)]
