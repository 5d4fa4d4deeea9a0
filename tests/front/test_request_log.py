"""The line that a front logs of each request that has ended."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from serving.front import request_log
from serving.front.caller import Caller
from serving.front.in_flight import InFlight, Standing
from tests.front.fake_fleet import make_request, until

pytestmark = pytest.mark.anyio


def told(log: pytest.LogCaptureFixture) -> list[dict]:
    return [one.request for one in log.records if hasattr(one, "request")]


async def test_who_moves_or_leaves_has_one_line_with_all_its_tokens(scene, serve_log):
    await scene.send(1, "leaves")
    await scene.client.abort_requests_async(["leaves0"])
    await until(lambda: told(serve_log))
    (line,) = told(serve_log)
    assert (line["end"], line["first_token_s"], line["replica"]) == ("left", None, None)
    victim = scene.add_replica()
    requests = await scene.begin(1)
    victim.die()
    heir = scene.add_replica()
    await scene.check_all(requests)
    _, line = told(serve_log)
    assert 0 < line.pop("first_token_s") < line.pop("total_s")
    assert line == {
        "end": "length",
        "prompt_tokens": 2,
        "output_tokens": 30,
        "replica": heir.relay.offer.replica,
        "replays": 1,
        "class": "default",
        "key": None,
    }


def test_acceptance_and_the_keys_name_are_told_and_no_text(serve_log):
    caller = Caller("ann", None, lambda _: None, lambda _: None)
    standing = Standing(caller=caller)
    one = InFlight(make_request("r", (1, 2)), emitted=[5, 6], standing=standing)
    drafts = RequestSpecDecodeMetrics(3, histogram=[4, 3, 2, 1], num_draft_tokens=30)
    request_log.log_end(one, "stop", drafts)
    (line,) = told(serve_log)
    assert (line["key"], line["drafted_tokens"], line["accepted_tokens"]) == (
        *("ann", 30, 10),
    )
    assert "[" not in serve_log.messages[-1] + str(line)
