"""What one process of the client sends, against a stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from loadtest.client.errors import LoadTestError
from loadtest.client.outcome import Outcome
from loadtest.load.options import LoadOptions
from loadtest.load.session import Session

from .stand_in_server import DONE, StandIn, chunk, plain_reply, run_stand_in, usage


def make_session(host: str, index: int = 0, count: int = 1, **changes: Any) -> Session:
    """A session that has begun."""
    values = {"model": "stand-in", "workload": "easy", "max_tokens": 2, **changes}
    session = Session(LoadOptions(host=host, **values), lambda _: None)
    session.begin(index=index, count=count)
    return session


def send_all(session: Session) -> list[Outcome]:
    """Send until the session's share is sent."""
    outcomes = []
    requests = session.chat()
    while not session.is_over:
        outcomes.append(session.send(next(requests), session.now_s))
    return outcomes


@pytest.fixture
def server() -> Iterator[StandIn]:
    """A stand-in that replies at once."""
    with run_stand_in(StandIn(plain_reply(0.0))) as running:
        yield running


@pytest.mark.parametrize(
    ("load", "num_requests", "shares"),
    [
        ("closed:8", 10, [4, 3, 3]),
        ("closed:8", 2, [1, 1, 0]),
        # Users go to the first processes: the others must not be waited for.
        ("closed:2", 7, [4, 3, 0]),
        ("closed:ramp:1-2", 7, [4, 3, 0]),
    ],
)
def test_processes_together_send_as_many_requests_as_asked(
    server: StandIn, load: str, num_requests: int, shares: list[int]
):
    sent = []
    for index in range(len(shares)):
        place = {"index": index, "count": len(shares)}
        session = make_session(server.url, **place, load=load, requests=num_requests)
        sent.append(len(send_all(session)))
        assert session.is_idle
        session.close()
    assert sent == shares


def test_an_action_whose_request_came_to_nothing_befalls_the_next_one():
    replies = iter(range(100))

    def first_is_empty(_: Mapping[str, Any]) -> Iterator[object]:
        if next(replies) > 0:
            yield chunk("a", finish="stop") + usage(1, 1)
        yield DONE

    with run_stand_in(StandIn(first_is_empty)) as server:
        session = make_session(server.url, requests=3, client_chaos="drop@0")
        outcomes = send_all(session)
        session.close()
    assert [o.failure for o in outcomes] == ["empty", "client_dropped", None]
    assert [o.chaos for o in outcomes] == [None, "drop", None]


def test_several_replies_to_one_request_are_refused():
    LoadOptions(host="http://x", extra_body='{"n": 1}').check()
    with pytest.raises(LoadTestError, match=r"n must be 1 \(got 2\)"):
        LoadOptions(host="http://x", extra_body='{"n": 2}').check()
