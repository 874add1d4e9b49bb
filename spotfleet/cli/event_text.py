"""Conversion of events to lines for people: time, subject, and one sentence. Pure.

    11:17:30  u-0  is to leave: asked by `spotfleet drain`
    11:17:30  d-8  generation 2 (drain) from step 36: 1 worker on u-1; u-0/0/11 leaves (drain)

`events -o json` has every field; a line has the most useful ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spotfleet.cli.render import span
from spotfleet.fleet.domain.events import (
    KINDS,
    BudgetReached,
    CheckpointInTime,
    CheckpointKept,
    CheckpointLost,
    ClockSetBack,
    DemandDecided,
    DemandUnmet,
    DownDecided,
    Event,
    FileDamaged,
    FleetCreated,
    FleetDown,
    GenerationFormed,
    HistoryLost,
    HostDraining,
    HostFailed,
    HostJoined,
    HostListed,
    HostNoticed,
    HostPlaced,
    HostSilent,
    JobChanged,
    JobEvent,
    JobProgress,
    JobResized,
    JobResumed,
    JobsPruned,
    JobSubmitted,
    LaunchIntended,
    LaunchRefused,
    LogsCut,
    NodesChanged,
    PolicyChanged,
    PolicyDecided,
    PriceChanged,
    RanksDiverged,
    RatesStamped,
    ResultsLost,
    ScriptsRan,
    SetupFailed,
    StepExplained,
    TakenOver,
    TargetChanged,
    TerminateIntended,
    TokenRevoked,
    TrialHeld,
    event_from_json,
)
from spotfleet.model import BootStages, CloudState, JobState, Nodes, PolicySpec, Role, Run
from spotfleet.words import clock, counted, dollars, harmless

# These come every few seconds, for the bill; shown with --all.
ROUTINE = ("PriceChanged", "RatesStamped", "JobProgress", "TrialHeld")
PREEMPTED = {"drained": "preempted (drained in time)", "not": "preempted (not drained in time)"}  # "not drained ..."
FEW = 5  # names in a line
WIDTH = 10  # width of a line's subject, so that most lines are aligned
SCOPES = {"pool": "", "type": " (in every zone)", "quota": " (to all types of its quota)",
          "region": " (in the whole region)", "account": " (to the account)"}


def line(row: dict[str, Any], preempted: Mapping[str, str] | None = None) -> str:
    """Format one event of `events -o json`. `preempted`: result of `preemption` for the events before."""
    if row["kind"] not in KINDS:  # a newer dispatcher has written it
        subject, what = row.get("job") or row.get("request_id") or "", f"{row['kind']} (a newer spotfleet describes it)"
        return harmless(f"{clock(row['at'], seconds=True)}  {subject!s:<{WIDTH}}  {what}")
    event, at_laptop = event_from_json(row), row.get("ledger") == "laptop"
    if isinstance(event, HostListed) and event.state is CloudState.TERMINATED and preempted:
        event = replace(event, why=preempted.get(event.request_id) or event.why)
    return harmless(f"{clock(event.at, seconds=True)}  {_subject(event):<{WIDTH}}  {_sentence(event, at_laptop)}")


def preemption(row: dict[str, Any], before: Mapping[str, str]) -> Mapping[str, str]:
    """Return `before` (host -> how it leaves; "" if unknown) updated with `row`, if that is about a host with an
    interruption notice. The fleet itself ends a drained host, so the provider lists it as ended by its user."""
    match event_from_json(row) if row["kind"] in KINDS else None:
        case HostNoticed(notice="interruption", action="terminate") as event:
            return {**before, event.request_id: ""}
        case TerminateIntended() as event if event.request_id in before:
            return {**before, event.request_id: PREEMPTED.get(event.why.partition(" ")[0].rstrip(":"), "")}
    return before


def days(rows: Sequence[dict[str, Any]], day: str = "") -> Iterable[tuple[dict[str, Any], str]]:
    """Yield each row with its date (UTC) if it differs from the date of the row before, else with ""."""
    for row in rows:
        today = time.strftime("%Y-%m-%d", time.gmtime(row["at"]))
        yield row, "" if today == day else today
        day = today


def _subject(event: Event) -> str:
    match event:
        case FleetCreated():
            return event.fleet
        case NodesChanged() | FleetDown() | TakenOver() | DownDecided():
            return "fleet"
        case HistoryLost():
            return "records"
        case FileDamaged():
            return "file"
        case TargetChanged():
            return "target"
        case JobsPruned():
            return "jobs"
        case PriceChanged() | RatesStamped():
            return "price"
        case PolicyDecided() | PolicyChanged():
            return "policy"
        case DemandDecided() | DemandUnmet():
            return "demand"
        case BudgetReached():
            return "budget"
        case ClockSetBack():
            return "clock"
        case _:
            return event.job if isinstance(event, JobEvent) else event.request_id


def _sentence(event: Event, at_laptop: bool) -> str:
    match event:
        case FleetCreated():
            by = "begun on this machine" if at_laptop else "taken over by its dispatcher"
            return f"fleet on {event.provider} {by}: {_nodes(event.nodes)}"
        case NodesChanged():
            of = f"group {event.group} " if event.group else ""
            return f"{of}is to have {_nodes(event.nodes)}" + _because(event.why)
        case FleetDown():
            return ("nothing of it is listed any more" if at_laptop else "has no host any more") + _because(event.why)
        case HistoryLost():
            return f"begun anew, the old one is kept as {event.kept_as}: {event.why}"
        case FileDamaged():
            return f"{event.file}: {event.text}"
        case DownDecided():
            short = "; results that do not arrive are given up" if event.discard else ""
            return f"goes down: {event.why}" + ("; hosts get little time to send results" * event.limited) + short
        case TakenOver():
            return f"is taken over by {event.host}: {event.why}"
        case TargetChanged():
            return f"{event.target}: {event.why}" if event.why else f"{event.target} can be written to again"
        case JobsPruned():
            lost = f"; the outputs of {_few(event.unfetched)} had not been copied" if event.unfetched else ""
            return f"the files of {_few(event.jobs)} are removed, {_size(event.bytes)}: `jobs --prune`{lost}"
        case ClockSetBack():
            way = "back" if event.by_s > 0 else "forward"
            return f"is set {way} by {span(abs(event.by_s))}; all that waits goes on by the new time"
        case PriceChanged():
            return f"{event.pool} costs {dollars(event.micros_h)}/h, on demand {dollars(event.on_demand_micros_h)}/h"
        case RatesStamped():
            return _rates(event)
        case PolicyDecided():
            of = f"group {event.group}: " if event.group else ""
            return f"{of}{event.spot} spot and {event.on_demand} on-demand hosts" + _because(event.why)
        case DemandDecided():
            of = f" of group {event.group}" if event.group else ""
            return f"{counted(event.hosts, 'host')}{of}" + _because(event.why)
        case DemandUnmet():
            return "; ".join(event.shapes.values()) or "all that waits in Ray gets hosts"
        case PolicyChanged():
            return f"is now {_policy(event.policy)}" + _because(event.why)
        case BudgetReached():
            return f"{event.percent} % of {event.limit}: {event.why}"
        case _:
            return _of_job(event) if isinstance(event, JobEvent) else _of_host(event, at_laptop)


def _policy(policy: PolicySpec) -> str:
    parts = [policy.spot_policy, f"{policy.on_demand_base} on demand at least" if policy.on_demand_base else "",
            f"deadline {span(policy.deadline_s)}" if policy.deadline_s else "",
            f"max_cost {dollars(policy.max_micros, 2)}" if policy.max_micros else "",
            f"max_hourly_cost {dollars(policy.max_micros_h)}/h" if policy.max_micros_h else "",
            "replace_slow" if policy.replace_slow else ""]
    return ", ".join(filter(None, parts))


def _of_host(event: Event, at_laptop: bool) -> str:
    match event:
        case LaunchIntended():
            return ("dispatcher" if event.role is Role.DISPATCHER else "host") + " is launched" + _because(event.why)
        case LaunchRefused():
            return f"refused{SCOPES.get(event.scope, f' ({event.scope})')}" + _because(event.why)
        case HostPlaced():
            return f"the provider chose {event.offer.pool}"
        case HostListed():
            return _listed(event)
        case HostJoined():
            is_up = f"answers at {event.incarnation}" if "://" in event.incarnation else "is up: its agent has joined"
            return is_up + _boot(event.boot)
        case HostSilent():
            return "does not answer any more" if at_laptop else "is silent: its connection is lost"
        case HostFailed():
            return f"failed before it joined: {event.why}" + (f" -- {event.then}" if event.then else "")
        case HostNoticed() if event.notice != "interruption":
            hint = f"got a hint from the provider ({event.notice}): checkpoints are written, training goes on here"
            return hint + _because(event.why)
        case HostNoticed():
            end = {"terminate": "terminated", "stop": "stopped"}.get(event.action, f"subject to {event.action}")
            return f"got an interruption notice: it will be {end} in {event.seconds_left:.0f} s"
        case HostDraining():
            return "is to leave" + _because(event.why)
        case TerminateIntended():
            return "is being terminated" + _because(event.why)
        case TokenRevoked():
            return "is trusted no more" + _because(event.why)
        case _:
            raise AssertionError(f"no sentence for {event}")


def _boot(boot: BootStages | None) -> str:
    if boot is None or boot.whole_s is None:
        return ""
    parts = (("machine", boot.machine_s), ("system", boot.system_s), ("packages", boot.setup_s),
             ("agent", boot.agent_s))
    measured = ", ".join(f"{name} {span(seconds)}" for name, seconds in parts if seconds is not None)
    return f", {span(boot.whole_s)} after its launch" + (f" ({measured})" if measured else "")


def _rates(event: RatesStamped) -> str:
    r = event.rates
    return (f"beside machines, {event.provider} {event.region} asks {dollars(r.disk_micros_gib_month)} for a GiB of "
            f"disk a month, {dollars(r.address_micros_h)}/h for an address, {dollars(r.zone_micros_gib)} for a GiB to "
            "another zone")


def _listed(event: HostListed) -> str:
    if event.missing and event.state is not CloudState.TERMINATED:
        return f"is missing from the provider's list; it was {event.state.value}"
    match event.state:
        case CloudState.PENDING:
            return f"is starting as {event.provider_id}"
        case CloudState.RUNNING:
            return f"runs at {event.address or 'no address yet'} as {event.provider_id}" + _because(event.why)
        case CloudState.STOPPED:
            return f"is stopped {_billed(event.runs)}" + _because(event.why)
        case CloudState.TERMINATED:
            unlisted = "; the provider does not list it any more" if event.missing else ""
            return f"has ended {_billed(event.runs)}" + _because(event.why) + unlisted


def _trial(event: TrialHeld) -> str:
    name = event.name or event.trial
    if not event.hosts:
        return f"trial {name} has no worker any more"
    return f"trial {name} has {counted(event.workers, 'worker')} on {', '.join(sorted(event.hosts))}"


def _of_job(event: Event) -> str:
    match event:
        case JobSubmitted():
            wanted = _range(event.min_workers, event.max_workers)
            command, *more = (event.command or event.name).strip().splitlines() or [""]
            noun = "worker" if wanted == "1" else "workers"
            return f"submitted for {wanted} {noun}: {command}" + (" ..." if more else "")
        case JobChanged():
            state = {JobState.FAILED: "has failed", JobState.SUCCEEDED: "has succeeded",
                     JobState.CANCELLED: "was cancelled"}.get(event.state, f"is {event.state.value}")
            return state + (f" at step {event.version}" if event.version else "") + _because(event.why)
        case GenerationFormed():
            start = f" from step {event.version}" if event.version else ""  # a job that starts anew counts none here
            return (f"generation {event.generation} ({event.cause}){start}: "
                    f"{counted(len(event.members), 'worker')} on {_hosts(event.members)}; {event.why}")
        case JobResized():
            return f"{event.from_size} -> {counted(event.to_size, 'worker')}" + _because(event.detail)
        case JobResumed():
            lost = (f", {counted(event.repeated, 'step')} repeated, paused for {event.pause_s * 1e3:.0f} ms"
                    if event.repeated or event.pause_s else "")  # neither when it begins
            lost += f" ({counted(event.recomputed, 'gradient')} computed again)" if event.recomputed else ""
            firsts = "".join(f"; the first step of {host} came {span(seconds)} after its launch"
                             for host, seconds in list(event.first_steps.items())[:FEW])
            more = len(event.first_steps) - FEW
            firsts += f"; and those of {counted(more, 'more host')}" if more > 0 else ""
            return f"generation {event.generation} trains: step {event.version} is done{lost}{firsts}"
        case ScriptsRan():
            if not event.workers:
                return ("the workers train in hvd.elastic.run from now on" if event.known else
                        "no worker runs the script or command any more")
            run = "run" if len(event.workers) > 1 else "runs"
            return f"{counted(len(event.workers), 'worker')} on {_hosts(event.workers)} {run} {event.why}"
        case TrialHeld():
            return _trial(event)
        case JobProgress():
            return f"at step {event.version}" + (f", {event.step_s * 1e3:.1f} ms per step" if event.step_s else "")
        case StepExplained():
            return f"generation {event.generation}: {event.why}"
        case CheckpointKept():
            at = f" at {event.url}" if event.url else ""
            return f"checkpoint of step {event.version} kept{at}: {_size(event.bytes)}, sha256 {event.digest[:12]}"
        case SetupFailed():
            return f"on {event.host}, try {event.tries}: {event.why.partition(chr(10))[0]}"
        case LogsCut():
            return (f"the oldest output of {event.source} is removed from now on: the logs of a job may take "
                    f"{_size(event.limit_bytes)}")
        case CheckpointLost():
            return f"checkpoint of step {event.version} is set aside: {event.why}"
        case CheckpointInTime():
            return f"all who held its state had to go: {event.why}"
        case ResultsLost():
            part = f"{_size(event.bytes) if event.bytes else 'a part'} of its {event.what}"
            end = f"was not collected from {event.host}, and is in {event.kept_at}" if event.kept_at else (
                f"is lost with {event.host}")
            return f"{part} {end}" + _because(event.why)
        case RanksDiverged():
            then = f"goes on from the checkpoint of step {event.checkpoint}" if event.checkpoint else "no checkpoint"
            return f"the ranks' states differ at step {event.version}, {then}: {event.why}"
        case _:
            raise AssertionError(f"no sentence for {event}")


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _nodes(nodes: Nodes) -> str:
    hosts = _range(nodes.min, nodes.max)
    return f"{hosts} {'host' if hosts == '1' else 'hosts'}, target {nodes.target}"


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}..{most}"


def _hosts(members: Sequence[str]) -> str:
    """Format the members' hosts, ordered by rank; with the number of workers where a host has several."""
    hosts = [member.partition("/")[0] for member in members]
    return ", ".join(h if hosts.count(h) == 1 else f"{h} ({hosts.count(h)})" for h in dict.fromkeys(hosts))


def _billed(runs: Sequence[Run]) -> str:
    """Format the billed time of all runs: "after 1m32s"."""
    seconds = sum(run.ended_at - run.started_at for run in runs if run.ended_at is not None)
    return f"after {span(seconds)}" + (" (interrupted)" if runs and runs[-1].taken else "")


def _few(names: Sequence[str]) -> str:
    """Format "a-1, a-2 and 31 others"."""
    return ", ".join(names) if len(names) <= FEW else f"{', '.join(names[:FEW - 1])} and {len(names) - FEW + 1} others"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
