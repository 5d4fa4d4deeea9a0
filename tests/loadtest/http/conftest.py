"""What tests of the load generator share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .stand_in_server import StandIn, run_stand_in


@pytest.fixture
def server() -> Iterator[StandIn]:
    with run_stand_in(StandIn()) as running:
        yield running


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {number}" for number in range(50)))
    return path
