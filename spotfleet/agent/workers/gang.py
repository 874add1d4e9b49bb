"""Start of a process whose job starts all of its processes together, with a port for them to meet on.

    prepared: a port is reserved, READY is reported --place in a generation ordered--> checkpoint folder --> started

The kernel chooses the port. The reservation does not listen and allows reuse, so rank 0's process can listen on the
port, while the kernel gives it to nobody else for as long as the reservation is open.
"""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

from spotfleet.addresses import joined
from spotfleet.agent.processes.env import GangPlace
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import SlotOrder


class ReservedPort:
    """Port on an address of this host."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        self.store = joined(address, self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def place_in(order: SlotOrder, slots: int) -> GangPlace | None:
    """Return the place at which the process may start; None while it has none."""
    assignment = order.orders.assignment
    if order.gang is None or assignment is None or assignment.rank < 0:
        return None
    return GangPlace(assignment, order.gang, slots, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def command_of(spec: JobSpec, saved: str) -> tuple[tuple[str, ...], str]:
    """Return the script with its arguments, and the shell command, one of which is empty. `resume_args` are added once
    a checkpoint exists."""
    if not (spec.resume_args and saved):
        return spec.argv, spec.run
    if spec.argv:
        return (*spec.argv, *shlex.split(spec.resume_args)), ""
    return (), f"{spec.run.rstrip()} {spec.resume_args}"
