"""Run a command under make so that Ctrl-C ends it, and make, in good order.

make dies of a SIGINT that reaches it, and a server that has shut down cleanly would be
reported as an error. So the command runs in a process group of its own, which holds the
terminal: Ctrl-C reaches it alone, and make returns its status. It receives from here
what make passes on or its whole group receives, and SIGTERM if either is killed.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

# PR_SET_PDEATHSIG: whoever calls this receives SIGTERM when the parent dies.
end_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run `argv` in the foreground and return its exit status."""
    end_with_parent()
    # Ctrl-Z would stop the child alone, and nobody could resume it.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    child = subprocess.Popen(argv, process_group=0, preexec_fn=end_with_parent)

    def pass_on(number: int, _frame: object) -> None:
        # Once each: make passes on what the whole group has received.
        signal.signal(number, signal.SIG_IGN)
        child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup the closing of the terminal is nobody's business, the child's too.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    # From here on this process may write to, and take, a terminal it does not hold.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    give_terminal(os.getpgrp(), child.pid)
    status = child.wait()
    give_terminal(child.pid, os.getpgrp())
    return status if status >= 0 else 128 - status


def give_terminal(holder: int, receiver: int) -> None:
    """Hand the terminal to a process group, if there is one and the other holds it."""
    with contextlib.suppress(OSError), Path("/dev/tty").open() as terminal:
        if os.tcgetpgrp(terminal.fileno()) == holder:
            os.tcsetpgrp(terminal.fileno(), receiver)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
