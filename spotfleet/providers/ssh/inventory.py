"""All machines of one configuration, with this process's memory of them. One instance per configuration and process.

The memory only saves time and smooths failures; correctness never depends on it: the last report of each machine
(`poller.py`), connections, ended hosts (a machine forgets them at once), hosts to be ended on unreachable machines, and
machines whose last launch failed.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock, RLock, Thread
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import CloudHost, CloudState, EnvironmentSpec, Role
from spotfleet.providers.ssh import listing, scripts
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError, of_output
from spotfleet.providers.ssh.discovery import Discovery
from spotfleet.providers.ssh.listing import ListedHost, Report
from spotfleet.providers.ssh.machines import ResolvedMachine, environment_in, machines, spec_in
from spotfleet.providers.ssh.poller import MachinePoller, MachineView
from spotfleet.providers.ssh.section.spec import SshSpec
from spotfleet.providers.ssh.transport import Keyring, LocalTransport, SshTransport, Transport
from spotfleet.retry import growing_s

log = logging.getLogger(__name__)
ENDED_S = 600.0  # how long an ended host is listed
GIVE_UP_S = 60.0  # a host to be ended on a silent machine counts as ended after this
TRY_AGAIN_S, TRY_AGAIN_MAX_S = 15.0, 600.0  # how long a machine is refused after a failed launch, doubling
SHORT = 240  # characters of a repeated reason
LEAVE_S = 60.0  # notice for a host whose machine the script no longer lists
DELISTED = "the discovery script does not name its machine any more"
DELISTED_S = 15.0  # a machine that the script no longer lists is given up after this


@dataclass
class Failures:
    """Failed launches in a row on one machine."""

    why: str
    until: float  # monotonic
    count: int = 1
    last: str = ""  # the host

    @property
    def trouble(self) -> Diagnosis:
        """Return a short form: the host's own line has the full reason."""
        return Diagnosis(f"its host {self.last} could not be made: {shortened(self.why)}")


@dataclass
class MachineInventory:
    spec: SshSpec
    environment: EnvironmentSpec
    laptop: bool
    keys: Keyring
    known_hosts: str
    user: str
    discovery: Discovery
    lock: RLock = field(default_factory=RLock)
    transports: dict[str, Transport] = field(default_factory=dict)
    gone: dict[str, tuple[CloudHost, float]] = field(default_factory=dict)  # ended -> listed until
    unwanted: dict[str, float] = field(default_factory=dict)  # to be ended when its machine answers -> requested at
    failed: dict[str, Failures] = field(default_factory=dict)  # machine -> failures in a row
    refused: dict[str, str] = field(default_factory=dict)  # machine -> reason of its last failed launch
    extra: dict[str, tuple[ResolvedMachine, float]] = field(default_factory=dict)  # no longer listed -> since when
    leaving: set[str] = field(default_factory=set)  # hosts that got notice for that
    ending: set[str] = field(default_factory=set)  # hosts that one of our threads is ending
    tagging: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.poller = MachinePoller(self.transport, self._on_report)
        self._named: dict[str, ResolvedMachine] = {}
        self._logged = ""  # the script's error, as last logged

    # ---- machines

    def machines(self) -> list[ResolvedMachine]:
        """Return the current machines, the dispatcher's first; and dropped machines as long as they hold a host."""
        found = machines(self.spec, self._discovered(), self.known_hosts, self.user)
        now = time.monotonic()
        with self.lock:
            names = {m.name for m in found}
            for name, machine in self._named.items():
                if name not in names:
                    self.extra.setdefault(name, (machine, now))
            self.extra = {n: e for n, e in self.extra.items() if n not in names}
            self._named = {m.name: m for m in found}
            return [*found, *(machine for machine, _ in self.extra.values())]

    def _discovered(self) -> tuple[tuple[str, int], ...]:
        """Return the script's machines. On the dispatcher, raises SpotfleetError until there was a valid list.

        Without a list, no machine can be reported as empty. The laptop goes on with the machines of the fleet file.
        """
        found = self.discovery.found()
        if self.discovery.trouble != self._logged:
            self._logged = self.discovery.trouble
            log.warning("%s", self._logged or "the discovery script works again")
        if self.discovery.trouble and not self.discovery.ever and not self.laptop:
            raise SpotfleetError(self.discovery.trouble, hint="run it by hand: each line is HOST or HOST:SLOTS")
        return found

    def machine(self, name: str) -> ResolvedMachine | None:
        return next((m for m in self.machines() if m.name == name), None)

    def head(self) -> ResolvedMachine:
        """Return the dispatcher's machine. Raises NeedsPerson if none is named."""
        found = next((m for m in self.machines() if m.role is Role.DISPATCHER), None)
        if found is None:
            raise NeedsPerson("provider ssh: no machine is named for the dispatcher",
                              hint="write `ssh: {dispatcher: HOST, hosts: [...]}` in the fleet file")
        return found

    def transport(self, machine: ResolvedMachine) -> Transport:
        """Return the persistent access to a machine; a new one when the machine's data has changed."""
        with self.lock:
            transport = self.transports.get(machine.name)
            if transport is None or transport.machine != machine:
                transport = self.transports[machine.name] = self._made(machine)
            return transport

    def _made(self, machine: ResolvedMachine) -> Transport:
        if machine.role is Role.DISPATCHER:
            return SshTransport(machine, self.keys) if self.laptop else LocalTransport(machine)
        head = next((m for m in self._named.values() if m.role is Role.DISPATCHER), None) if self.laptop else None
        through = self.transport(head) if head is not None else None
        return SshTransport(machine, self.keys, through if isinstance(through, SshTransport) else None)

    # ---- hosts

    def views(self) -> list[MachineView]:
        return self.poller.views(self.machines())

    def _on_report(self, view: MachineView, report: Report) -> None:
        """Process an answer: record hosts that are gone, end unwanted ones, count failed launches."""
        with self.lock:
            there = {h.request_id: h for h in report.hosts}
            for held in view.report.hosts if view.report else ():
                if held.request_id not in there:
                    self.record_end(held.line, report.at, "it was removed from its machine")
            for held in report.hosts:
                self.gone.pop(held.request_id, None)
                self._count(view.machine, held)
                if held.request_id in self.unwanted:
                    Thread(target=self.end_late, args=(view.machine, held), daemon=True).start()

    def _count(self, machine: ResolvedMachine, held: ListedHost) -> None:
        known = self.failed.get(machine.name)
        if held.line.state is CloudState.RUNNING:
            self.failed.pop(machine.name, None)
        elif held.failed and (known is None or known.last != held.request_id):
            count = known.count + 1 if known else 1
            wait_s = growing_s(count, TRY_AGAIN_S, TRY_AGAIN_MAX_S)
            self.failed[machine.name] = Failures(held.failed, time.monotonic() + wait_s, count, held.request_id)

    def record_end(self, line: CloudHost, at: float, why: str) -> None:
        """Record a host that has ended and is gone from its machine."""
        with self.lock:
            self.unwanted.pop(line.request_id, None)
            if line.request_id not in self.gone:
                ended = line if listing.ended(line) else listing.closed(line, at, why)
                self.gone[line.request_id] = ended, time.monotonic() + ENDED_S

    def listed(self, views: Iterable[MachineView]) -> list[CloudHost]:
        """List every host, of any fleet."""
        lines: dict[str, CloudHost] = {}
        for view in views:
            for held in view.report.hosts if view.report else ():
                lines[held.request_id] = self._line(view, held)
        now = time.monotonic()
        with self.lock:
            self.gone = {h: g for h, g in self.gone.items() if now < g[1]}
            return [*lines.values(), *(line for host, (line, _) in self.gone.items() if host not in lines)]

    def _line(self, view: MachineView, held: ListedHost) -> CloudHost:
        line = replace(held.line, ssh=view.machine.access(
            jump=self.laptop and view.machine.role is not Role.DISPATCHER))
        if listing.ended(line) or view.trouble is None or not view.away:
            return line
        asked = self.unwanted.get(held.request_id)
        if asked is not None and time.monotonic() - asked >= GIVE_UP_S:
            assert view.report is not None
            return listing.closed(line, view.report.at, f"given up, since its machine does not answer: {view.trouble}")
        return listing.away(line, f"does not answer over SSH: {view.trouble}")

    def find(self, request_id: str) -> tuple[MachineView, ListedHost]:
        """Return the host and its machine.

        Raises UsageError if no machine holds it; MachineError if its machine does not answer now.
        """
        views = self.views()
        for view in views:
            for held in view.report.hosts if view.report else ():
                if held.request_id == request_id:
                    if view.trouble is not None:
                        raise view.trouble
                    return view, held
        silent = [v.machine.name for v in views if v.trouble is not None]
        raise UsageError(f"there is no host '{request_id}' on any machine",
                         hint=f"{', '.join(silent)} could not be asked" if silent else "`spotfleet status` lists hosts")

    def run_change(self, machine: ResolvedMachine, text: str) -> dict[str, str]:
        """Run a script that changes the machine, and return its answers. Raises MachineError."""
        result = self.transport(machine).run(text)
        self.poller.stale(machine)
        if result.status:
            raise MachineError(machine.name, of_output(result.status, result.err, machine.root))
        return listing.read(result.out).answers

    def take_delisted(self, views: Iterable[MachineView]) -> None:
        """Give notice to hosts on machines that the script dropped; forget such machines once they are empty."""
        for view in () if self.laptop else views:
            held = view.report.hosts if view.report else ()
            since = self.extra[view.machine.name][1] if view.machine.name in self.extra else math.inf
            if time.monotonic() - since < DELISTED_S:
                if view.trouble is None:
                    self._stay(view.machine, held)
            elif not held:
                with self.lock:
                    self.extra.pop(view.machine.name, None)
            elif view.trouble is None:
                self._leave(view.machine, held)

    def _leave(self, machine: ResolvedMachine, hosts: Iterable[ListedHost]) -> None:
        for held in hosts:
            if listing.ended(held.line):
                self.end_late(machine, held)
            elif held.request_id not in self.leaving:
                with suppress(MachineError):  # the next listing tries again
                    self.run_change(machine, scripts.interrupt(machine.root, held.request_id, LEAVE_S, DELISTED))
                    self.leaving.add(held.request_id)

    def _stay(self, machine: ResolvedMachine, hosts: Iterable[ListedHost]) -> None:
        """Withdraw the notice of hosts whose machine the script lists again in time."""
        for held in hosts:
            if held.request_id in self.leaving and not listing.ended(held.line):
                with suppress(MachineError):
                    self.run_change(machine, scripts.withdraw(machine.root, held.request_id))
                    self.leaving.discard(held.request_id)

    def problems(self) -> list[str]:
        """List errors of workers' machines without a host, and of the discovery script."""
        lines = [self.discovery.trouble] if self.discovery.trouble else []
        for view in self.views():
            held = [h for h in view.report.hosts if not listing.ended(h.line)] if view.report else []
            failed = self.failed.get(view.machine.name)
            if view.machine.role is not Role.WORKER or held:
                continue
            if view.trouble is not None:
                lines.append(str(view.trouble))
            elif failed is not None:
                lines.append(f"{view.machine.name}: {failed.trouble}")
            elif view.machine.name in self.refused:
                lines.append(self.refused[view.machine.name])
        return lines

    # ---- the end of a host

    def end(self, view: MachineView, held: ListedHost) -> None:
        """Remove the host from its machine. Raises MachineError."""
        machine = view.machine
        transport, text = self.transport(machine), scripts.remove(machine.root, held.request_id)
        if isinstance(transport, LocalTransport):
            transport.run_detached(text)
            return
        report = listing.read(transport.run(text).out)
        self.poller.stale(machine)
        if "gone" in report.answers:
            self.record_end(held.line, report.at, "ended")
        if "left" in report.answers:
            raise MachineError(machine.name, Diagnosis(f"something could not be removed: {report.answers['left']}",
                                                 "remove it there, then try again"))

    def end_late(self, machine: ResolvedMachine, held: ListedHost) -> None:
        """End a host in the background. A failure is retried at the machine's next answer."""
        with self.lock:
            if held.request_id in self.ending:
                return
            self.ending.add(held.request_id)
        try:
            with suppress(MachineError):
                self.end(MachineView(machine), held)
        finally:
            self.ending.discard(held.request_id)

    def close(self) -> None:
        with self.lock:
            for transport in self.transports.values():
                transport.close()


def shortened(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[:SHORT]} ..."


_inventories: dict[str, MachineInventory] = {}
_making = RLock()


def inventory_of(config: Mapping[str, Any]) -> MachineInventory:
    """Return the instance of this configuration. Raises UsageError for an invalid one."""
    key = json.dumps(config, sort_keys=True)
    with _making:
        if key not in _inventories:
            _inventories[key] = _make(config)
        return _inventories[key]


def close_all() -> None:
    """Close the connections of every inventory of this process and forget them, as a new process would begin."""
    with _making:
        for one in _inventories.values():
            one.close()
        _inventories.clear()


def _make(config: Mapping[str, Any]) -> MachineInventory:
    try:
        spec, environment = spec_in(config), environment_in(config)
    except ValueError as error:
        raise UsageError(f"provider ssh: its configuration cannot be read: {error}",
                         hint="was the fleet made by another version of spotfleet?") from None
    laptop = config.get("side", "laptop") == "laptop"
    keys = Keyring(config.get("private_key", ""), spec.identity_file if laptop else "", users=laptop)
    return MachineInventory(spec, environment, laptop, keys, config.get("known_hosts", ""), getpass.getuser(),
                Discovery(config.get("script", ""), spec.discovery_timeout_s, spec.slots))
