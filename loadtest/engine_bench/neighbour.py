"""Another process on the machine, which keeps one core busy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .lifetime import die_with_parent


def main(arguments: Sequence[str]) -> None:
    """Spin on a core until killed.

    Args:
        arguments: The parent's process id and the core.
    """
    parent_pid, cpu = map(int, arguments)
    die_with_parent(parent_pid)
    os.sched_setaffinity(0, {cpu})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
