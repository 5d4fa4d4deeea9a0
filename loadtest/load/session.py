"""One run inside one process of Locust: what is sent next, and what came of it."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Pool

from loadtest.client.health import ClientSample, watch_client
from loadtest.client.outcome import Outcome
from loadtest.client.streaming import StreamingClient

from .arrivals import arrival_times
from .options import LoadOptions
from .workloads import Conversation, Workload

Turn = tuple[int, list[dict[str, Any]], Conversation]
"""Position in the conversation, messages, and the conversation."""


class Session:
    """Sends requests and hands on their outcomes.

    In a distributed run process `index` of `count` takes every `count`-th arrival and
    conversation, so that all together send what one process would.
    """

    def __init__(
        self,
        options: LoadOptions,
        workload: Workload,
        on_item: Callable[[Outcome | ClientSample], None],
        *,
        epoch_s: float,
        index: int = 0,
        count: int = 1,
    ) -> None:
        """Start the clock of a run that begins at `epoch_s` of the wall clock.

        `on_item` takes finished requests, and what the client says about itself.
        """
        self._options, self._workload, self._on_item = options, workload, on_item
        self._index, self._count = index, count
        self._numbers = itertools.count(index, count)
        self._num_sent = 0
        self.is_open = options.arrivals.is_open
        self._is_stopped = Event()
        endpoint = options.endpoint
        self._client = StreamingClient(endpoint.url, headers=endpoint.headers)
        # One reading of the wall clock, for processes to agree on; from here on only
        # the monotonic clock counts.
        self._began_s = time.perf_counter() - (time.time() - epoch_s)
        self._watch = gevent.spawn(
            watch_client, f"client {index}", self._began_s, on_item
        )

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._is_stopped.is_set() or self.now_s >= self._options.duration

    def stop_sending(self) -> None:
        """Begin nothing more; what is in flight goes on to its end."""
        self._is_stopped.set()

    def close(self) -> None:
        """Stop watching the client, and close its connections."""
        self._watch.kill()
        self._client.close()

    def chat(self) -> Iterator[Turn]:
        """Yield the turns of endless conversations, for a user of a closed loop.

        The first one comes when the run begins: a worker may have users before.
        """
        gevent.sleep(max(0.0, -self.now_s))
        while True:
            yield from self._turns(next(self._numbers))

    def send(self, request: Turn, due_s: float) -> Outcome:
        """Send a request that is due at `due_s`, and wait for its end."""
        turn, messages, conversation = request
        options = self._options
        name = f"{options.run_id}-{self._index}-{self._num_sent}"
        outcome = Outcome(name, options.workload, turn, scheduled_s=due_s)
        body = {"model": options.model, **options.body, "messages": messages}
        if conversation.tools:
            body.setdefault("tools", conversation.tools)
        self._num_sent += 1
        try:
            give_up_s = options.duration + options.drain
            self._client.run(body, outcome, self._began_s, give_up_s=give_up_s)
        finally:
            self._on_item(outcome)
        return outcome

    def run_arrivals(self) -> None:
        """Start a conversation at every arrival of an open load; return with the last.

        Every conversation has a greenlet of its own: none waits for another. Turns
        after the first are sent when the one before has been answered.
        """
        options, pool = self._options, Pool()
        arrivals = arrival_times(options.arrivals, options.duration, options.seed)
        numbered = itertools.islice(enumerate(arrivals), self._index, None, self._count)
        try:
            for number, due_s in numbered:
                # What is overdue is still sent, unless somebody pressed Stop.
                if self._is_stopped.wait(max(0.0, due_s - self.now_s)):
                    break
                pool.spawn(self._run_conversation, number, due_s)
            pool.join()
        finally:
            # A user that is stopped takes its conversations with it.
            pool.kill()

    def _run_conversation(self, number: int, due_s: float) -> None:
        for request in self._turns(number):
            if not self.send(request, due_s).is_ok or self.is_over:
                return
            due_s = self.now_s

    def _turns(self, number: int) -> Iterator[Turn]:
        conversation = self._workload.conversation(number)
        for turn, messages in enumerate(conversation.prompts()):
            yield turn, messages, conversation
