"""The dispatcher's machine: the CLI keeps it with the same reconciler that the dispatcher uses for spot hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from spotfleet import providers
from spotfleet.api import cloud
from spotfleet.api.access import ssh
from spotfleet.api.home import FleetDir, FleetRecord, Home
from spotfleet.api.lifecycle import ssh_machines
from spotfleet.api.lifecycle.first_contact import DispatcherStartup, refuse_dying
from spotfleet.codec import to_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.domain.state import Host
from spotfleet.fleet.ledger import Ledger, LedgerDamaged, open_sound, problem
from spotfleet.model import CloudHost, CloudState, FleetSpec, Need, Offer, Role
from spotfleet.plugins import Machines
from spotfleet.providers import Boot, ExistingMachines, Provider
from spotfleet.providers.plugin import Config, makes_machines, plugin_of, traits_of
from spotfleet.transport.client import DispatcherClient, Endpoint

END_S = 900.0  # for a cloud to end machines; after that a person must act
QUIET_S = reconcile.MISSING_S  # listings lag by less: a machine that is not listed for so long does not exist
QUIET_TICK_S = 1.0
END_TICK_S = 1.0  # longest pause between two listings while machines end
DEARER = 3  # a dispatcher's machine may cost this many times the price of the cheapest

Progress = Callable[[str], None]


@dataclass(frozen=True)
class MachineLost:
    """Loss of the dispatcher's machine."""

    what: str
    then: str  # action of a new dispatcher
    hosts: str = ""  # the hosts that go on without a dispatcher, as text


class DispatcherMachine:
    """Dispatcher's machine of one fleet, and the fleet's machines as the provider lists them."""

    def __init__(self, folder: FleetDir) -> None:
        self.folder = folder
        record = folder.record
        self.cloud_name = record.cloud_name
        self.provider = load_provider(record, folder)
        self.failure = ""  # why its dispatcher did not answer the last request

    def ledger(self, progress: Progress) -> Ledger:
        """Open the laptop's ledger. A damaged one is set aside, and the next tick records the cloud's list again."""
        ledger, trouble = open_sound(self.folder.ledger)
        if trouble:
            progress(f"warning: {trouble}")
        return ledger

    def refuse_oversize(self) -> None:
        """Raise UsageError for a fleet whose boot files do not fit into the user data of its dispatcher's machine."""
        record = self.folder.record
        config = config_in_process(record, self.folder)
        cloud.refuse_oversize(self.folder, config, self._boot(record)(f"{self.cloud_name}-d-0", None))

    def ensure(self, progress: Progress, timeout_s: float) -> str:
        """Launch or find the machine, wait until its dispatcher answers and is the only one, and return its URL.

        A killed `down` or `up` may have left a second one: two would manage the same hosts.
        Raises NoCapacity, with the provider's reason, when that takes longer than `timeout_s`; NeedsPerson when an
        existing machine cannot become the dispatcher's.
        """
        record, deadline = self.folder.record, time.monotonic() + timeout_s
        boot, reported, refused, prepared = self._boot(record), "", "", ""
        existing = isinstance(self.provider, ExistingMachines)
        startup = DispatcherStartup(self.folder, self.provider.name,
                                    progress) if makes_machines(record.spec) else None
        ready = startup is None or record.reached  # is it worth to ask its dispatcher?
        ledger = self.ledger(progress)
        try:
            reconcile.create(ledger, self.provider, self.cloud_name, record.spec.nodes, time.time())
            before = frozenset([*ledger.state().ended, *(h.request_id for h in _dispatchers(ledger))])
            wanted = _wanted(record, 1, with_price_limit(record.spec.dispatcher, self.provider))
            if lost := self.lost():
                progress(f"{lost.what}; a new one {lost.then}")
            while True:
                self.folder.raise_if_going_down()
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
                reported = _report_actions(actions, reported, progress)
                if time.monotonic() >= deadline:
                    here = f"{self.failure}; its log is dispatcher.log in its home" if self.failure else ""
                    there = "; ".join(filter(None, [startup.why, self.failure])) if startup is not None else here
                    raise _not_up(self.folder.name, refused, there, timeout_s)
                time.sleep(self._tick_s)
                if existing:
                    prepared = self._report_preparation(ledger, before, prepared, progress)
                elif startup is not None:
                    refuse_dying([h.why for h in self._failed(ledger, before)], self.folder.name)
                    ready = self._advance_startup(startup, ledger) or record.reached
        finally:
            ledger.close()

    def _report_preparation(self, ledger: Ledger, before: frozenset[str], reported: str, progress: Progress) -> str:
        """Report the preparation of an existing machine to `progress`; return the last reported text.

        Raises NeedsPerson if the preparation failed or another fleet uses the machine: another try would fail too.
        """
        listed = [h for h in self.provider.hosts(self.cloud_name) if h.role is Role.DISPATCHER]
        own = {h.request_id for h in _dispatchers(ledger) if h.counts}
        if not own and not listed:
            refuse_machine_in_use(self.provider, self.cloud_name)
        failed = [h.why for h in listed if h.state is CloudState.TERMINATED and h.request_id in own]
        failed += [h.why for h in self._failed(ledger, before)]
        if failed:
            raise NeedsPerson(f"the dispatcher's machine could not be prepared: {failed[0]}",
                              hint="`spotfleet up` again once that is fixed")
        for line in listed:
            if line.state is not CloudState.TERMINATED and line.why and line.why != reported:
                progress(f"{line.request_id} on {line.offer.zone}: {line.why}")
                reported = line.why
        return reported

    @staticmethod
    def _failed(ledger: Ledger, before: frozenset[str]) -> list[Host]:
        """Return the dispatcher's machines that ended by themselves, except the ones in `before`."""
        return [h for name, h in ledger.state().ended.items()
                if h.role is Role.DISPATCHER and name not in before and h.terminate_at is None]

    def _advance_startup(self, startup: DispatcherStartup, ledger: Ledger) -> bool:
        """Advance the preparation of a cloud's machine by one step; return whether its dispatcher may answer now."""
        own = [h.request_id for h in _dispatchers(ledger) if h.counts]
        try:
            return startup.advance(self.provider.hosts(self.cloud_name), own[-1] if own else "")
        except NeedsPerson:
            raise
        except (SpotfleetError, OSError) as error:  # the cloud does not answer now
            startup.why = str(error)
            return False

    @property
    def _tick_s(self) -> float:
        return traits_of(self.folder.record.spec).poll_s

    def end(self, progress: Progress, *, orderly: bool) -> None:
        """End every machine of the fleet; return when the provider lists none.

        `orderly`: its dispatcher has reported that no worker host is left. Otherwise the workers are ended from here,
        and the listing must stay empty for QUIET_S: launches just before the dispatcher's death may be listed late.
        """
        deadline, reported, empty_since = time.monotonic() + END_S, "", None
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
                reported = _report_remaining(left, reported, progress)
                if time.monotonic() >= deadline:
                    listed = ", ".join(f"{h.request_id} ({h.provider_id})" for h in left)
                    names = listed or "nothing, but our records do"
                    raise SpotfleetError(f"after {END_S:g} s the provider still lists {names}",
                                         hint=f"`spotfleet down {self.folder.name}` again, or look at its console")
                time.sleep(min(self._tick_s, END_TICK_S) if empty_since is None else QUIET_TICK_S)
        finally:
            ledger.close()

    def _end_once(self, ledger: Ledger, orderly: bool) -> list[CloudHost]:
        """Do one step of `end` and return the machines still listed. Workers whose dispatcher's ledger is lost are
        recorded in ours, also those that have ended already, so that their cost is known."""
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
        """Record, once, that nothing of the fleet is left. After a kill it can be called again."""
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
        """Whether a `close` was killed before it had written fleet.json."""
        if not self.folder.ledger.exists() or isinstance(problem(self.folder.ledger), LedgerDamaged):
            return False
        ledger = Ledger(self.folder.ledger)
        try:
            return ledger.state().down is not None
        finally:
            ledger.close()

    def left(self) -> list[CloudHost]:
        """Return the machines of this fleet that the provider does not list as ended."""
        return reconcile.leftovers(self.provider, self.cloud_name)

    def locate(self) -> str:
        """Return the URL of the dispatcher's machine as the provider lists it; "" if none is running."""
        running = [h for h in self.left() if h.role is Role.DISPATCHER and h.state is CloudState.RUNNING
                   and h.address and h.port]
        return _url(running[-1].address, running[-1].port) if running else ""

    def lost(self) -> MachineLost | None:
        """Describe the loss if the dispatcher has answered before and has no machine now; None while it has one."""
        record, left = self.folder.record, self.left()
        if not record.reached or record.down_at or any(h.role is Role.DISPATCHER for h in left):
            return None
        hosts = f"{len(left)} host{'' if len(left) == 1 else 's'}"
        if left:
            return MachineLost("the dispatcher's machine is gone", f"takes over {hosts}", hosts)
        if record.spec.checkpoint.folder and not self.folder.archive.exists():
            return MachineLost("all machines are gone", f"goes on from {record.spec.checkpoint.folder}")
        return None  # the fleet has ended by itself

    def client(self, url: str, patience_s: float, *, any_version: bool = False) -> DispatcherClient:
        at = urlsplit(url)
        dial = ssh.dialer(self.folder, at.hostname or "", at.port or 0, self.left)
        endpoint = Endpoint(url, self.folder.keys.admin_token, self.folder.ca, dial)
        return DispatcherClient(endpoint, patience_s=patience_s, any_version=any_version)

    def _answering(self, ledger: Ledger) -> dict[str, str]:
        """Return the dispatcher that answers, host -> URL, among those that shall stay; {} if none does."""
        for host in _dispatchers(ledger):
            if host.counts and host.address and host.port:
                url = _url(host.address, host.port)
                self.failure = self.client(url, 0.0).why_unreachable()
                if not self.failure:
                    return {host.request_id: url}
        return {}

    def _boot(self, record: FleetRecord) -> Callable[[str, Offer], Boot]:
        keys, folder = self.folder.keys, self.folder

        config, archive = record.provider_config, str(folder.archive)
        spec = plugin_of(record.spec.provider).portable(record.spec)
        if (machines := ssh_machines.spec_of(record.spec)) is not None:
            config, archive = ssh_machines.for_dispatcher(config, keys, machines), ""  # another machine
        elif makes_machines(spec):
            config, archive = cloud.for_dispatcher(config, spec, keys), ""

        def boot(request_id: str, _offer: Offer | None) -> Boot:
            boot_config = {
                "fleet": record.cloud_name, "host": request_id, "spec": to_json(spec),
                "provider_config": config, "fleet_secret": keys.fleet_secret,
                "admin_token": keys.admin_token, "ca": folder.ca, "cert": keys.cert, "key": keys.key,
                "archive": archive, "admin_from_here": bool(keys.ssh_private),
                "webhook": keys.webhook,
            }
            return Boot("spotfleet.dispatcher", {"boot.json": json.dumps(boot_config)})

        return boot


def refuse_machine_in_use(provider: Provider, cloud_name: str) -> None:
    """Raise NeedsPerson if another fleet uses the machine that is named for the dispatcher."""
    for host in provider.hosts("") if isinstance(provider, ExistingMachines) else ():
        if host.role is Role.DISPATCHER and host.fleet != cloud_name and host.state is not CloudState.TERMINATED:
            raise NeedsPerson(f"the dispatcher's machine runs {host.request_id} of fleet {host.fleet}",
                              hint=f"`spotfleet down {host.fleet}` frees it; or name another machine")


def load_provider(record: FleetRecord, folder: FleetDir | None = None) -> Provider:
    """Load the fleet's provider. With the `folder` of an existing fleet, it uses the fleet's own key."""
    return providers.load(record.spec.provider,
                          record.provider_config if folder is None else config_in_process(record, folder))


def config_in_process(record: FleetRecord, folder: FleetDir) -> Config:
    """Return the configuration of an existing fleet with the fleet's own key, for this process."""
    if ssh_machines.spec_of(record.spec) is not None:
        return ssh_machines.with_keys(record.provider_config, folder.keys)
    if makes_machines(record.spec):
        return cloud.with_keys(record.provider_config, folder.keys)
    return record.provider_config


def record_machine(machine: DispatcherMachine, now: float, progress: Progress = lambda _line: None) -> None:
    """Record the dispatcher's machine as the cloud lists it, and its price, in the laptop's ledger."""
    record, ledger = machine.folder.record, machine.ledger(progress)
    try:
        reconcile.create(ledger, machine.provider, machine.cloud_name, record.spec.nodes, now)
        reconcile.record_listing(_wanted(record, 1, record.spec.dispatcher), ledger, machine.provider, now)
        if record.down_at:
            ledger.append(FleetDown(record.down_at, "as its folder says; the records from before are lost"))
    finally:
        ledger.close()


def provider_config(home: Home, spec: FleetSpec) -> Config:
    """Return the provider's configuration besides environment variables.

    For machines over SSH: their addresses and host keys; for a cloud: its regions and the setup of its machines; for
    the emulated cloud: its directory.
    """
    plugin = plugin_of(spec.provider)
    if plugin.traits.machines is Machines.EXISTING:
        return ssh_machines.config(spec)
    return plugin.config(spec, os.environ, str(home.path))


def with_price_limit(need: Need, provider: Provider) -> Need:
    """Return `need` with a price limit, if the user named no machine: while small machines are refused, the next one on
    sale may be forty times as expensive."""
    if need.instance_type or need.max_micros_h:
        return need
    cheapest = min((o.price_micros_h for o in provider.offers(need)), default=0)
    return replace(need, max_micros_h=cheapest * DEARER)


def _wanted(record: FleetRecord, hosts: int, need: Need) -> reconcile.Wanted:
    wanted = reconcile.Wanted(record.cloud_name, Role.DISPATCHER, hosts, (need,), tags=record.spec.tags)
    traits = traits_of(record.spec)
    return replace(wanted, launch_timeout_s=traits.boot_limit_s) if (
        traits.machines is Machines.MADE and traits.boot_limit_s) else wanted


def _dispatchers(ledger: Ledger) -> list[Host]:
    return [h for h in ledger.state().hosts if h.role is Role.DISPATCHER]


def _url(address: str, port: int) -> str:
    return f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}"


def _no_boot(request_id: str, _offer: Offer) -> Boot:
    raise AssertionError(f"{request_id}: nothing is launched while a fleet goes down")


def _report_actions(actions: list[reconcile.Action], reported: str, progress: Progress) -> str:
    for action in actions:
        match action:
            case reconcile.Launch(request_id, offer, why):
                text = f"launching dispatcher {request_id} ({offer.instance_type}, on demand): {why}"
            case reconcile.Wait(why):
                text = f"waiting: {why}"
            case _:
                text = f"{type(action).__name__.lower()} {action.request_id}: {action.why}"
        if text != reported:
            progress(text)
            reported = text
    return reported


def _report_remaining(left: list[CloudHost], reported: str, progress: Progress) -> str:
    names = ", ".join(f"{h.request_id} ({h.state.value})" for h in left)
    if names and names != reported:
        progress(f"waiting for the provider to end {names}")
    return names


def _not_up(name: str, refused: str, failure: str, timeout_s: float) -> NoCapacity:
    why = refused or f"its machine was launched but does not answer{f': {failure}' if failure else ''}"
    return NoCapacity(f"no dispatcher within {timeout_s:g} s: {why}",
                      hint=f"`spotfleet up` goes on; change `dispatcher` in the fleet file; or `spotfleet down {name}`")
