"""Another process on the machine, which keeps one core busy until it is killed."""

from __future__ import annotations

import os
import sys

from .lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.sched_setaffinity(0, {int(sys.argv[2])})
    while True:
        pass
