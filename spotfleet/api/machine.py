"""The one machine that the CLI itself keeps: the dispatcher's, by the same reconciler that keeps the spot hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from spotfleet import providers
from spotfleet.api import cloud, overssh, ssh
from spotfleet.api.arrival import Arrival, refuse_dying
from spotfleet.api.house import Folder, House, Record
from spotfleet.client import Client, Endpoint
from spotfleet.codec import to_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.events import FleetDown
from spotfleet.fleet.fold import Host
from spotfleet.fleet.ledger import Damaged, Ledger, open_sound, problem
from spotfleet.model import CloudHost, CloudState, FleetSpec, Need, Offer, Role
from spotfleet.providers import Boot, ExistingMachines, Provider

TICK_S = 0.25
END_S = 900.0  # for a cloud to end machines; then a person must look
LOCAL_CLOUD = "SPOTFLEET_LOCAL_CLOUD"
QUIET_S = reconcile.MISSING_S  # listings lag by less: what is not listed for so long does not exist
QUIET_TICK_S = 1.0
SSH_TICK_S = 1.0  # where a listing asks every machine
CLOUD_TICK_S = 2.0  # where it asks somebody else's cloud, who counts
BOOT_S = 1800.0  # for a machine that a cloud makes, to become the dispatcher's
DEARER = 3  # a dispatcher's machine may cost so many times the cheapest

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Lost:
    what: str
    then: str  # what a new dispatcher does
    hosts: str = ""  # that go on without a dispatcher


class Machine:
    """The dispatcher's machine of one fleet, and the fleet's machines as the provider lists them."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        record = folder.record
        self.cloud_name = record.cloud_name
        self.provider = load_provider(record, folder)
        self.ailment = ""  # why its dispatcher did not answer when it was last asked

    def ledger(self, progress: Progress) -> Ledger:
        """The laptop's own; one that is damaged is set aside, and what the cloud lists is taken up again."""
        ledger, trouble = open_sound(self.folder.ledger)
        if trouble:
            progress(f"warning: {trouble}")
        return ledger

    def refuse_oversize(self) -> None:
        """Raise UsageError for a fleet whose dispatcher's machine could not be told what it must know."""
        record = self.folder.record
        cloud.refuse_oversize(self.provider, self.folder, self._boot(record)(f"{self.cloud_name}-d-0", None))

    def ensure(self, progress: Progress, timeout_s: float) -> str:
        """Launch or find the machine and wait until its dispatcher answers and is the only one; the answer is its URL.

        Another is left over from a `down` or an `up` that was killed: two would keep the same hosts.
        Raises NoCapacity, with what the provider refused, when that takes longer than `timeout_s`; NeedsPerson when a
        machine that exists cannot become it.
        """
        record, deadline = self.folder.record, time.monotonic() + timeout_s
        boot, said, refused, told = self._boot(record), "", "", ""
        existing = isinstance(self.provider, ExistingMachines)
        arrival = Arrival(self.folder, self.provider.name, progress) if cloud.makes_machines(record.spec) else None
        ready = arrival is None or record.reached  # is it worth to ask its dispatcher?
        ledger = self.ledger(progress)
        try:
            reconcile.create(ledger, self.provider, self.cloud_name, record.spec.nodes, time.time())
            before = frozenset([*ledger.state().ended, *(h.request_id for h in _dispatchers(ledger))])
            wanted = _wanted(record, 1, modest(record.spec.dispatcher, self.provider))
            if lost := self.lost():
                progress(f"{lost.what}; a new one {lost.then}")
            while True:
                self.folder.give_way()
                joined = self._answering(ledger) if ready else {}
                leaving = frozenset(h.request_id for h in _dispatchers(ledger) if not h.counts)
                actions = reconcile.tick(wanted, ledger, self.provider, boot,
                                         reconcile.Observed(joined=joined, released=leaving), time.time())
                others = [h.request_id for h in _dispatchers(ledger) if h.request_id not in joined]
                if joined and not others:
                    (url,) = joined.values()
                    self.folder.update(url=url, reached=True)
                    return url
                refused = next((a.why for a in actions if isinstance(a, reconcile.Wait)),
                               f"{', '.join(others)} of an earlier command has not ended" if joined else refused)
                said = _tell(actions, said, progress)
                if time.monotonic() >= deadline:
                    here = f"{self.ailment}; its log is dispatcher.log in its home" if self.ailment else ""
                    there = "; ".join(filter(None, [arrival.why, self.ailment])) if arrival is not None else here
                    raise _not_up(self.folder.name, refused, there, timeout_s)
                time.sleep(self._tick_s)
                if existing:
                    told = self._preparing(ledger, before, told, progress)
                elif arrival is not None:
                    refuse_dying([h.why for h in self._failed(ledger, before)], self.folder.name)
                    ready = self._arriving(arrival, ledger) or record.reached
        finally:
            ledger.close()

    def _preparing(self, ledger: Ledger, before: frozenset[str], told: str, progress: Progress) -> str:
        """Tell what a machine that existed before does to become the dispatcher's; what was told last.

        Raises NeedsPerson if that has failed, or another fleet has the machine: another try would end the same way.
        """
        listed = [h for h in self.provider.hosts(self.cloud_name) if h.role is Role.DISPATCHER]
        ours = {h.request_id for h in _dispatchers(ledger) if h.counts}
        if not ours and not listed:
            refuse_taken(self.provider, self.cloud_name)
        failed = [h.why for h in listed if h.state is CloudState.TERMINATED and h.request_id in ours]
        failed += [h.why for h in self._failed(ledger, before)]
        if failed:
            raise NeedsPerson(f"the dispatcher's machine could not be prepared: {failed[0]}",
                              hint="`spotfleet up` again once that is mended")
        for line in listed:
            if line.state is not CloudState.TERMINATED and line.why and line.why != told:
                progress(f"{line.request_id} on {line.offer.zone}: {line.why}")
                told = line.why
        return told

    @staticmethod
    def _failed(ledger: Ledger, before: frozenset[str]) -> list[Host]:
        """The dispatchers' machines that ended by themselves, but for those that had ended `before`."""
        return [h for name, h in ledger.state().ended.items()
                if h.role is Role.DISPATCHER and name not in before and h.terminate_at is None]

    def _arriving(self, arrival: Arrival, ledger: Ledger) -> bool:
        """Bring a machine that a cloud has made one step further; is it worth to ask its dispatcher?"""
        ours = [h.request_id for h in _dispatchers(ledger) if h.counts]
        try:
            return arrival.look(self.provider.hosts(self.cloud_name), ours[-1] if ours else "")
        except NeedsPerson:
            raise
        except (SpotfleetError, OSError) as error:  # a cloud that does not answer now
            arrival.why = str(error)
            return False

    @property
    def _tick_s(self) -> float:
        if cloud.makes_machines(self.folder.record.spec):
            return CLOUD_TICK_S
        return SSH_TICK_S if isinstance(self.provider, ExistingMachines) else TICK_S

    def end(self, progress: Progress, *, orderly: bool) -> None:
        """End every machine of the fleet; return when the provider lists none.

        `orderly`: its dispatcher has said that no worker host is left. Otherwise the workers are ended from here, and
        the listing must stay empty for QUIET_S: what a dispatcher launched just before it died may not be listed yet.
        """
        deadline, told, empty_since = time.monotonic() + END_S, "", None
        ledger = self.ledger(progress)
        try:
            if ledger.state().created is None:
                reconcile.create(ledger, self.provider, self.cloud_name, self.folder.record.spec.nodes, time.time())
            before = self.left()
            while True:
                left = self._end_once(ledger, orderly)
                for host in before:
                    if host.request_id not in {h.request_id for h in left}:
                        progress(f"ended {host.request_id} ({host.provider_id})")
                before = left
                empty_since = None if left or ledger.state().hosts else empty_since or time.monotonic()
                if empty_since is not None and (orderly or time.monotonic() - empty_since >= QUIET_S):
                    return
                told = _tell_left(left, told, progress)
                if time.monotonic() >= deadline:
                    listed = ", ".join(f"{h.request_id} ({h.provider_id})" for h in left)
                    names = listed or "nothing, but our ledger does"
                    raise SpotfleetError(f"after {END_S:g} s the provider still lists {names}",
                                         hint=f"`spotfleet down {self.folder.name}` again, or look at its console")
                time.sleep(min(self._tick_s, SSH_TICK_S) if empty_since is None else QUIET_TICK_S)
        finally:
            ledger.close()

    def _end_once(self, ledger: Ledger, orderly: bool) -> list[CloudHost]:
        """One step of `end`; what is still listed after it. Workers whose own ledger is lost are written down in ours,
        also those that have ended already: so their cost is known."""
        spec = self.folder.record.spec
        wanted = [_wanted(self.folder.record, 0, spec.dispatcher)]
        if not orderly:
            wanted.append(reconcile.Wanted(self.cloud_name, Role.WORKER, 0, spec.any_of, tags=spec.tags))
        for role in wanted:
            released = frozenset(h.request_id for h in ledger.state().hosts)
            reconcile.tick(role, ledger, self.provider, _no_boot, reconcile.Observed(released=released), time.time())
        left = self.left()
        for host in left if orderly else ():
            if host.role is Role.WORKER:
                self.provider.terminate(host.request_id)
        return left

    def close(self, why: str) -> None:
        """Write down, once, that nothing of the fleet is left. Killed on the way, it is simply called again."""
        ledger = Ledger(self.folder.ledger)
        try:
            if ledger.state().down is None:
                ledger.append(FleetDown(time.time(), why))
            down = ledger.state().down
            assert down is not None
            self.folder.forget_secrets()
            self.folder.update(down_at=down.at, url="")
        finally:
            ledger.close()

    @property
    def closing(self) -> bool:
        """Did a `close` begin, and die before fleet.json said so?"""
        if not self.folder.ledger.exists() or isinstance(problem(self.folder.ledger), Damaged):
            return False
        ledger = Ledger(self.folder.ledger)
        try:
            return ledger.state().down is not None
        finally:
            ledger.close()

    def left(self) -> list[CloudHost]:
        """What the provider lists of this fleet as not ended."""
        return reconcile.leftovers(self.provider, self.cloud_name)

    def locate(self) -> str:
        """Where the provider lists the dispatcher's machine now; "" if it has none that runs."""
        running = [h for h in self.left() if h.role is Role.DISPATCHER and h.state is CloudState.RUNNING
                   and h.address and h.port]
        return _url(running[-1].address, running[-1].port) if running else ""

    def lost(self) -> Lost | None:
        """What became of a fleet whose dispatcher has answered before and has no machine now; None while it has one."""
        record, left = self.folder.record, self.left()
        if not record.reached or record.down_at or any(h.role is Role.DISPATCHER for h in left):
            return None
        hosts = f"{len(left)} host{'' if len(left) == 1 else 's'}"
        if left:
            return Lost("the dispatcher's machine is gone", f"takes over {hosts}", hosts)
        if record.spec.checkpoint.folder and not self.folder.archive.exists():
            return Lost("all machines are gone", f"goes on from {record.spec.checkpoint.folder}")
        return None  # it has ended by itself

    def client(self, url: str, patience_s: float, *, any_version: bool = False) -> Client:
        at = urlsplit(url)
        dial = ssh.dialer(self.folder, at.hostname or "", at.port or 0, self.left)
        endpoint = Endpoint(url, self.folder.keys.admin_token, self.folder.ca, dial)
        return Client(endpoint, patience_s=patience_s, any_version=any_version)

    def _answering(self, ledger: Ledger) -> dict[str, str]:
        """The dispatcher that answers, host -> URL, of those that shall stay; {} if none does."""
        for host in _dispatchers(ledger):
            if host.counts and host.address and host.port:
                url = _url(host.address, host.port)
                self.ailment = self.client(url, 0.0).ailment()
                if not self.ailment:
                    return {host.request_id: url}
        return {}

    def _boot(self, record: Record) -> Callable[[str, Offer], Boot]:
        keys, folder = self.folder.keys, self.folder

        config, archive, spec = record.provider_config, str(folder.archive), cloud.elsewhere(record.spec)
        if spec.ssh is not None:
            config, archive = overssh.for_dispatcher(config, keys, spec.ssh), ""  # another machine
        elif cloud.makes_machines(spec):
            config, archive = cloud.for_dispatcher(config, keys), ""

        def boot(request_id: str, _offer: Offer | None) -> Boot:
            told = {
                "fleet": record.cloud_name, "host": request_id, "spec": to_json(spec),
                "provider_config": config, "fleet_secret": keys.fleet_secret,
                "admin_token": keys.admin_token, "ca": folder.ca, "cert": keys.cert, "key": keys.key,
                "archive": archive, "admin_from_here": bool(keys.ssh_private),
            }
            return Boot("spotfleet.dispatcher", {"boot.json": json.dumps(told)})

        return boot


def refuse_taken(provider: Provider, cloud_name: str) -> None:
    """Raise NeedsPerson where another fleet has the machine that is named for the dispatcher."""
    for host in provider.hosts("") if isinstance(provider, ExistingMachines) else ():
        if host.role is Role.DISPATCHER and host.fleet != cloud_name and host.state is not CloudState.TERMINATED:
            raise NeedsPerson(f"the dispatcher's machine bears {host.request_id} of fleet {host.fleet}",
                              hint=f"`spotfleet down {host.fleet}` frees it; or name another machine")


def load_provider(record: Record, folder: Folder | None = None) -> Provider:
    """`folder`: of a fleet that is made, whose own key opens its machines."""
    config = record.provider_config
    if record.spec.ssh is not None and folder is not None:
        config = overssh.with_keys(config, folder.keys)
    elif cloud.makes_machines(record.spec) and folder is not None:
        config = cloud.with_keys(config, folder.keys)
    return providers.load(record.spec.provider, config)


def watch(machine: Machine, now: float, progress: Progress = lambda _line: None) -> None:
    """Write down what the cloud lists of the dispatcher's machine, and what it costs."""
    record, ledger = machine.folder.record, machine.ledger(progress)
    try:
        reconcile.create(ledger, machine.provider, machine.cloud_name, record.spec.nodes, now)
        reconcile.look(_wanted(record, 1, record.spec.dispatcher), ledger, machine.provider, now)
        if record.down_at:
            ledger.append(FleetDown(record.down_at, "as its folder says; the ledger of before is lost"))
    finally:
        ledger.close()


def provider_config(house: House, spec: FleetSpec) -> dict[str, str]:
    """What a provider must know besides the environment: machines over SSH where and who they are; a cloud where its
    machines stand and what they become; the emulated one its home, of whoever made it, which is this one unless
    SPOTFLEET_LOCAL_CLOUD names another, to play a second laptop of one account."""
    if spec.provider == "ssh":
        return overssh.config(spec)
    if spec.provider == "aws":
        return cloud.config(spec)
    return {"home": os.environ.get(LOCAL_CLOUD) or str(house.path)} if spec.provider == "local" else {}


def modest(need: Need, provider: Provider) -> Need:
    """`need` with a price limit, if the user left the machine open: where the small machines are refused for a while,
    the next one on sale may be forty times as dear."""
    if need.instance_type or need.max_micros_h:
        return need
    cheapest = min((o.price_micros_h for o in provider.offers(need)), default=0)
    return replace(need, max_micros_h=cheapest * DEARER)


def _wanted(record: Record, hosts: int, need: Need) -> reconcile.Wanted:
    wanted = reconcile.Wanted(record.cloud_name, Role.DISPATCHER, hosts, (need,), tags=record.spec.tags)
    return replace(wanted, launch_timeout_s=BOOT_S) if cloud.makes_machines(record.spec) else wanted


def _dispatchers(ledger: Ledger) -> list[Host]:
    return [h for h in ledger.state().hosts if h.role is Role.DISPATCHER]


def _url(address: str, port: int) -> str:
    return f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}"


def _no_boot(request_id: str, _offer: Offer) -> Boot:
    raise AssertionError(f"{request_id}: nothing is launched while a fleet goes down")


def _tell(actions: list[reconcile.Action], said: str, progress: Progress) -> str:
    for action in actions:
        match action:
            case reconcile.Launch(request_id, offer, why):
                text = f"launching dispatcher {request_id} ({offer.instance_type}, on demand): {why}"
            case reconcile.Wait(why):
                text = f"waiting: {why}"
            case _:
                text = f"{type(action).__name__.lower()} {action.request_id}: {action.why}"
        if text != said:
            progress(text)
            said = text
    return said


def _tell_left(left: list[CloudHost], told: str, progress: Progress) -> str:
    names = ", ".join(f"{h.request_id} ({h.state.value})" for h in left)
    if names and names != told:
        progress(f"waiting for the cloud to end {names}")
    return names


def _not_up(name: str, refused: str, ailment: str, timeout_s: float) -> NoCapacity:
    why = refused or f"its machine was launched but does not answer{f': {ailment}' if ailment else ''}"
    return NoCapacity(f"no dispatcher within {timeout_s:g} s: {why}",
                      hint=f"`spotfleet up` goes on; change `dispatcher` in the fleet file; or `spotfleet down {name}`")
