"""Requests that nobody thought of: no 5xx, no hang, and the server answers afterwards.

A 503 with Retry-After is an answer too: a request may ask for more than has room.
`python -m tests.serving.fuzz` sends 20,000 (fuzz/record.json).
"""

import pytest

from tests.serving.fuzz.rounds import fuzz

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_GROWTH_MIB = 32.0


def test_no_request_makes_a_server_fail(server, tmp_path):
    record = fuzz(server, 1_000, seed=1, folder=tmp_path, every=6, few=50)
    by_status: dict[str, int] = {}
    for name, count in record["statuses"].items():
        status = name.rsplit(" ", 1)[1]
        by_status[status] = by_status.get(status, 0) + count
    # Else most cases would try nothing behind the validation, or nothing of it.
    assert by_status["200"] >= 200, record
    assert by_status["400"] >= 200, record
    memory = record["memory_mib"]
    for role, before_mib in memory["after the first round"].items():
        assert memory["after"][role] - before_mib < MAX_GROWTH_MIB, memory
