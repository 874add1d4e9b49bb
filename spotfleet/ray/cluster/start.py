"""Command lines of `ray start`.

On machines with an address of their own every port is fixed. Several hosts on one machine (provider local, loopback
addresses) share its ports, so there the kernel chooses them.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from dataclasses import dataclass

from spotfleet.protocol.ray_cluster import LABEL

FIRST_WORKER, LAST_WORKER = 10002, 19999
FIXED = {"node-manager-port": 6380, "object-manager-port": 6381, "dashboard-agent-listen-port": 6382,
         "dashboard-agent-grpc-port": 6383, "runtime-env-agent-port": 6384, "metrics-export-port": 6385}
DASHBOARD = 8265
LEAST_STORE = 80 << 20  # Ray refuses less than 75 MiB
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000",
          "RAY_health_check_failure_threshold": "3"}  # a lost node is found within 3 to 9 s; Ray's own values: a minute
NO_MONITOR = {"RAY_memory_monitor_refresh_ms": "0"}  # it would kill drivers, and count the dispatcher's memory
# Without grpc `ray start` starts no server for `ray://`, which listens on port 10001, also where another head has it.
NO_CLIENT_SERVER = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
DASHBOARD_NEEDS = ("aiohttp_cors", "opencensus", "prometheus_client")  # `ray[default]` brings them


@dataclass(frozen=True)
class Node:
    """Resources of a host for its raylet."""

    host: str
    cpus: int
    gpus: int
    store_bytes: int


def resolved(host: str) -> str:
    """Return the IP address of a host, which Ray wants. A name that cannot be resolved is returned as it is."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def shares_machine(ip: str) -> bool:
    """Return whether hosts with such addresses are processes of one machine."""
    return ip.startswith("127.")


def head_settings(ip: str) -> dict[str, str]:
    """Return the variables of the head alone. Raylets that share one machine's processors may be slow to answer all at
    once, so that Ray's own patience stays."""
    return NO_MONITOR if shares_machine(ip) else {**HEALTH, **NO_MONITOR}


def has_dashboard() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in DASHBOARD_NEEDS)


def head(address: str, folder: str, dashboard: int) -> list[str]:
    """Return the command of the head. It runs no task, so that a program cannot starve the dispatcher beside it.
    `dashboard`: its port on loopback, or 0."""
    ip, _, port = address.rpartition(":")
    shown = [f"--dashboard-host=127.0.0.1 --dashboard-port={dashboard}".split()] if dashboard else []
    return [*_start(ip, folder), "--head", f"--port={port}", "--num-cpus=0", "--num-gpus=0", "--no-monitor",
            "--disable-usage-stats", f"--object-store-memory={LEAST_STORE}",
            f"--include-dashboard={'true' if dashboard else 'false'}", *(flag for flags in shown for flag in flags)]


def raylet(address: str, ip: str, folder: str, node: Node) -> list[str]:
    """Return the command of a host's raylet."""
    return [*_start(ip, folder), f"--address={address}", f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}",
            f"--object-store-memory={max(LEAST_STORE, node.store_bytes)}", f"--labels={LABEL}={node.host}"]


def _start(ip: str, folder: str) -> list[str]:
    begin = [sys.executable, "-c", NO_CLIENT_SERVER, "start", "--block", f"--node-ip-address={ip}",
             f"--temp-dir={folder}"]
    if shares_machine(ip):
        return [*begin, "--min-worker-port=0", "--max-worker-port=0"]
    return [*begin, *(f"--{name}={port}" for name, port in FIXED.items()), f"--min-worker-port={FIRST_WORKER}",
            f"--max-worker-port={LAST_WORKER}"]
