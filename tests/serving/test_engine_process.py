"""What runs behind a replica on the CPU."""

import pytest

from loadtest.compare.processes import find_processes
from tests.serving.conftest import Server

pytestmark = pytest.mark.ray


def test_no_process_spins_beside_the_engine(server: Server) -> None:
    """A worker of its own would keep the engine core spinning for its answers."""
    roles = {role for role, _ in find_processes(server.command.process.pid)}
    assert "engine" in roles
    assert "worker" not in roles
