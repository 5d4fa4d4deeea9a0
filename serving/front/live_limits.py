"""What of a front's settings may change while it runs: classes, and how much waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.front.request_class import read_shares, refuse_priorities

if TYPE_CHECKING:
    from serving.front.request_class import ClassShare
    from serving.settings.live import LiveSettings


@dataclass(slots=True)
class LiveLimits:
    """As they are now.

    Attributes:
        classes: How classes of requests are treated, by name. Whoever admits has this
            dictionary too: it is changed in place.
        min_replicas: Replicas there are, connected or not.
        max_ongoing_requests: Requests one replica takes; does not change.
        max_queued_requests: Requests that may wait for one, in all fronts.
        has_priorities: A class had one when the engines started; does not change.
    """

    classes: dict[str, ClassShare]
    min_replicas: int
    max_ongoing_requests: int
    max_queued_requests: int
    has_priorities: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what engines were started for."""
        priorities = (one.priority for one in self.classes.values())
        self.has_priorities = any(one is not None for one in priorities)

    def max_requests(self, num_replicas: int) -> int:
        """Return the requests that all fronts together may have.

        Args:
            num_replicas: Replicas connected.
        """
        replicas = max(num_replicas, self.min_replicas)
        return replicas * self.max_ongoing_requests + self.max_queued_requests

    async def take(self, live: LiveSettings) -> None:
        """Take over what is said.

        Raises:
            ValueError: Classes have priorities now, where engines started without.
        """
        # First: the chart tells it besides what people write, which may be refused.
        if live.replicas.min is not None:
            self.min_replicas = live.replicas.min
        if live.policy is not None:
            shares = read_shares(live.policy.classes)
            if not self.has_priorities:
                refuse_priorities(shares)
            self.classes.clear()
            self.classes.update(shares)
        if live.replicas.max_queued_requests is not None:
            self.max_queued_requests = live.replicas.max_queued_requests
