"""What `key_life.sh` shows of API keys, against two fronts that share a rate."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.conftest import run
from tests.serving.conftest import BIN, MODEL
from tests.serving.fleet import processes, wait_for_both_fronts

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_key_is_made_used_limited_and_revoked_without_a_restart(fleet):
    wait_for_both_fronts(fleet)
    # A front that nobody has asked yet counts for nothing, and knows of no other. Idle
    # engines tell fronts of each other four times a second, and nobody else of it.
    for _ in range(2):
        assert {fleet.complete(max_tokens=1).status_code for _ in range(4)} == {200}
        time.sleep(1)
    fronts = processes(fleet, "front")
    keys_file = fleet.command.output_file.with_name("keys.json")
    before = keys_file.read_text()
    script = Path(__file__).with_name("key_life.sh")
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = run(script, f"http://127.0.0.1:{fleet.port}", keys_file, MODEL, env=env)
    (num_answers,) = re.findall(r"^used: (\d+) times$", done.stdout, re.MULTILINE)
    # Two by each front, if requests came to both.
    assert 2 <= int(num_answers) <= 4
    assert keys_file.read_text() == before
    assert processes(fleet, "front") == fronts
