"""What measures a front by hand goes on measuring it; it has once gone silent."""

import pytest

from tests.front import measure_replay


@pytest.mark.anyio
async def test_it_counts_the_time_of_tokens_that_fronts_take(monkeypatch):
    monkeypatch.setattr(measure_replay, "NUM_ROUNDS", 2)
    monkeypatch.setattr(measure_replay, "NUM_STEPS", 3)
    # Requests that come by no lease are nobody's: it fails.
    found = await measure_replay.measure()
    assert found["ns_per_token_on"] > 0 < found["ns_per_token_off"]
