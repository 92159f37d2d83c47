"""
Runs a command that is killed when the process that started this one dies: python tether.py PARENT COMMAND…

A launcher that is killed cannot stop its jobs, and jobs that nobody watches must not train on.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it stays with the command
    if os.getppid() != parent:  # it died before
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
