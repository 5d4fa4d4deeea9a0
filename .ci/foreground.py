"""Run a command under make so that Ctrl-C ends it, and make, in good order.

make dies of a SIGINT that reaches it, whatever its recipe returns: its handler waits
for the children and then re-raises the signal on itself. A trap, `exec` or
`.ONESHELL` in the recipe cannot change that, and a server that has shut down cleanly
would still be reported as an error. So the command runs in a process group of its
own, which holds the terminal: Ctrl-C reaches the command alone, and make returns its
exit status.

Signals sent to make instead of typed at it:

* SIGTERM is passed on by make to this process and from here to the command.
* SIGINT is not passed on: make would wait for ever. Its handler runs with SIGINT
  blocked, which is visible from outside, so the command is interrupted when that is
  seen. make itself then ends with status 130; nothing below it can prevent that.
* If make or this process is killed outright, the command receives SIGTERM.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
POLL_INTERVAL_S = 0.5
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Run `argv` in the foreground and return its exit status."""
    if not argv:
        print("usage: foreground.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    make_pid = os.getppid()
    terminal = open_terminal()
    child_pid = spawn(argv)
    # From here on this process may write to, and move, a terminal it does not hold.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    status = supervise(child_pid, make_pid, terminal)
    take_back(terminal, child_pid)
    return status


def open_terminal() -> int | None:
    """Open the controlling terminal, or return None where there is none."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def spawn(argv: list[str]) -> int:
    """Start `argv` as the leader of a new process group and return its pid."""
    libc = ctypes.CDLL(None)
    child_pid = os.fork()
    if child_pid == 0:
        try:
            os.setpgid(0, 0)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        finally:
            os._exit(127)
    # Both sides set the group, so that it exists whichever of them runs first.
    with contextlib.suppress(OSError):
        os.setpgid(child_pid, child_pid)
    return child_pid


def supervise(child_pid: int, make_pid: int, terminal: int | None) -> int:
    """Pass signals on, each kind once, until the child ends; return its status."""
    passed_on: set[int] = set()
    while True:
        # In every round, because a job started with `&` may be brought forward later.
        hand_over(terminal, child_pid)
        waited_pid, status = os.waitpid(child_pid, os.WNOHANG | os.WUNTRACED)
        if waited_pid and os.WIFSTOPPED(status):
            suspend_job(child_pid, terminal)
        elif waited_pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        info = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, POLL_INTERVAL_S)
        signum = info.si_signo if info else parent_signal(make_pid)
        if signum in PASSED_ON - passed_on:
            passed_on.add(signum)
            os.kill(child_pid, signum)


def parent_signal(make_pid: int) -> int:
    """Return the signal that make has received and kept to itself, or 0."""
    if os.getppid() != make_pid:
        return signal.SIGTERM
    try:
        lines = Path(f"/proc/{make_pid}/status").read_text("ascii").splitlines()
    except OSError:
        return 0
    blocked = next((line for line in lines if line.startswith("SigBlk:")), "SigBlk: 0")
    if int(blocked.split()[1], 16) & 1 << (signal.SIGINT - 1):
        return signal.SIGINT
    return 0


def suspend_job(child_pid: int, terminal: int | None) -> None:
    """Stop the rest of the job after Ctrl-Z stopped the child, until resumed."""
    take_back(terminal, child_pid)
    os.kill(0, signal.SIGTSTP)
    os.killpg(child_pid, signal.SIGCONT)


def hand_over(terminal: int | None, child_pid: int) -> None:
    """Give the child the terminal, unless this job runs in the background."""
    if terminal is not None and os.tcgetpgrp(terminal) == os.getpgrp():
        os.tcsetpgrp(terminal, child_pid)


def take_back(terminal: int | None, child_pid: int) -> None:
    """Take the terminal back from the child if it holds it."""
    if terminal is not None and os.tcgetpgrp(terminal) == child_pid:
        os.tcsetpgrp(terminal, os.getpgrp())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
