"""Provider `ssh`: machines that exist before the fleet, from a list or a host-discovery script.

    machines.py    which there are, what they offer (pure)        discovery.py   the script
    connect.py     one kept connection per machine                trouble.py     what keeps us out, in words (pure)
    scripts.py     what is done on a machine (texts)              listing.py     what it says of its hosts (pure)
    watch.py       what each machine said last                    launch.py      a machine becomes a host
    yard.py        all machines, as this process knows them       keys.py        whose key opens them
    channels.py    one channel of a connection

The truth lies on the machines (`spotfleet.bootstrap` says where). A host whose machine does not answer is listed as
STOPPED once that is sure, and as it is when it answers again; that is for as long as somebody remembers it: another
process does not list it at all. On the laptop, `hosts` raises when the dispatcher's machine does not answer, as a cloud
would that cannot be reached: what became of the fleet, nobody knows then.

Configuration, all text: `ssh` (SshSpec as JSON), `environment` (EnvironmentSpec as JSON), `known_hosts`, `script`,
`side` ("laptop" or "dispatcher"), `private_key` and `public_key`. Without `ssh` there is no machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from spotfleet.errors import NeedsPerson, NoCapacity, UsageError
from spotfleet.model import BillingRules, CloudHost, Need, Offer, PricePoint, Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.ssh import keys, listing, scripts
from spotfleet.providers.ssh import launch as launching
from spotfleet.providers.ssh.listing import Held
from spotfleet.providers.ssh.machines import Machine, offers
from spotfleet.providers.ssh.trouble import Trouble, Troubled
from spotfleet.providers.ssh.watch import View
from spotfleet.providers.ssh.yard import Yard, yard_of

UNCONFIGURED = "provider ssh: no machines are named"
NAME_THEM = "name them under `ssh` in the fleet file: `ssh: {dispatcher: head, hosts: [node1, node2:8]}`"
WHY_TAKEN = "interrupted"


class SshProvider:
    name = "ssh"

    def __init__(self, config: dict[str, str]) -> None:
        self._yard = yard_of(config) if config.get("ssh") else None

    def check(self) -> None:
        yard = self._needed()
        head = yard.head()
        if yard.discovery.trouble:
            raise NeedsPerson(yard.discovery.trouble, hint="run it by hand: each line is HOST or HOST:SLOTS")
        if yard.laptop:
            try:
                yard.door(head).run("exit 0")
            except Troubled as error:
                raise NeedsPerson(f"the dispatcher's machine cannot be entered: {error.machine}: {error.trouble.what}",
                                  hint=error.trouble.fix) from error

    def billing(self) -> BillingRules:
        return BillingRules(minimum_s=0)

    def offers(self, need: Need) -> list[Offer]:
        """Machines without a host. One that is in trouble is offered once: so whoever wants it hears why not."""
        if self._yard is None:
            return []
        views = [v for v in self._yard.views() if v.machine.name not in self._yard.extra]
        return offers([v.machine for v in views if _free(v)], need)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        """They never change."""
        found = {m.offer.zone: m.price_micros_h for m in self._yard.machines()} if self._yard else {}
        return [PricePoint(pool, since, found.get(_zone(pool), 0)) for pool in pools]

    def launch(self, request: LaunchRequest) -> None:
        yard = self._needed()
        if request.request_id in yard.gone:
            return
        machine = yard.machine(request.offer.zone)
        if machine is None:
            raise NoCapacity(f"{request.offer.zone}: it is no machine of this fleet any more",
                             hint="name it under `ssh.hosts` in the fleet file")
        try:
            self._launch(yard, machine, request)
            yard.refused.pop(machine.name, None)
        except launching.Unsure:
            raise
        except Troubled as error:
            if not error.trouble.away:
                yard.refused[machine.name] = str(error)
            raise _refusal(request.role, error) from error
        finally:
            yard.watch.stale(machine)

    def _launch(self, yard: Yard, machine: Machine, request: LaunchRequest) -> None:
        if request.role is Role.WORKER:
            self._spare(yard, machine)
        for again in (True, False):
            taken = launching.launch(yard.door(machine), machine, request, yard.environment)
            if taken is None:
                return
            if not (again and taken.held is not None and listing.ended(taken.held.line)):
                raise Troubled(machine.name, _held_by(taken))
            yard.end(View(machine), taken.held)  # it has ended, but its machine holds what is left of it

    @staticmethod
    def _spare(yard: Yard, machine: Machine) -> None:
        """Raise Troubled at once where another try would fail as the last one did."""
        view = next((v for v in yard.views() if v.machine.name == machine.name), None)
        if view is not None and view.trouble is not None:
            yard.watch.told(view)
            raise view.trouble
        failed = yard.failed.get(machine.name)
        if failed is not None and time.monotonic() < failed.until:
            raise Troubled(machine.name, failed.trouble)

    def hosts(self, fleet: str) -> list[CloudHost]:
        yard = self._yard
        if yard is None:
            return []
        views = yard.views()
        for view in views:
            if yard.laptop and view.machine.role is Role.DISPATCHER and view.trouble is not None:
                yard.watch.look(view.machine)  # one lost answer is no trouble
        yard.take_delisted(views)
        return [line for line in yard.listed(views) if fleet in ("", line.fleet)]

    def terminate(self, request_id: str) -> None:
        """Of a host on a machine that does not answer this is a wish: it is fulfilled when the machine answers."""
        yard = self._yard
        if yard is None or request_id in yard.gone:
            return
        try:
            view, held = yard.find(request_id)
            yard.end(view, held)
        except UsageError:
            return
        except Troubled as error:
            if not error.trouble.away:
                raise
            yard.unwanted.setdefault(request_id, time.monotonic())

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        yard, view, _ = self._host(request_id)
        door, path = yard.door(view.machine), _path(view, request_id, "tags.json")
        with yard.tagging:  # of what stands there, nothing is lost
            there = json.loads(door.get([path])[0])
            answers = yard.told(view.machine, scripts.tag(view.machine.root, request_id, json.dumps({**there, **tags})))
        if "unknown" in answers:
            raise _unknown(request_id)

    def boot_files(self, request_id: str) -> dict[str, str]:
        yard, view, held = self._host(request_id)
        texts = yard.door(view.machine).get([_path(view, request_id, name) for name in held.files])
        return {name: text.decode() for name, text in zip(held.files, texts, strict=True)}

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        yard, view, held = self._host(request_id)
        if listing.ended(held.line):
            raise _unknown(request_id)
        answers = yard.told(view.machine, scripts.interrupt(view.machine.root, request_id, notice_s or 0.0, WHY_TAKEN))
        if "unknown" in answers:
            raise _unknown(request_id)

    def machines(self) -> list[str]:
        return [machine.name for machine in self._yard.machines()] if self._yard is not None else []

    def admit(self, fleet: str, public_key: str) -> list[str]:
        return keys.admit(self._needed(), fleet, public_key)

    def part(self, fleet: str) -> list[str]:
        return keys.part(self._yard, fleet) if self._yard is not None else []

    def troubles(self) -> list[str]:
        return self._yard.troubles() if self._yard is not None else []

    def _needed(self) -> Yard:
        if self._yard is None:
            raise NeedsPerson(UNCONFIGURED, hint=NAME_THEM)
        return self._yard

    def _host(self, request_id: str) -> tuple[Yard, View, Held]:
        if self._yard is None:
            raise _unknown(request_id)
        return self._yard, *self._yard.find(request_id)


def _free(view: View) -> bool:
    if view.trouble is not None:
        return not view.told and (view.report is None or view.report.free)
    return view.report is not None and view.report.free


def _zone(pool: str) -> str:
    return pool.split("/")[1] if pool.count("/") >= 3 else ""


def _path(view: View, request_id: str, name: str) -> str:
    assert view.report is not None
    return f"{view.report.answers['root']}/{request_id}/{name}"


def _refusal(role: Role, error: Troubled) -> NoCapacity | NeedsPerson:
    """Of one worker's machine the fleet goes on without it; without the dispatcher's there is no fleet."""
    if role is Role.DISPATCHER:
        return NeedsPerson(f"the dispatcher's machine cannot be used: {error.machine}: {error.trouble.what}",
                           hint=error.trouble.fix or "`spotfleet up` again once that is mended")
    return NoCapacity(str(error), hint=error.trouble.fix or "another machine is tried", scope="pool")


def _held_by(taken: launching.Taken) -> Trouble:
    if taken.held is None:
        return Trouble(f"a launch of {taken.host} is under way there",
                       f"one that died is cleared {scripts.DEAD_CLAIM_MIN} min after its beginning")
    if listing.ended(taken.held.line):
        return Trouble(f"what is left of {taken.host} is being removed from it", "it is asked again")
    return Trouble(f"it bears {taken.host} of fleet {taken.held.line.fleet}",
                   f"`spotfleet down {taken.held.line.fleet}` frees it")


def _unknown(request_id: str) -> UsageError:
    return UsageError(f"there is no host '{request_id}' on any machine", hint="`spotfleet status` lists the hosts")
