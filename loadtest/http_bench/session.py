"""One run inside one process of Locust: what is sent next, and what came of it."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import gevent
from gevent.event import Event
from gevent.pool import Pool

from .client_chaos import ActionQueue, ClientAction
from .client_health import ClientSample, watch_client
from .errors import LoadTestError
from .load import arrival_times
from .options import LoadOptions
from .outcome import Outcome
from .streaming import Misbehaviour, StreamingClient
from .workloads import Conversation, Workload

_MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PreparedSession:
    """What takes a while to get, ready before a run begins.

    Attributes:
        options: Of the run.
        workload: What is sent.
        model: Name to ask for.
    """

    options: LoadOptions
    workload: Workload
    model: str


def prepare_session(options: LoadOptions) -> PreparedSession:
    """Load the workload and find the model.

    Raises:
        LoadTestError: If either cannot be had.
        OSError: If a file cannot be read.
    """
    workload = options.make_workload()
    # A file is shuffled with its first conversation.
    workload.conversation(0)
    model = options.model or find_model(options.host, options.headers)
    return PreparedSession(options, workload, model)


class Session:
    """Sends requests and hands on their outcomes.

    In a distributed run process `index` of `count` takes every `count`-th arrival and
    conversation, so that all together send what one process would.
    """

    def __init__(
        self,
        prepared: PreparedSession,
        *,
        on_outcome: Callable[[Outcome], None],
        on_sample: Callable[[ClientSample], None],
        epoch_s: float | None = None,
        index: int = 0,
        count: int = 1,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            prepared: What it is to send.
            on_outcome: Takes every finished request.
            on_sample: Takes what the client says about itself.
            epoch_s: When the run begins, by the wall clock; None for now.
            index: Of this process.
            count: Of processes.
        """
        self._options = options = prepared.options
        self._on_outcome = on_outcome
        self._index, self._count = index, count
        self._workload, self._model = prepared.workload, prepared.model
        self._conversations = itertools.count(index, count)
        self._request_numbers = itertools.count()
        self._limit = _share(options, index, count)
        self._num_sent = 0
        self._num_in_flight = 0
        self._has_more_arrivals = options.load.is_open
        self._is_stopped = Event()
        self._actions = ActionQueue(options.actions)
        self._client = StreamingClient(
            options.host,
            headers=options.headers,
            read_timeout_s=options.read_timeout_s,
            total_timeout_s=options.total_timeout_s,
        )
        # One reading of the wall clock, for processes to agree on; from here on only
        # the monotonic clock counts.
        self.epoch_s = time.time() if epoch_s is None else epoch_s
        self._began_s = time.perf_counter() - (time.time() - self.epoch_s)
        self._watch = gevent.spawn(
            watch_client, f"client {index}", self._began_s, on_sample
        )

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sent."""
        return (
            self._is_stopped.is_set()
            or self.now_s >= self._options.duration_s
            or self._num_sent >= self._limit
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing more is to be sent and nothing is in flight."""
        return self.is_over and not (self._num_in_flight or self._has_more_arrivals)

    def stop_sending(self) -> None:
        """Begin nothing more; what is in flight goes on to its end."""
        self._is_stopped.set()

    def close(self) -> None:
        """Stop watching the client, and close its connections."""
        self._watch.kill()
        self._client.close()

    def chat(self) -> Iterator[tuple[int, list[dict[str, Any]], Conversation]]:
        """Yield the turns of endless conversations, for a user of a closed loop.

        The first one comes when the run begins: a worker may have users before.
        """
        gevent.sleep(max(0.0, -self.now_s))
        while True:
            yield from self._turns(next(self._conversations))

    def send(
        self, request: tuple[int, list[dict[str, Any]], Conversation], at_s: float
    ) -> Outcome:
        """Send one request and wait for its end.

        Args:
            request: From `chat`.
            at_s: When it should be sent.
        """
        turn, messages, conversation = request
        options = self._options
        number = next(self._request_numbers)
        self._num_sent += 1
        outcome = Outcome(
            id=f"{options.run_id}-{self._index}-{number}",
            workload=options.workload,
            turn=turn,
            scheduled_s=at_s,
        )
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        action = self._actions.next(self.now_s / options.duration_s)
        self._num_in_flight += 1
        try:
            self._client.run(
                body | options.extra_body,
                outcome,
                self._began_s,
                _misbehaviour(action),
                give_up_s=options.duration_s + options.drain_s,
            )
        finally:
            self._num_in_flight -= 1
            if action is not None and outcome.chaos is None:
                self._actions.give_back(action)
            self._on_outcome(outcome)
        return outcome

    def run_arrivals(self) -> None:
        """Start a conversation at every arrival of an open load; return with the last.

        Every conversation has a greenlet of its own: none waits for another. Turns
        after the first are sent when the one before has been answered.
        """
        pool = Pool()
        try:
            arrivals = arrival_times(
                self._options.load, self._options.duration_s, self._options.seed
            )
            for number, at_s in enumerate(arrivals):
                if number % self._count != self._index:
                    continue
                # What is overdue is still sent, unless somebody pressed Stop.
                if self._is_stopped.wait(max(0.0, at_s - self.now_s)):
                    break
                pool.spawn(self._run_conversation, number, at_s)
            pool.join()
        finally:
            # A user that is stopped takes its conversations with it.
            pool.kill()
            self._has_more_arrivals = False

    def _run_conversation(self, number: int, at_s: float) -> None:
        for request in self._turns(number):
            if not self.send(request, at_s).is_ok or self.is_over:
                return
            at_s = self.now_s

    def _turns(
        self, number: int
    ) -> Iterator[tuple[int, list[dict[str, Any]], Conversation]]:
        conversation = self._workload.conversation(number)
        for turn, messages in enumerate(conversation.prompts()):
            yield turn, messages, conversation


def _misbehaviour(action: ClientAction | None) -> Misbehaviour | None:
    if action is None:
        return None
    return Misbehaviour(
        action.kind,
        stall_s=action.stall_s if action.kind == "stall" else 0.0,
        drop=action.kind == "drop",
    )


def _share(options: LoadOptions, index: int, count: int) -> float:
    """Return how many requests a process is to send; infinite without a number of them.

    Locust gives users to processes in turn: where they outnumber the users, the last
    ones have none, and would never reach a share.
    """
    if not options.num_requests:
        return math.inf
    num_sending = min(count, math.ceil(options.load.shape.highest))
    if index >= num_sending:
        return 0
    each, left = divmod(options.num_requests, num_sending)
    return each + (index < left)


def find_model(host: str, headers: dict[str, str]) -> str:
    """Return the first model that an endpoint lists.

    Raises:
        LoadTestError: If it does not answer, or lists none.
    """
    url = f"{host}/v1/models"
    try:
        with urlopen(
            Request(url, headers=headers), timeout=_MODELS_TIMEOUT_S
        ) as answer:
            models = json.load(answer)["data"]
        return str(models[0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise LoadTestError(
            f"{url} names no model ({error}); start the server, or give --model"
        ) from None
