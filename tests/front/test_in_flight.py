"""A request as a front keeps it: what of it is told on, and what it is compared by."""

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput

from serving.front.in_flight import InFlight
from tests.front.fake_fleet import make_request


def output_with(*kinds: EngineCoreEventType) -> EngineCoreOutput:
    events = [EngineCoreEvent.new_event(kind, 10.0) for kind in kinds]
    return EngineCoreOutput("r", [7], events=events)


def test_only_its_first_engine_tells_when_a_request_was_queued():
    """VLLM counts from the latest of such events to the first that it ran by."""
    kinds = EngineCoreEventType
    one = InFlight(make_request("r"))
    first = output_with(kinds.QUEUED, kinds.SCHEDULED)
    one.take(first, now_s=100.0, shift_s=5.0)
    assert [event.timestamp for event in first.events] == [15.0, 15.0]
    replayed = output_with(kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED)
    one.take(replayed, now_s=101.0, shift_s=5.0)
    assert [event.type for event in replayed.events] == [kinds.PREEMPTED]


@pytest.mark.parametrize(
    ("params", "is_alike"),
    [
        ({"output_kind": RequestOutputKind.DELTA}, True),
        ({"stop_token_ids": [5, 900]}, False),
        # vLLM shows neither where it shows parameters.
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [1, 2]}, False),
    ],
)
def test_requests_are_alike_where_an_engine_cannot_tell_them_apart(params, is_alike):
    one, other = (InFlight(make_request(n, **p)) for n, p in (("a", {}), ("b", params)))
    assert (one.digest() == other.digest()) == is_alike
