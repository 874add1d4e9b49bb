"""The sockets of this process: which there are, how those of one group are shut, what the kernel has measured on them,
and which network they stand on.

Threads: any.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.addresses import plain

FD_DIR = "/proc/self/fd"
CAN_ABORT = os.path.isdir(FD_DIR)  # elsewhere (macOS) a short collective limit has to do
_SIOCGIFCONF, _SIOCGIFNETMASK, _IFREQ_BYTES, _MOST_INTERFACES = 0x8912, 0x891B, 40, 1024
_IF_INET6 = Path("/proc/thread-self/net/if_inet6")
_RESENT, _SENT, _LEAST_RTT = 100, 136, 148  # where the kernel's tcp_info has total_retrans, segs_out and min_rtt (us)
_NO_RTT = 0xFFFFFFFF  # none measured yet


@dataclass(frozen=True)
class Link:
    """What the kernel knows of one connection to a peer."""

    peer: str  # its address
    rtt_s: float  # the shortest round trip of the last minutes: a peer that answers late does not make it longer
    sent: int  # segments
    resent: int  # of them those that had to be sent once more


def sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket of this process."""
    found: dict[int, int] = {}
    if not CAN_ABORT:
        return found
    for name in os.listdir(FD_DIR):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since it was listed
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def shut(born: dict[int, int], address: str, peers: set[str], spared_ports: set[int]) -> None:
    """Shut those of the sockets `born` (descriptor -> inode) that talk to one of `peers` or were accepted on `address`.

    Listening sockets stay (gloo would end the process), and so do connections to `spared_ports` and whatever stands
    under the same number by now. Never blocks.
    """
    found = _same(born)
    address, peers = plain(address), {plain(p) for p in peers}
    listeners = {s.getsockname()[:2] for s in found if s.family != socket.AF_UNIX and _listens(s)
                 and _host(s.getsockname()) == address}
    for sock in found:
        with closing(sock):
            _shut_one(sock, listeners, peers, spared_ports)


def links(born: dict[int, int], peers: set[str]) -> list[Link]:
    """What the kernel has measured on those of the sockets `born` that talk to one of `peers`, if it tells."""
    peers, found = {plain(p) for p in peers}, []
    for sock in _same(born):
        with closing(sock):
            if (link := _link(sock)) is not None and link.peer in peers:
                found.append(link)
    return found


def _link(sock: socket.socket) -> Link | None:
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or _listens(sock):
            return None
        peer = _host(sock.getpeername())
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None  # it is not connected any more
    if len(info) < _LEAST_RTT + 4:
        return None  # a kernel of before 2016
    resent, sent, rtt_us = (struct.unpack_from("I", info, at)[0] for at in (_RESENT, _SENT, _LEAST_RTT))
    return Link(peer, rtt_us / 1e6, sent, resent) if rtt_us != _NO_RTT else None


def _same(born: dict[int, int]) -> list[socket.socket]:
    """Those of the sockets `born` that still are what they were, each under another descriptor, to be closed."""
    found = []
    for fd, inode in born.items():
        try:
            if os.fstat(fd).st_ino == inode:
                found.append(socket.socket(fileno=os.dup(fd)))
        except OSError:
            continue  # closed meanwhile
    return found


def _shut_one(sock: socket.socket, listeners: set[Any], peers: set[str], spared_ports: set[int]) -> None:
    try:
        if sock.family == socket.AF_UNIX or _listens(sock):
            return
        local, peer = sock.getsockname(), sock.getpeername()
        if local[1] in spared_ports:
            return
        if (_host(local), local[1]) in listeners or _host(peer) in peers:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was not connected any more


def _host(address: Any) -> str:
    return plain(str(address[0])) if isinstance(address, tuple) else ""


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def holds(address: str) -> bool:
    """Has this machine that address now?"""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """The name of the network interface that carries `address`, as "eth0"; "" where none does.

    An interface that bears the address itself comes first, then one whose network it belongs to: all of 127/8 is the
    loopback's, which bears 127.0.0.1 alone.
    """
    try:
        wanted = ipaddress.ip_address(plain(address))
    except ValueError:
        return ""  # a name, which a resolver would have to answer for
    found = list(_interfaces6() if wanted.version == 6 else _interfaces4())
    exact = [name for name, held in found if held.ip == wanted]
    near = [name for name, held in found if wanted in held.network]
    return next(iter(exact + near), "")


def _interfaces4() -> Iterable[tuple[str, ipaddress.IPv4Interface]]:
    """Every IPv4 address of this machine, second ones of an interface too, with its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            rows = array.array("B", bytes(_IFREQ_BYTES * _MOST_INTERFACES))
            where = struct.pack("iL", len(rows), rows.buffer_info()[0])
            size, _ = struct.unpack("iL", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, where))
            for at in range(0, size, _IFREQ_BYTES):
                row = rows[at:at + _IFREQ_BYTES].tobytes()
                mask = fcntl.ioctl(sock.fileno(), _SIOCGIFNETMASK, row)[20:24]
                name = row[:16].split(b"\0")[0].decode().partition(":")[0]  # a second address may be called eth0:1
                yield name, ipaddress.IPv4Interface((row[20:24], bin(int.from_bytes(mask, "big")).count("1")))
        except OSError:
            return  # not Linux: the user names the interface, or NCCL guesses


def _interfaces6() -> Iterable[tuple[str, ipaddress.IPv6Interface]]:
    if not _IF_INET6.exists():
        return
    for line in _IF_INET6.read_text().splitlines():
        digits, _, prefix, _, _, name = line.split()
        yield name, ipaddress.IPv6Interface((bytes.fromhex(digits), int(prefix, 16)))
