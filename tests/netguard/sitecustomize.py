"""Refuse connections off this machine, in the process that imports this and in every Python child of it.

`tests/conftest.py` puts this folder first on PYTHONPATH, where each Python imports `sitecustomize` by itself. An audit
hook sees every socket of the interpreter, whoever opened it. Allowed are Unix sockets, 127.0.0.0/8, ::1, and anything
inside a network namespace other than the one the tests started in, since only a test can have made that.

It does not see sockets that C, C++ or Rust open: those of gloo, ssh and obstore. For them a suite runs
in an empty network namespace (CONTRIBUTING.md).

Refusals are also written to NETGUARD_LOG, because code under test may take the error for a lost connection
and try again: the fixture `stays_on_this_machine` fails the test from the log.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any

LOG = "NETGUARD_LOG"
NAMESPACE = "NETGUARD_NAMESPACE"
LOCAL_NAMES = {None, "", "localhost", "localhost.localdomain", "ip6-localhost"}


class OffThisMachine(Exception):
    """Not an OSError: nobody may take it for a network that is down."""


def namespace() -> str:
    """The network namespace of this thread, "" where the system has none."""
    try:
        return os.readlink("/proc/thread-self/ns/net")
    except OSError:
        return ""


def is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_number(host: object) -> bool:
    """An address rather than a name: nobody need be asked what it means."""
    try:
        ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return True


def refuse(what: str) -> None:
    if namespace() != os.environ.get(NAMESPACE, namespace()):
        return
    line = f"{what} by {os.getpid()} ({' '.join(sys.argv[:3])})"
    if path := os.environ.get(LOG):
        with open(path, "a", encoding="utf-8") as log:
            log.write(line + "\n")
    raise OffThisMachine(f"tests stay on this machine: {line}")


def watch(event: str, args: tuple[Any, ...]) -> None:
    if not event.startswith("socket."):
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        sock, address = args[:2]
        internet = isinstance(address, tuple) and sock.family in (socket.AF_INET, socket.AF_INET6)
        if internet and not is_local(address[0]):
            refuse(f"{event} to {address[0]}:{address[1]}")
    if event in ("socket.getaddrinfo", "socket.gethostbyname") and not (is_local(args[0]) or is_number(args[0])):
        refuse(f"{event} of {args[0]}")


sys.addaudithook(watch)
