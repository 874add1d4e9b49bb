"""`up`: start or change of a fleet by its file, until its hosts are up or the reason why not is known."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass, replace

from spotfleet import names, plugins
from spotfleet.api import cloud
from spotfleet.api.access import ssh
from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.api.lifecycle import ssh_machines
from spotfleet.api.lifecycle.boots import measured_boots
from spotfleet.api.lifecycle.catalog_plan import has_prices, plan_by_catalog
from spotfleet.api.lifecycle.down import close_if_ended
from spotfleet.api.lifecycle.preview import PlanKind, UpPlan, changes, policy_changed, preview
from spotfleet.api.machine import DispatcherMachine, Progress, load_provider, provider_config, refuse_machine_in_use
from spotfleet.config import FleetFile
from spotfleet.errors import DispatcherUnreachable, NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.model import FleetSpec, HostState, Role
from spotfleet.plugins import Machines
from spotfleet.protocol.messages import FleetStatus, HostStatus
from spotfleet.providers.plugin import makes_machines, plugin_of, traits_of
from spotfleet.transport import certs
from spotfleet.transport.client import DispatcherClient

POLL_S = 0.3
SEEN_REFUSALS = 5  # number of newest refusals in the error when a fleet does not come up


@dataclass(frozen=True)
class UpResult:
    """Result of `up`."""

    plan: UpPlan
    status: FleetStatus
    taken_over: bool = False  # a dispatcher on another machine than before has taken over


def plan_up(home: Home, spec: FleetSpec) -> UpPlan:
    """Return what `up` would do; changes nothing. Raises NeedsPerson; UsageError for a change that needs a new fleet.
    """
    return _planned(home, spec, "", measured_boots(home.folder(spec.name), spec, living=bool(spec.policy.work_s)))[0]


def plan_without_account(home: Home, spec: FleetSpec) -> UpPlan:
    """Return what `up` would do, as `plan_up`; with the catalog's prices where the provider cannot be asked."""
    missing = "there are no credentials for its provider here"
    if not has_prices(spec) or _change(home.folder(spec.name), spec)[1] is not None:
        return plan_up(home, spec)
    if not plugin_of(spec.provider).may_have_credentials(os.environ):
        return plan_by_catalog(home, spec, missing)
    try:
        return plan_up(home, spec)
    except NeedsPerson as error:
        return plan_by_catalog(home, spec, f"its provider answers: {error}")


def _planned(home: Home, spec: FleetSpec, region: str,
             history: MarketHistory = MarketHistory()) -> tuple[UpPlan, FleetRecord]:
    """Return the plan, and the record of the fleet that it makes. `region`: that of the plan that the user accepted;
    `history`: the measured boots, for the plan's prices."""
    folder = home.folder(spec.name)
    _record_end(folder)
    change, was = _change(folder, spec)
    if was:
        record = _updated_record(home, folder.record, spec)
    else:
        record = FleetRecord(spec, spec.name, time.time(), provider_config(home, spec))
    provider, candidates = load_provider(record, folder if was else None), ()
    provider.check()
    if was is None and traits_of(spec).settles_region:
        settled, candidates = cloud.choose_region(provider, record.provider_config, spec, region)
        record = replace(record, provider_config=settled)
        provider = load_provider(record)
    plan = preview(spec, record.cloud_name, change, was, provider, time.time(), history)
    if change is PlanKind.NEW and plan.dispatcher is None:
        refuse_machine_in_use(provider, record.cloud_name)
    return replace(plan, region=plugin_of(spec.provider).region(record.provider_config), regions=candidates), record


def _updated_record(home: Home, record: FleetRecord, spec: FleetSpec) -> FleetRecord:
    """Return the record of an existing fleet with the access settings of its present file."""
    if not cloud.has_sshd(spec):
        return record
    moved = plugin_of(spec.provider).moved(record.provider_config, spec) if makes_machines(spec) else \
        provider_config(home, spec)
    return replace(record, spec=spec, provider_config=moved)


def bring_up(home: Home, file: FleetFile, progress: Progress, timeout_s: float, region: str = "") -> UpResult:
    """Make the fleet, in `region` if the user accepted one, or change the running one to match `file`; return once
    `min` hosts are up.

    Safe to interrupt and to call again. Raises NoCapacity when `min` is not reached within `timeout_s`; the fleet
    then goes on trying.
    """
    home.sweep()
    folder, deadline = home.folder(file.spec.name), time.monotonic() + timeout_s
    folder.raise_if_going_down()
    _record_end(folder)
    with folder.locked():
        plan, record = _planned(home, file.spec, region)
        if plan.change is PlanKind.NEW:
            _make(home, folder, file, record, progress)
        elif cloud.has_sshd(file.spec):
            spec = folder.record.spec if folder.record.reached else file.spec
            folder.update(provider_config=record.provider_config, spec=spec)
        machine, before = DispatcherMachine(folder), folder.record.url
        ssh_machines.install_key(machine.provider, folder, progress, new_fleet=plan.change is PlanKind.NEW)
        machine.refuse_oversize()
        cloud.prepare(machine.provider, folder, progress)
        if folder.keys.ssh_private:
            ssh.refresh(folder, machine.left(), progress)
        url = machine.ensure(progress, timeout_s)
        client = machine.client(url, patience_s=30.0)
        if plan.change is PlanKind.NODES:
            for group in file.spec.parts:
                client.set_nodes(group.nodes, group.name)
                of, nodes = f" of group {group.name}" if group.name else "", group.nodes
                progress(f"nodes{of} are now {nodes.min}..{nodes.max}, target {nodes.target}")
        if plan.policy_changed:
            client.set_policy(file.spec.policy)
            progress("the policy is changed")
        if plan.notify_changed:
            client.set_notify(file.spec.notify, file.webhook)
            progress("notifications are changed")
        keys = folder.keys
        if plan.change is not PlanKind.NEW:
            folder.save_keys(replace(keys, secrets=file.secrets, webhook=file.webhook))
            folder.update(spec=file.spec)
    known = {} if plan.change is PlanKind.NEW else {h.host: h.state for h in up_hosts(client.status())}
    status = _wait_for_min(folder, client, file.spec, progress, deadline, timeout_s, known)
    if folder.keys.ssh_private:
        ssh.refresh(folder, machine.left(), progress)
    return UpResult(plan, status, before not in ("", url))


def _record_end(folder: FleetDir) -> None:
    """Record the end of a fleet that has stopped itself, or whose `down` was killed in its last step."""
    if folder.exists and not (record := folder.record).down_at:
        machine = DispatcherMachine(folder)
        if machine.closing or (record.reached and not machine.left()):
            close_if_ended(folder)


def _change(folder: FleetDir, spec: FleetSpec) -> tuple[PlanKind, FleetSpec | None]:
    """Return the kind of change, and the spec of the existing fleet; None if there is none."""
    if not folder.exists or folder.record.down_at:
        return PlanKind.NEW, None
    record = folder.record
    if folder.fetched.exists():  # the results of another dispatcher would replace these
        raise SpotfleetError(f"fleet '{spec.name}' is going down: its results are here, its end was interrupted",
                             hint=f"`spotfleet down {spec.name}`, then `spotfleet up` again")
    refused = changes(record.spec, spec)
    if refused and not _is_to_be_made_yet(folder, record, refused):
        script = ("; a list that changes is what `ssh.discovery_script` is for"
                  if "section" in refused and _exist(spec) else "")
        keys = ", ".join(_key(field, spec) for field in refused)
        if (base := record.spec.tags.get(plugins.BASE_TAG)) and base != spec.tags.get(plugins.BASE_TAG):
            raise UsageError(f"fleet '{spec.name}' is up on base {base}, which this command does not name",
                             hint=f"add --discover {base}, or --from-terraform with the folder of that base")
        raise UsageError(f"fleet '{spec.name}' is up, and {keys} cannot change while it is",
                         hint=f"`spotfleet down {spec.name}` first, or give the new fleet another name{script}")
    if record.spec.nodes != spec.nodes or record.spec.groups != spec.groups:  # only the ranges of groups can change
        return PlanKind.NODES, record.spec
    if record.reached and policy_changed(record.spec, spec):
        return PlanKind.POLICY, record.spec
    return PlanKind.SAME if record.reached else PlanKind.CONTINUE, record.spec


def _key(field: str, spec: FleetSpec) -> str:
    """Return the fleet file's name of a field of the spec."""
    return {"any_of": "resources", "orphan_after_s": "orphan_after", "max_lifetime_s": "max_lifetime",
            "section": spec.provider}.get(field, field)


def _is_to_be_made_yet(folder: FleetDir, record: FleetRecord, changed: list[str]) -> bool:
    """Return whether the fleet does not exist on any machine over SSH yet, so that `changed` settings, such as an error
    that stopped the dispatcher's machine, can still be corrected."""
    correctable = {"section", "environment"} if _exist(record.spec) else {"environment"}
    return not record.reached and not set(changed) - correctable and not DispatcherMachine(folder).left()


def _exist(spec: FleetSpec) -> bool:
    return traits_of(spec).machines is Machines.EXISTING


def _make(home: Home, folder: FleetDir, file: FleetFile, record: FleetRecord, progress: Progress) -> None:
    if folder.exists:
        old = home.move_to_old(folder)
        kept = f"; its results are in {old.archive}" if old.archive.exists() else ""
        progress(f"the earlier fleet {folder.name} is now called {old.name}{kept}")
    always = makes_machines(file.spec)  # a cloud remembers ids of machines that it no longer lists
    listed = [h for h in load_provider(record).hosts("" if always else file.spec.name)
              if names.is_life(file.spec.name, h.fleet)]
    alive = [h.request_id for h in listed if h.state.value != "terminated"]
    if always or listed or file.spec.groups:  # else FLEET-GROUP-0 may be a host of a fleet named FLEET-GROUP
        record = replace(record, cloud_name=names.life(file.spec.name, secrets.token_hex(2),
                                                       several=plugins.JOINED in file.spec.provider))
    if alive or (listed and not always):
        whose = "machines of another fleet" if alive else "ended machines of an earlier fleet"
        progress(f"the provider lists {whose} named {file.spec.name}, so this fleet's machines are named "
                 f"{record.cloud_name}" + (f"; still running, not of this fleet: {', '.join(alive)}" if alive else ""))
    made = certs.make(file.spec.name, record.made_at)
    keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32), made.cert, made.key, file.secrets,
                webhook=file.webhook)
    if cloud.has_sshd(file.spec):
        keys = ssh_machines.with_new_pair(keys, record.cloud_name)
    folder.make(record, keys, made.ca)


def _wait_for_min(folder: FleetDir, client: DispatcherClient, spec: FleetSpec, progress: Progress, deadline: float,
                  timeout_s: float, reported: dict[str, str]) -> FleetStatus:
    """Poll until `min` hosts are up. `reported`: last reported state by host, and under "" the fleet's `why`."""
    while True:
        folder.raise_if_going_down()
        status = _status(folder, client)
        _report(status, reported, progress)
        if status.state in ("down", "going down"):
            folder.raise_if_going_down()  # a `down` that runs on this machine has a better message
            raise SpotfleetError(f"fleet '{spec.name}' is {status.state}: {status.why}",
                                 hint=f"`spotfleet down {spec.name}`, then `spotfleet up` again")
        if all(len(up_hosts(status, g.name)) >= g.nodes.min for g in spec.parts):
            return status
        if time.monotonic() >= deadline:
            raise _too_few(client, spec, status, timeout_s)
        time.sleep(POLL_S)


def _status(folder: FleetDir, client: DispatcherClient) -> FleetStatus:
    try:
        return client.status()
    except DispatcherUnreachable:
        folder.raise_if_going_down()
        if DispatcherMachine(folder).left():
            raise
        raise SpotfleetError(f"fleet '{folder.name}' was taken down meanwhile: the provider lists nothing of it",
                             hint="`spotfleet up FILE` makes it anew") from None


def up_hosts(status: FleetStatus, group: str = "") -> list[HostStatus]:
    """Return the hosts that are up, of all groups or of one."""
    return [h for h in status.hosts if h.role == Role.WORKER.value and h.state == HostState.UP.value
            and group in ("", h.group)]


def _report(status: FleetStatus, reported: dict[str, str], progress: Progress) -> None:
    """Report each change of a host or of the fleet's `why` once."""
    for host in status.hosts:
        installing = host.state == HostState.LAUNCHING.value and host.why
        now = f"{host.state} {installing or ''}".strip()
        if host.role == Role.WORKER.value and reported.get(host.host) != now:
            reported[host.host] = now
            progress(f"{host.host} is {host.state} ({host.pool}){f': {host.why}' if host.why else ''}")
    message = re.sub(r"\d+ s\b", "", status.why)  # a longer waiting time is no change
    if message and reported.get("") != message:
        reported[""] = message
        progress(status.why)


def _too_few(client: DispatcherClient, spec: FleetSpec, status: FleetStatus, timeout_s: float) -> NoCapacity:
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
