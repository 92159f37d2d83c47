"""Ports that are held until a job uses them, so that no two jobs, and nobody else, are given the same one."""

from __future__ import annotations

import socket


class HeldPort:
    """
    A free port of this machine, bound but not listened on, until closed.

    Who asks the kernel for any free port is not given this one. The job it is meant for can listen on it all the same:
    both sockets say that they reuse the address, as torch's stores do.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Lets go of the port."""
        self._socket.close()
