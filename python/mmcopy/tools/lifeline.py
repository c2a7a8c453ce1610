"""Runs a command that ends when the process that started it ends, in whichever way.

``python -I -S lifeline.py FD COMMAND...`` forks a watcher and replaces itself with COMMAND, which thus keeps this
process id. The watcher waits for FD, the reading end of a pipe, to close: its writing end lives in the process
that started us, and the kernel closes it even on ``kill -9``. Then it ends COMMAND, first politely. Both are known to
the watcher by file descriptor, so neither a reused process id nor a thread that ended is taken for anything else.

Standard library only: it starts in a few milliseconds and needs no site-packages.
"""

import os
import select
import signal
import sys

POLITE_S = 5.0


def main() -> None:
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    target = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            watch(lifeline, target)
        finally:
            os._exit(0)
    os.close(lifeline)
    os.execv(command[0], command)


def watch(lifeline: int, target: int) -> None:
    """Returns when ``target`` (a pidfd) has ended, by itself or because ``lifeline`` closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    readable, _, _ = select.select([lifeline, target], [], [])
    if target in readable:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal.pidfd_send_signal(target, number)
        if select.select([target], [], [], POLITE_S)[0]:
            return


if __name__ == "__main__":
    main()
