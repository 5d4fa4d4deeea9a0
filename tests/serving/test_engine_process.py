"""What runs behind a replica on the CPU."""

import pytest

from loadtest.compare.processes import find_processes
from tests.serving.conftest import load, read_logs, wait_until

pytestmark = pytest.mark.ray


def test_no_process_spins_beside_the_engine(server):
    """A worker of its own would keep the engine core spinning for its answers."""
    roles = {role for role, _ in find_processes(server.command.process.pid)}
    assert "engine" in roles
    assert "worker" not in roles


def test_what_vllm_notes_of_every_step_is_summed_up_now_and_then(server):
    """Its logger keeps four lists of drafted steps until it is told to log.

    Twice: the task that tells it goes on.
    """

    def num_sums() -> int:
        return read_logs(server).count("SpecDecoding metrics: ")

    with load(server, num_clients=1):
        wait_until(lambda: num_sums() >= 2, 60)
