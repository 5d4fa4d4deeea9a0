"""The log of a replica outlives vLLM's set-up of its own logging."""

from __future__ import annotations

import logging
from logging.config import dictConfig
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings(
    # Ray warns about itself while it is imported.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def test_lines_after_a_reconfiguration_reach_the_file(tmp_path: Path) -> None:
    from serving.serve_log import keep_serve_log

    logger = logging.getLogger("ray.serve")
    file = logging.FileHandler(tmp_path / "replica.log")
    buffer = MemoryHandler(capacity=1, target=file)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(buffer)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        logger.info("before")
        with keep_serve_log():
            dictConfig({"version": 1, "disable_existing_loggers": False})
            assert buffer.target is None
        logger.info("after")
    finally:
        logger.removeHandler(buffer)
        logger.setLevel(level)
        logger.propagate = propagate
        file.close()
    assert (tmp_path / "replica.log").read_text().split() == ["before", "after"]
