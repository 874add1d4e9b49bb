"""The sockets of one group, among all that this process has opened since the group began to form.

A user's threads open connections meanwhile, to a store of data for instance, which an abort must not touch. Members
publish the port of gloo's listener in the bootstrap store, so a socket of the group is connected to such a port, or was
accepted at the own one. Where a port is not known (0), every connection to a member's address counts.

Threads: any.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Any

from spotfleet.addresses import plain

Endpoint = tuple[str, int]  # address in its canonical form, and port; 0: any


def endpoint(address: str, port: int = 0) -> Endpoint:
    return plain(address), port


def select(inodes: dict[int, int], own: Endpoint, peers: Collection[Endpoint]) -> dict[int, int]:
    """Return those of `inodes` (descriptor -> inode) that listen at `own`, were accepted there, or lead to `peers`."""
    found: dict[int, int] = {}
    for fd, sock in _open(inodes):
        local, peer = _name(sock.getsockname), _name(sock.getpeername)
        if peer is None and not _listens(sock):
            continue  # not connected
        if (local and _among(local, (own,))) or (peer and _among(peer, peers)):
            found[fd] = inodes[fd]
    return found


def listening_port(inodes: dict[int, int], address: str) -> int:
    """Return the one port at which sockets of `inodes` listen on `address`; 0 unless there is exactly one."""
    names = [_name(sock.getsockname) for _, sock in _open(inodes) if _listens(sock)]
    ports = {name[1] for name in names if name is not None and name[0] == plain(address)}
    return ports.pop() if len(ports) == 1 else 0


def _open(inodes: dict[int, int]) -> Iterator[tuple[int, socket.socket]]:
    """Yield the unchanged sockets of `inodes`, duplicated, with their descriptors."""
    for fd, inode in inodes.items():
        try:
            if os.fstat(fd).st_ino != inode:
                continue
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # closed meanwhile
        with closing(sock):
            yield fd, sock


def _name(ask: Any) -> Endpoint | None:
    try:
        name = ask()
    except OSError:
        return None
    return endpoint(str(name[0]), name[1]) if isinstance(name, tuple) and len(name) >= 2 else None


def _among(name: Endpoint, places: Collection[Endpoint]) -> bool:
    return name in places or (name[0], 0) in places


def _listens(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
