"""Turn into a command that Ctrl-C ends in good order, and with it the make around it.

make dies of a SIGINT that reaches it, and a server that has shut down cleanly would be
reported as an error. So the command has a process group of its own, which takes the
terminal from make's: Ctrl-C reaches it alone, and make returns its status. The shell
takes the terminal back, as after any command. make hands SIGTERM on, and if make is
killed the kernel sends one.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1

group_of_make = os.getpgrp()
os.setpgid(0, 0)
# Who takes a terminal that it does not hold would be stopped. And Ctrl-Z would stop the
# command alone, which nobody could resume.
for number in (signal.SIGTTOU, signal.SIGTSTP):
    signal.signal(number, signal.SIG_IGN)
with contextlib.suppress(OSError), Path("/dev/tty").open() as terminal:
    if os.tcgetpgrp(terminal.fileno()) == group_of_make:
        os.tcsetpgrp(terminal.fileno(), os.getpid())
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
