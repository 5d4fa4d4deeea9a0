"""The log of a replica outlives vLLM's set-up of its own logging."""

import subprocess
import sys

# In a process of its own: what is tested here closes the handlers of all loggers.
REPLICA = """
import logging, sys
from logging.config import dictConfig
from logging.handlers import MemoryHandler
from serving.replica.serve_log import keep_serve_log

logger = logging.getLogger("ray.serve")
buffer = MemoryHandler(capacity=1, target=logging.FileHandler(sys.argv[1]))
logger.handlers = [buffer]
logger.setLevel(logging.INFO)
logger.info("before")
with keep_serve_log():
    dictConfig({"version": 1, "disable_existing_loggers": False})
    assert buffer.target is None
logger.info("after")
"""


def test_lines_after_a_reconfiguration_reach_the_file(tmp_path):
    log = tmp_path / "replica.log"
    done = subprocess.run(
        [sys.executable, "-c", REPLICA, str(log)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().split() == ["before", "after"]
