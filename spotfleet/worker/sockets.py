"""Sockets of this process: list them, shut those of one group, read the kernel's measurements, find their interface.

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
CAN_ABORT = os.path.isdir(FD_DIR)  # elsewhere (macOS) only a short limit on collectives ends them
_SIOCGIFCONF, _SIOCGIFNETMASK, _IFREQ_BYTES, _MOST_INTERFACES = 0x8912, 0x891B, 40, 1024
_IF_INET6 = Path("/proc/thread-self/net/if_inet6")
_RESENT, _SENT, _LEAST_RTT = 100, 136, 148  # offsets in tcp_info: total_retrans, segs_out, min_rtt (us)
_NEEDLESS = 216  # dsack_dups: segments that the peer reported as received twice; since Linux 4.19
_NO_RTT = 0xFFFFFFFF  # none measured yet


@dataclass(frozen=True)
class PeerSocket:
    """The kernel's measurements of one connection to a peer."""

    peer: str  # its address
    rtt_s: float  # the shortest round trip of the last minutes, so that a late answer does not raise it
    sent: int  # number of segments
    resent: int  # number of those that were lost and sent again, not of those that arrived late


def sockets() -> dict[int, int]:
    """Map the descriptor of every socket of this process to its inode."""
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


def shut(inodes: dict[int, int], address: str, peers: set[str], spared_ports: set[int]) -> None:
    """Shut the sockets of `inodes` (descriptor -> inode) that are connected to `peers` or were accepted on `address`.

    Listening sockets stay (gloo would end the process), and so do connections to `spared_ports` and other files that
    have taken one of the descriptors since. Never blocks.
    """
    found = _same(inodes)
    address, peers = plain(address), {plain(p) for p in peers}
    listeners = {s.getsockname()[:2] for s in found if s.family != socket.AF_UNIX and _listens(s)
                 and _host(s.getsockname()) == address}
    for sock in found:
        with closing(sock):
            _shut_one(sock, listeners, peers, spared_ports)


def links(inodes: dict[int, int], peers: set[str]) -> list[PeerSocket]:
    """Read the kernel's measurements of the sockets in `inodes` that are connected to `peers`, where available."""
    peers, found = {plain(p) for p in peers}, []
    for sock in _same(inodes):
        with closing(sock):
            if (link := _link(sock)) is not None and link.peer in peers:
                found.append(link)
    return found


def _link(sock: socket.socket) -> PeerSocket | None:
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or _listens(sock):
            return None
        peer = _host(sock.getpeername())
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None  # no longer connected
    return measured(peer, info)


def measured(peer: str, info: bytes) -> PeerSocket | None:
    """Read the kernel's tcp_info; None before the first round trip, or of a kernel from before 2016.

    A busy peer answers late, and what is sent again meanwhile arrives twice: that is no loss.
    """
    if len(info) < _LEAST_RTT + 4:
        return None
    resent, sent, rtt_us = (struct.unpack_from("I", info, at)[0] for at in (_RESENT, _SENT, _LEAST_RTT))
    needless = struct.unpack_from("I", info, _NEEDLESS)[0] if len(info) >= _NEEDLESS + 4 else 0
    return PeerSocket(peer, rtt_us / 1e6, sent, max(0, resent - needless)) if rtt_us != _NO_RTT else None


def _same(inodes: dict[int, int]) -> list[socket.socket]:
    """Duplicate the sockets of `inodes` that are unchanged; the caller closes the duplicates."""
    found = []
    for fd, inode in inodes.items():
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
        pass  # no longer connected


def _host(address: Any) -> str:
    return plain(str(address[0])) if isinstance(address, tuple) else ""


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def holds(address: str) -> bool:
    """Return whether this machine has `address` now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """Return the name of the network interface for `address`, such as "eth0"; "" without one.

    An interface with the address itself comes first, then one whose network contains it: all of 127/8 belongs to the
    loopback interface, which has only 127.0.0.1.
    """
    try:
        wanted = ipaddress.ip_address(plain(address))
    except ValueError:
        return ""  # a name, which only a resolver could answer
    found = list(_interfaces6() if wanted.version == 6 else _interfaces4())
    exact = [name for name, held in found if held.ip == wanted]
    near = [name for name, held in found if wanted in held.network]
    return next(iter(exact + near), "")


def _interfaces4() -> Iterable[tuple[str, ipaddress.IPv4Interface]]:
    """Yield every IPv4 address of this machine with its network, also an interface's second address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            rows = array.array("B", bytes(_IFREQ_BYTES * _MOST_INTERFACES))
            request = struct.pack("iL", len(rows), rows.buffer_info()[0])
            size, _ = struct.unpack("iL", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, request))
            for at in range(0, size, _IFREQ_BYTES):
                row = rows[at:at + _IFREQ_BYTES].tobytes()
                mask = fcntl.ioctl(sock.fileno(), _SIOCGIFNETMASK, row)[20:24]
                name = row[:16].split(b"\0")[0].decode().partition(":")[0]  # a second address may be named eth0:1
                yield name, ipaddress.IPv4Interface((row[20:24], bin(int.from_bytes(mask, "big")).count("1")))
        except OSError:
            return  # not Linux: the user names the interface, or NCCL guesses


def _interfaces6() -> Iterable[tuple[str, ipaddress.IPv6Interface]]:
    if not _IF_INET6.exists():
        return
    for line in _IF_INET6.read_text().splitlines():
        digits, _, prefix, _, _, name = line.split()
        yield name, ipaddress.IPv6Interface((bytes.fromhex(digits), int(prefix, 16)))
