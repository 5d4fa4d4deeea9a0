"""What of a front's settings may change while it runs: classes, and how much waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.front.request_class import check_priorities, read_shares

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
    """

    classes: dict[str, ClassShare]
    min_replicas: int
    max_ongoing_requests: int
    max_queued_requests: int

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
            check_priorities(self.classes, shares)
            self.classes.clear()
            self.classes.update(shares)
        if live.replicas.max_queued_requests is not None:
            self.max_queued_requests = live.replicas.max_queued_requests
