"""What the tests of hosts on machines that exist have in common. The hosts do nothing."""

from __future__ import annotations

import pytest

from spotfleet.model import CloudHost, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.ssh import SshProvider, poller, scripts, transport
from tests.support.ssh_provider.sshd_machines import Machines, idle_hosts

PATIENCE_S = 14.0  # no machine here is silent: what takes long is this one, which is busy. Less than SCRIPT_S


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is a new one, and nobody waits before the next."""
    idle_hosts(monkeypatch)
    monkeypatch.setattr(poller, "BACKOFF_S", 0.05)
    monkeypatch.setattr(poller, "BACKOFF_MAX_S", 0.1)
    monkeypatch.setattr(poller, "AWAY_S", 0.3)
    monkeypatch.setattr(poller, "FRESH_S", 0.0)
    monkeypatch.setattr(poller, "POLLS_PER_S", 1e9)
    for module, name in ((transport, "CONNECT_S"), (transport, "BANNER_S"), (transport, "AUTH_S"), (poller, "POLL_S")):
        monkeypatch.setattr(module, name, PATIENCE_S)
    monkeypatch.setattr(scripts, "REMOVE_S", int(PATIENCE_S) - 2)


def request(machines: Machines, name: str = "w0", request_id: str = "f-1", role: Role = Role.WORKER,
            fleet: str = "f") -> LaunchRequest:
    kind = "dispatcher" if role is Role.DISPATCHER else "machine"
    offer = Offer("ssh", "ssh", machines.zone(name), kind, Market.ON_DEMAND, 1, 0, 0)
    return LaunchRequest(request_id, fleet, role, offer, Boot("idle", {"boot.json": "{}"}))


def dispatcher(machines: Machines, process: str = "") -> SshProvider:
    """As a dispatcher has it; another `process` remembers nothing of what the first has seen."""
    return SshProvider(machines.config(side="dispatcher", process=process))


def line(provider: SshProvider, request_id: str = "f-1") -> CloudHost:
    return next(h for h in provider.hosts("f") if h.request_id == request_id)


def states(provider: SshProvider) -> dict[str, str]:
    return {h.request_id: h.state.value for h in provider.hosts("f")}


def say(machines: Machines, state: str, name: str = "w0", host: str = "f-1") -> None:
    """As bootstrap.sh would."""
    (machines[name].root / host / "state").write_text(f"{state}\n")
