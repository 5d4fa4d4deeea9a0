"""What runs behind a replica on the CPU."""

import psutil
import pytest

from tests.serving.conftest import Server

pytestmark = pytest.mark.ray


def test_no_process_spins_beside_the_engine(server: Server) -> None:
    """A worker of its own would keep the engine core spinning for its answers."""
    titles = [
        " ".join(process.cmdline())
        for process in server.command.descendants()
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    assert any(title.startswith("VLLM::EngineCore") for title in titles)
    assert not [title for title in titles if title.startswith("VLLM::Worker")]
