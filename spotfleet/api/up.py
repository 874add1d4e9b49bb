"""`up`: from a fleet file to a fleet that has its hosts, or to the reasons why not."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from spotfleet import certs
from spotfleet.api.down import settle
from spotfleet.api.house import Folder, House, Keys, Record
from spotfleet.api.machine import Machine, Progress, load_provider, provider_config
from spotfleet.api.preview import Change, UpPlan, changes, preview
from spotfleet.client import Client
from spotfleet.config import FleetFile
from spotfleet.errors import DispatcherUnreachable, NoCapacity, SpotfleetError, UsageError
from spotfleet.messages import FleetStatus, HostStatus
from spotfleet.model import FleetSpec, HostState, Role

POLL_S = 0.3
SEEN_REFUSALS = 5  # the newest, named when a fleet does not come up


@dataclass(frozen=True)
class Up:
    plan: UpPlan
    status: FleetStatus
    taken_over: bool = False  # by a dispatcher on another machine than before


def plan_up(house: House, spec: FleetSpec) -> UpPlan:
    """What `up` would do; changes nothing. Raises UsageError for a change that needs a new fleet, and NeedsPerson."""
    folder = house.folder(spec.name)
    _close_if_ended(folder)
    change, was = _change(folder, spec)
    if was:
        record = folder.record
    else:
        record = Record(spec, spec.name, time.time(), provider_config(house, spec))
    provider = load_provider(record)
    provider.check()
    return preview(spec, record.cloud_name, change, was, provider, time.time())


def bring_up(house: House, file: FleetFile, progress: Progress, timeout_s: float) -> Up:
    """Make the fleet, or make the running one like `file`; return once `min` hosts are up.

    Safe to interrupt and to call again. Raises NoCapacity when `min` is not reached within `timeout_s`; the fleet
    then goes on trying.
    """
    house.sweep()
    folder, deadline = house.folder(file.spec.name), time.monotonic() + timeout_s
    folder.give_way()
    _close_if_ended(folder)
    with folder.locked():
        plan = plan_up(house, file.spec)
        if plan.change is Change.NEW:
            _make(house, folder, file, progress)
        machine, before = Machine(folder), folder.record.url
        url = machine.ensure(progress, timeout_s)
        client = machine.client(url, patience_s=30.0)
        if plan.change is Change.NODES:
            client.set_nodes(file.spec.nodes)
            progress(f"nodes are now {file.spec.nodes.min}..{file.spec.nodes.max}, target {file.spec.nodes.target}")
        keys = folder.keys
        if plan.change is not Change.NEW:
            folder.save_keys(Keys(keys.admin_token, keys.fleet_secret, keys.cert, keys.key, file.secrets))
            folder.update(spec=file.spec)
    known = {} if plan.change is Change.NEW else {h.host: h.state for h in up_hosts(client.status())}
    status = _wait_for_min(folder, client, file.spec, progress, deadline, timeout_s, known)
    return Up(plan, status, before not in ("", url))


def _close_if_ended(folder: Folder) -> None:
    """A fleet that has stopped itself meanwhile is no running one, nor one whose `down` was killed at its very end."""
    if folder.exists and not (record := folder.record).down_at:
        machine = Machine(folder)
        if machine.closing or (record.reached and not machine.left()):
            settle(folder)


def _change(folder: Folder, spec: FleetSpec) -> tuple[Change, FleetSpec | None]:
    """What the file changes, and the spec of the fleet that is there; None if there is none."""
    if not folder.exists or folder.record.down_at:
        return Change.NEW, None
    record = folder.record
    if folder.fetched.exists():  # another dispatcher would bring home other results in their place
        raise SpotfleetError(f"fleet '{spec.name}' is going down: its results are here, its end was interrupted",
                             hint=f"`spotfleet down {spec.name}`, then `spotfleet up` again")
    if refused := changes(record.spec, spec):
        raise UsageError(f"fleet '{spec.name}' is up, and {', '.join(refused)} cannot change while it is",
                         hint=f"`spotfleet down {spec.name}` first, or give the new fleet another name")
    if record.spec.nodes != spec.nodes:
        return Change.NODES, record.spec
    return Change.SAME if record.reached else Change.CONTINUE, record.spec


def _make(house: House, folder: Folder, file: FleetFile, progress: Progress) -> None:
    if folder.exists:
        house.put_away(folder)
    now = time.time()
    record = Record(file.spec, file.spec.name, now, provider_config(house, file.spec))
    listed = load_provider(record).hosts(file.spec.name)
    if listed:
        record = Record(file.spec, f"{file.spec.name}-{secrets.token_hex(2)}", now, record.provider_config)
        alive = [h.request_id for h in listed if h.state.value != "terminated"]
        progress(f"the provider lists machines named {file.spec.name} already, so this fleet's are {record.cloud_name}"
                 + (f"; still alive and not ours: {', '.join(alive)}" if alive else ""))
    made = certs.make(file.spec.name, now)
    keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32), made.cert, made.key, file.secrets)
    folder.make(record, keys, made.ca)


def _wait_for_min(folder: Folder, client: Client, spec: FleetSpec, progress: Progress, deadline: float,
                  timeout_s: float, told: dict[str, str]) -> FleetStatus:
    """`told` is what is known already: host -> state, and under "" the fleet's `why`."""
    while True:
        folder.give_way()
        status = _status(folder, client)
        _tell(status, told, progress)
        if status.state in ("down", "going down"):
            folder.give_way()  # if the `down` is at work on this machine, say so
            raise SpotfleetError(f"fleet '{spec.name}' is {status.state}: {status.why}",
                                 hint=f"`spotfleet down {spec.name}`, then `spotfleet up` again")
        if len(up_hosts(status)) >= spec.nodes.min:
            return status
        if time.monotonic() >= deadline:
            raise _too_few(client, spec, status, timeout_s)
        time.sleep(POLL_S)


def _status(folder: Folder, client: Client) -> FleetStatus:
    try:
        return client.status()
    except DispatcherUnreachable:
        folder.give_way()
        if Machine(folder).left():
            raise
        raise SpotfleetError(f"fleet '{folder.name}' was taken down meanwhile: the provider lists nothing of it",
                             hint="`spotfleet up FILE` makes it anew") from None


def up_hosts(status: FleetStatus) -> list[HostStatus]:
    return [h for h in status.hosts if h.role == Role.WORKER.value and h.state == HostState.UP.value]


def _tell(status: FleetStatus, told: dict[str, str], progress: Progress) -> None:
    """Each change of a host or of what the fleet waits for, once."""
    for host in status.hosts:
        if host.role == Role.WORKER.value and told.get(host.host) != host.state:
            told[host.host] = host.state
            progress(f"{host.host} is {host.state} ({host.pool}){f': {host.why}' if host.why else ''}")
    if status.why and told.get("") != status.why:
        told[""] = status.why
        progress(status.why)


def _too_few(client: Client, spec: FleetSpec, status: FleetStatus, timeout_s: float) -> NoCapacity:
    have = len(up_hosts(status))
    try:
        refusals = [e["why"] for e in client.events() if e["kind"] == "LaunchRefused"]
    except DispatcherUnreachable:
        refusals = []
    named = list(dict.fromkeys(reversed(refusals)))[:SEEN_REFUSALS] or [status.why]
    return NoCapacity(
        f"{have} of at least {spec.nodes.min} hosts are up after {timeout_s:g} s: {'; '.join(named)}",
        hint=f"it goes on trying: watch `spotfleet status -w {spec.name}`, or end it with `spotfleet down {spec.name}`",
    )
