"""What one process of the client sends, against a stand-in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest.http_bench.client_chaos import parse_client_actions
from loadtest.http_bench.errors import LoadTestError
from loadtest.http_bench.load import parse_load
from loadtest.http_bench.options import LoadOptions, read_extra_body
from loadtest.http_bench.outcome import Outcome
from loadtest.http_bench.records import read_records
from loadtest.http_bench.session import Session, prepare_session

from .stand_in_server import DONE, StandIn, chunk, plain_reply, run_stand_in, usage
from .test_experiment import experiment


def options(host: str, **changes: Any) -> LoadOptions:
    """Options of a run of a minute."""
    values: dict[str, Any] = {
        "host": host,
        "model": "stand-in",
        "load": parse_load("closed:4"),
        "workload": "easy",
        "duration_s": 60.0,
        "num_requests": 0,
        "drain_s": 10.0,
        "max_tokens": 2,
        "temperature": 0.0,
        "seed": "0",
        "ttft_target_ms": None,
        "tpot_target_ms": None,
        "extra_body": {},
        "headers": {},
        "read_timeout_s": 10.0,
        "total_timeout_s": 60.0,
        "max_prompt_chars": None,
        "run_id": "run",
        "records": None,
        "actions": (),
    }
    return LoadOptions(**(values | changes))


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
    settings = options(server.url, load=parse_load(load), num_requests=num_requests)
    sent = []
    for index in range(len(shares)):
        session = Session(
            prepare_session(settings),
            on_outcome=lambda _: None,
            on_sample=lambda _: None,
            index=index,
            count=len(shares),
        )
        sent.append(len(send_all(session)))
        assert session.is_idle
        session.close()
    assert sent == shares


def test_workers_without_users_are_not_waited_for(server: StandIn, tmp_path: Path):
    began_s = time.monotonic()
    experiment(
        tmp_path,
        f"--arm=a={server.url}",
        *("--loads=closed:2", "--processes=3", "--requests=31", "--duration=300"),
    )
    assert len(server.ids) == len(set(server.ids)) == 31
    assert time.monotonic() - began_s < 300
    [path] = (tmp_path / "records").glob("*.gz")
    # Nothing is sent before the moment on which all workers agreed.
    assert min(outcome.scheduled_s for outcome in read_records(path).outcomes) >= 0


def test_an_action_whose_request_came_to_nothing_befalls_the_next_one():
    replies = iter(range(100))

    def first_is_empty(_: Mapping[str, Any]) -> Iterator[object]:
        if next(replies) > 0:
            yield chunk("a", finish="stop") + usage(1, 1)
        yield DONE

    with run_stand_in(StandIn(first_is_empty)) as server:
        actions = parse_client_actions("drop@0")
        session = Session(
            prepare_session(options(server.url, num_requests=3, actions=actions)),
            on_outcome=lambda _: None,
            on_sample=lambda _: None,
        )
        outcomes = send_all(session)
        session.close()
    assert [o.failure for o in outcomes] == ["empty", "client_dropped", None]
    assert [o.chaos for o in outcomes] == [None, "drop", None]


def test_several_replies_to_one_request_are_refused():
    assert read_extra_body('{"n": 1}') == {"n": 1}
    with pytest.raises(LoadTestError, match=r"n must be 1 \(got 2\)"):
        read_extra_body('{"n": 2}')
