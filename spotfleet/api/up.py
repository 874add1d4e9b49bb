"""`up`: from a fleet file to a fleet that has its hosts, or to the reasons why not."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, replace

from spotfleet import certs
from spotfleet.api import cloud, overssh, ssh
from spotfleet.api.down import settle
from spotfleet.api.house import Folder, House, Keys, Record
from spotfleet.api.machine import Machine, Progress, load_provider, provider_config, refuse_taken
from spotfleet.api.preview import Change, UpPlan, changes, policy_changed, preview
from spotfleet.client import Client
from spotfleet.config import FleetFile
from spotfleet.errors import DispatcherUnreachable, NoCapacity, SpotfleetError, UsageError
from spotfleet.messages import FleetStatus, HostStatus
from spotfleet.model import FleetSpec, HostState, Role
from spotfleet.providers.aws import names

POLL_S = 0.3
SEEN_REFUSALS = 5  # the newest, named when a fleet does not come up


@dataclass(frozen=True)
class Up:
    plan: UpPlan
    status: FleetStatus
    taken_over: bool = False  # by a dispatcher on another machine than before


def plan_up(house: House, spec: FleetSpec) -> UpPlan:
    """What `up` would do; changes nothing. Raises UsageError for a change that needs a new fleet, and NeedsPerson."""
    return _planned(house, spec, "")[0]


def _planned(house: House, spec: FleetSpec, region: str) -> tuple[UpPlan, Record]:
    """The plan, and the record that a fleet which is made by it has; `region`: that of a plan that was agreed on."""
    folder = house.folder(spec.name)
    _close_if_ended(folder)
    change, was = _change(folder, spec)
    if was:
        record = _as_now(house, folder.record, spec)
    else:
        record = Record(spec, spec.name, time.time(), provider_config(house, spec))
    provider, candidates = load_provider(record, folder if was else None), ()
    provider.check()
    if was is None and spec.aws is not None:
        settled, candidates = cloud.settle(provider, record.provider_config, spec, region)
        record = replace(record, provider_config=settled)
        provider = load_provider(record)
    plan = preview(spec, record.cloud_name, change, was, provider, time.time())
    if change is Change.NEW and plan.dispatcher is None:
        refuse_taken(provider, record.cloud_name)
    return replace(plan, region=cloud.region_of(record.provider_config), regions=candidates), record


def _as_now(house: House, record: Record, spec: FleetSpec) -> Record:
    """The record of a fleet that is there, with the ways in from here, which may be others than before."""
    if spec.ssh is not None:
        return replace(record, spec=spec, provider_config=provider_config(house, spec))
    if spec.aws is not None:
        return replace(record, spec=spec, provider_config=cloud.moved(record.provider_config, spec))
    return record


def bring_up(house: House, file: FleetFile, progress: Progress, timeout_s: float, region: str = "") -> Up:
    """Make the fleet, in `region` if that was agreed on, or make the running one like `file`; return once `min` hosts
    are up.

    Safe to interrupt and to call again. Raises NoCapacity when `min` is not reached within `timeout_s`; the fleet
    then goes on trying.
    """
    house.sweep()
    folder, deadline = house.folder(file.spec.name), time.monotonic() + timeout_s
    folder.give_way()
    _close_if_ended(folder)
    with folder.locked():
        plan, record = _planned(house, file.spec, region)
        if plan.change is Change.NEW:
            _make(house, folder, file, record, progress)
        elif cloud.has_sshd(file.spec):
            spec = folder.record.spec if folder.record.reached else file.spec
            folder.update(provider_config=record.provider_config, spec=spec)
        machine, before = Machine(folder), folder.record.url
        overssh.admit(machine.provider, folder, progress, first=plan.change is Change.NEW)
        machine.refuse_oversize()
        cloud.prepare(machine.provider, folder, progress)
        if folder.keys.ssh_private:
            ssh.refresh(folder, machine.left(), progress)
        url = machine.ensure(progress, timeout_s)
        client = machine.client(url, patience_s=30.0)
        if plan.change is Change.NODES:
            client.set_nodes(file.spec.nodes)
            progress(f"nodes are now {file.spec.nodes.min}..{file.spec.nodes.max}, target {file.spec.nodes.target}")
        if plan.policy_changed:
            client.set_policy(file.spec.policy)
            progress("the policy is changed")
        keys = folder.keys
        if plan.change is not Change.NEW:
            folder.save_keys(replace(keys, secrets=file.secrets))
            folder.update(spec=file.spec)
    known = {} if plan.change is Change.NEW else {h.host: h.state for h in up_hosts(client.status())}
    status = _wait_for_min(folder, client, file.spec, progress, deadline, timeout_s, known)
    if folder.keys.ssh_private:
        ssh.refresh(folder, machine.left(), progress)
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
    refused = changes(record.spec, spec)
    if refused and not _is_to_be_made_yet(folder, record, refused):
        script = "; a list that changes is what `ssh.discovery_script` is for" if "ssh" in refused else ""
        raise UsageError(f"fleet '{spec.name}' is up, and {', '.join(refused)} cannot change while it is",
                         hint=f"`spotfleet down {spec.name}` first, or give the new fleet another name{script}")
    if record.spec.nodes != spec.nodes:
        return Change.NODES, record.spec
    if record.reached and policy_changed(record.spec, spec):
        return Change.POLICY, record.spec
    return Change.SAME if record.reached else Change.CONTINUE, record.spec


def _is_to_be_made_yet(folder: Folder, record: Record, changed: list[str]) -> bool:
    """Has no machine over SSH been told `changed` yet? So what kept it from becoming the dispatcher's can be mended."""
    return not record.reached and not set(changed) - {"ssh", "environment"} and not Machine(folder).left()


def _make(house: House, folder: Folder, file: FleetFile, record: Record, progress: Progress) -> None:
    if folder.exists:
        house.put_away(folder)
    always = cloud.makes_machines(file.spec)  # it remembers also what it lists no more
    listed = [h for h in load_provider(record).hosts("" if always else file.spec.name)
              if names.is_life(file.spec.name, h.fleet)]
    alive = [h.request_id for h in listed if h.state.value != "terminated"]
    if always or listed:
        record = replace(record, cloud_name=names.life(file.spec.name, secrets.token_hex(2)))
    if alive or (listed and not always):
        progress(f"the provider lists machines named {file.spec.name} already, so this fleet's are {record.cloud_name}"
                 + (f"; still alive and not ours: {', '.join(alive)}" if alive else ""))
    made = certs.make(file.spec.name, record.made_at)
    keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32), made.cert, made.key, file.secrets)
    if cloud.has_sshd(file.spec):
        keys = overssh.with_new_pair(keys, record.cloud_name)
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
        installing = host.state == HostState.LAUNCHING.value and host.why
        now = f"{host.state} {installing or ''}".strip()
        if host.role == Role.WORKER.value and told.get(host.host) != now:
            told[host.host] = now
            progress(f"{host.host} is {host.state} ({host.pool}){f': {host.why}' if host.why else ''}")
    said = re.sub(r"\d+ s\b", "", status.why)  # what is only longer so is no news
    if said and told.get("") != said:
        told[""] = said
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
