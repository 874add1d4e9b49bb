"""All machines of one configuration, with what this process remembers of them. One for each configuration and process.

Remembered, to be quicker and kinder, never to be right: what each machine said last (`watch.py`), connections, hosts
that have ended (a machine forgets them at once), hosts to be ended that could not be reached, machines whose last host
could not be made.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock, RLock, Thread

from spotfleet.codec import from_json
from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import CloudHost, CloudState, EnvironmentSpec, Role, SshSpec
from spotfleet.providers.ssh import listing, scripts
from spotfleet.providers.ssh.connect import Door, Keyring, OwnDoor, SshDoor
from spotfleet.providers.ssh.discovery import Discovery
from spotfleet.providers.ssh.listing import Held, Report
from spotfleet.providers.ssh.machines import Machine, machines
from spotfleet.providers.ssh.trouble import Trouble, Troubled, of_output
from spotfleet.providers.ssh.watch import View, Watch

log = logging.getLogger(__name__)
ENDED_S = 600.0  # a host that has ended is listed for so long
GIVE_UP_S = 60.0  # a host to be ended, on a machine that does not answer: counts as ended after this
TRY_AGAIN_S, TRY_AGAIN_MAX_S = 15.0, 600.0  # a machine whose host could not be made is refused for so long, doubling
SHORT = 240  # characters of a reason that is repeated
LEAVE_S = 60.0  # notice for a host whose machine the script names no more
DELISTED = "the discovery script does not name its machine any more"
DELISTED_S = 15.0  # a machine that the script names no more is given up after this


@dataclass
class Failures:
    why: str
    until: float  # monotonic
    count: int = 1
    last: str = ""  # the host

    @property
    def trouble(self) -> Trouble:
        """In few words: the host's own line says all."""
        return Trouble(f"its host {self.last} could not be made: {shortened(self.why)}")


@dataclass
class Yard:
    spec: SshSpec
    environment: EnvironmentSpec
    laptop: bool
    keys: Keyring
    known_hosts: str
    user: str
    discovery: Discovery
    lock: RLock = field(default_factory=RLock)
    doors: dict[str, Door] = field(default_factory=dict)
    gone: dict[str, tuple[CloudHost, float]] = field(default_factory=dict)  # ended -> until when it is listed
    unwanted: dict[str, float] = field(default_factory=dict)  # to be ended when its machine answers -> asked at
    failed: dict[str, Failures] = field(default_factory=dict)  # machine -> how often in a row
    refused: dict[str, str] = field(default_factory=dict)  # machine -> why it could not be launched last
    extra: dict[str, tuple[Machine, float]] = field(default_factory=dict)  # not named any more -> since when
    leaving: set[str] = field(default_factory=set)  # hosts that got notice for that
    ending: set[str] = field(default_factory=set)  # hosts that a thread of ours is ending
    tagging: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.watch = Watch(self.door, self._heard)
        self._named: dict[str, Machine] = {}
        self._told = ""  # the script's trouble, as last written to the log

    # ---- machines

    def machines(self) -> list[Machine]:
        """Those that there are now, the dispatcher's first; and those that the script has ceased to name, as long as
        they hold a host."""
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
        """On the dispatcher, raises SpotfleetError as long as there was no good list at all: of machines that nobody
        names, nobody may say that they hold nothing. The laptop goes on with those of the fleet file."""
        found = self.discovery.found()
        if self.discovery.trouble != self._told:
            self._told = self.discovery.trouble
            log.warning("%s", self._told or "the discovery script is well again")
        if self.discovery.trouble and not self.discovery.ever and not self.laptop:
            raise SpotfleetError(self.discovery.trouble, hint="run it by hand: each line is HOST or HOST:SLOTS")
        return found

    def machine(self, name: str) -> Machine | None:
        return next((m for m in self.machines() if m.name == name), None)

    def head(self) -> Machine:
        """The dispatcher's. Raises NeedsPerson where none is named."""
        found = next((m for m in self.machines() if m.role is Role.DISPATCHER), None)
        if found is None:
            raise NeedsPerson("provider ssh: no machine is named for the dispatcher",
                              hint="write `ssh: {dispatcher: HOST, hosts: [...]}` in the fleet file")
        return found

    def door(self, machine: Machine) -> Door:
        """The kept way into it; another one when what is known of the machine has changed."""
        with self.lock:
            door = self.doors.get(machine.name)
            if door is None or door.machine != machine:
                door = self.doors[machine.name] = self._made(machine)
            return door

    def _made(self, machine: Machine) -> Door:
        if machine.role is Role.DISPATCHER:
            return SshDoor(machine, self.keys) if self.laptop else OwnDoor(machine)
        head = next((m for m in self._named.values() if m.role is Role.DISPATCHER), None) if self.laptop else None
        through = self.door(head) if head is not None else None
        return SshDoor(machine, self.keys, through if isinstance(through, SshDoor) else None)

    # ---- what they hold

    def views(self) -> list[View]:
        return self.watch.views(self.machines())

    def _heard(self, view: View, report: Report) -> None:
        """A machine has answered: what it does not hold any more has ended, what was to be ended is, what could not be
        made is remembered."""
        with self.lock:
            there = {h.request_id: h for h in report.hosts}
            for held in view.report.hosts if view.report else ():
                if held.request_id not in there:
                    self.bury(held.line, report.at, "it was removed from its machine")
            for held in report.hosts:
                self.gone.pop(held.request_id, None)
                self._count(view.machine, held)
                if held.request_id in self.unwanted:
                    Thread(target=self.end_late, args=(view.machine, held), daemon=True).start()

    def _count(self, machine: Machine, held: Held) -> None:
        known = self.failed.get(machine.name)
        if held.line.state is CloudState.RUNNING:
            self.failed.pop(machine.name, None)
        elif held.failed and (known is None or known.last != held.request_id):
            count = known.count + 1 if known else 1
            wait_s = min(TRY_AGAIN_S * 2 ** (count - 1), TRY_AGAIN_MAX_S)
            self.failed[machine.name] = Failures(held.failed, time.monotonic() + wait_s, count, held.request_id)

    def bury(self, line: CloudHost, at: float, why: str) -> None:
        """It has ended, and its machine does not know it any more."""
        with self.lock:
            self.unwanted.pop(line.request_id, None)
            if line.request_id not in self.gone:
                ended = line if listing.ended(line) else listing.closed(line, at, why)
                self.gone[line.request_id] = ended, time.monotonic() + ENDED_S

    def listed(self, views: Iterable[View]) -> list[CloudHost]:
        """Every host, of whatever fleet."""
        lines: dict[str, CloudHost] = {}
        for view in views:
            for held in view.report.hosts if view.report else ():
                lines[held.request_id] = self._line(view, held)
        now = time.monotonic()
        with self.lock:
            self.gone = {h: g for h, g in self.gone.items() if now < g[1]}
            return [*lines.values(), *(line for host, (line, _) in self.gone.items() if host not in lines)]

    def _line(self, view: View, held: Held) -> CloudHost:
        line = replace(held.line, ssh=view.machine.door(
            jump=self.laptop and view.machine.role is not Role.DISPATCHER))
        if listing.ended(line) or view.trouble is None or not view.away:
            return line
        asked = self.unwanted.get(held.request_id)
        if asked is not None and time.monotonic() - asked >= GIVE_UP_S:
            assert view.report is not None
            return listing.closed(line, view.report.at, f"given up, since its machine does not answer: {view.trouble}")
        return listing.away(line, f"does not answer over SSH: {view.trouble}")

    def find(self, request_id: str) -> tuple[View, Held]:
        """The host and its machine. Raises UsageError for one that no machine holds; Troubled if it may be on one that
        does not answer."""
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

    def told(self, machine: Machine, text: str) -> dict[str, str]:
        """What the machine answers to a script that changes it. Raises Troubled."""
        said = self.door(machine).run(text)
        self.watch.stale(machine)
        if said.status:
            raise Troubled(machine.name, of_output(said.status, said.err, machine.root))
        return listing.read(said.out).answers

    def take_delisted(self, views: Iterable[View]) -> None:
        """Have the hosts leave, with notice, whose machines the script has ceased to name; forget such machines once
        they hold nothing."""
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

    def _leave(self, machine: Machine, hosts: Iterable[Held]) -> None:
        for held in hosts:
            if listing.ended(held.line):
                self.end_late(machine, held)
            elif held.request_id not in self.leaving:
                with suppress(Troubled):  # the next listing tries again
                    self.told(machine, scripts.interrupt(machine.root, held.request_id, LEAVE_S, DELISTED))
                    self.leaving.add(held.request_id)

    def _stay(self, machine: Machine, hosts: Iterable[Held]) -> None:
        """Those that the script names again before their time is over."""
        for held in hosts:
            if held.request_id in self.leaving and not listing.ended(held.line):
                with suppress(Troubled):
                    self.told(machine, scripts.withdraw(machine.root, held.request_id))
                    self.leaving.discard(held.request_id)

    def troubles(self) -> list[str]:
        """What keeps workers' machines without a host from having one, and the list from being up to date."""
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

    def end(self, view: View, held: Held) -> None:
        """Have its machine remove it. Raises Troubled."""
        machine = view.machine
        door, text = self.door(machine), scripts.remove(machine.root, held.request_id)
        if isinstance(door, OwnDoor):
            door.leave(text)
            return
        said = listing.read(door.run(text).out)
        self.watch.stale(machine)
        if "gone" in said.answers:
            self.bury(held.line, said.at, "ended")
        if "left" in said.answers:
            raise Troubled(machine.name, Trouble(f"something could not be removed: {said.answers['left']}",
                                                 "remove it there, then try again"))

    def end_late(self, machine: Machine, held: Held) -> None:
        """One that nobody waits for. What goes wrong is tried again at the next answer of the machine."""
        with self.lock:
            if held.request_id in self.ending:
                return
            self.ending.add(held.request_id)
        try:
            with suppress(Troubled):
                self.end(View(machine), held)
        finally:
            self.ending.discard(held.request_id)

    def close(self) -> None:
        with self.lock:
            for door in self.doors.values():
                door.close()


def shortened(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[:SHORT]} ..."


_yards: dict[str, Yard] = {}
_making = RLock()


def yard_of(config: dict[str, str]) -> Yard:
    """That of this configuration. Raises UsageError for one that cannot be read."""
    key = json.dumps(config, sort_keys=True)
    with _making:
        if key not in _yards:
            _yards[key] = _yard(config)
        return _yards[key]


def forget() -> None:
    """As in a new process: for tests."""
    with _making:
        for one in _yards.values():
            one.close()
        _yards.clear()


def _yard(config: dict[str, str]) -> Yard:
    try:
        spec = from_json(SshSpec, json.loads(config["ssh"]))
        environment = from_json(EnvironmentSpec, json.loads(config.get("environment") or "{}"))
    except ValueError as error:
        raise UsageError(f"provider ssh: its configuration cannot be read: {error}",
                         hint="was the fleet made by another version of spotfleet?") from None
    laptop = config.get("side", "laptop") == "laptop"
    keys = Keyring(config.get("private_key", ""), spec.identity_file if laptop else "", users=laptop)
    return Yard(spec, environment, laptop, keys, config.get("known_hosts", ""), getpass.getuser(),
                Discovery(config.get("script", ""), spec.discovery_timeout_s))
