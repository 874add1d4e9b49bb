"""Commands that change something: up, train, cancel, prune, drain, chaos, revoke, down."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from spotfleet.api import Fleet, Job
from spotfleet.api.access import ssh
from spotfleet.api.account.base import discover, read
from spotfleet.api.home import Home
from spotfleet.api.job import succeeded
from spotfleet.api.lifecycle.catalog_plan import draft
from spotfleet.api.lifecycle.down import DownResult
from spotfleet.api.lifecycle.preview import PlanKind, UpPlan
from spotfleet.api.train import RestartOptions
from spotfleet.bundle import scripts
from spotfleet.cli import habits, render
from spotfleet.cli.commands.follow import print_progress, report_queued
from spotfleet.cli.console import confirm, next_command, print_block, print_message, print_step, told_if_slow
from spotfleet.cli.options import Interrupted
from spotfleet.cli.tables import columns, table
from spotfleet.codec import to_json
from spotfleet.config import FleetFile, Given, document, load, values
from spotfleet.config.values import duration_s
from spotfleet.errors import DispatcherUnreachable, JobFailed, SpotfleetError, UsageError
from spotfleet.model import FleetSpec, JobState, Role
from spotfleet.plugins import Base
from spotfleet.protocol.messages import EndedJob, JobStatus
from spotfleet.words import are, counted, dollars, size

SHOWN_JOBS = 20  # rows of the oldest jobs; those with outputs that were never copied are all shown
SHOWN_BYTES = 1 << 16  # end of the output that is kept, so that a traceback is not printed twice


def up(file: Path, *, dryrun: bool, yes: bool, timeout: str, infra: str = "", env: Sequence[str] = (),
       from_terraform: str = "", discover: str = "") -> None:
    try:
        timeout_s = duration_s(timeout)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", hint="leave it out to wait for 10 minutes") from None
    given = Given(infra, variables(env), base=base_of(from_terraform, discover, file))
    if dryrun:
        show_plan(file, given)
        return
    loaded = load_file(file, given)
    fleet = bring_up(loaded, file, yes=yes, timeout_s=timeout_s)
    what = "" if loaded.spec.run else " SCRIPT.py"
    ray = [f"spotfleet ray start{_flag(fleet)}"] if loaded.spec.ray is not None else []
    next_command(*ray, f"spotfleet train{what}{_flag(fleet)}", *_ways_in(fleet), f"spotfleet down {fleet.name}")


def base_of(from_terraform: str, name: str, file: Path | None) -> Base | None:
    """Return the base that the command line names; None for none."""
    if from_terraform and name:
        raise UsageError("--from-terraform and --discover name a base each", hint="keep one of them")
    if (from_terraform or name) and file is None:
        raise UsageError("a base belongs to a fleet file, and none is named", hint="add the path of one (YAML)")
    if from_terraform:
        return read(from_terraform)
    return discover(name, file) if name and file is not None else None


def load_file(path: Path, given: Given) -> FleetFile:
    """Read a fleet file, and print its notes."""
    if path.suffix == ".py" and path.is_file():
        raise UsageError(f"{path} is a Python script, not a fleet file",
                         hint=f"`spotfleet up FLEET.yaml` starts a fleet, then `spotfleet train {path}` runs it")
    found = load(path, given=given)
    for line in found.notes:
        print_message(f"note: {line}")
    return found


def show_plan(path: Path, given: Given) -> None:
    """Print the plan of a file, with catalog prices where its provider cannot be asked, and what must be done first."""
    found, plan = draft(Home(), path, given)
    plan = plan or Fleet(found).plan(catalog=True)
    for line in found.notes:
        print_message(f"note: {line}")
    _refuse_unknown(plan, path)
    print(render.up_plan(replace(plan, before_up=(*found.before_up, *plan.before_up))))
    _check_offers(plan)


def bring_up(loaded: FleetFile, file: Path, *, yes: bool, timeout_s: float) -> Fleet:
    """Show the plan, ask, and bring the fleet up."""
    fleet = Fleet(loaded)
    plan = fleet.plan()
    _refuse_unknown(plan, file)
    print_block(render.up_plan(plan, columns(sys.stderr)))
    _check_offers(plan)
    if plan.change is not PlanKind.SAME and not confirm("Go on?", yes):
        raise typer.Exit(1)
    try:
        done = fleet.up(progress=print_step, timeout_s=timeout_s, agreed=plan)
    except KeyboardInterrupt:
        print_message(f"interrupted; the machines asked for so far stay. `spotfleet up {file}` goes on, "
                      f"`spotfleet down {fleet.name}` ends them")
        raise Interrupted from None
    have = [h for h in done.status.hosts if h.role == Role.WORKER.value and h.state == "up"]
    changed = "nothing to change: " if plan.change is PlanKind.SAME and not plan.kept else ""
    changed = "a new dispatcher has taken over: " if done.taken_over else changed
    target = done.status.target if done.status.wanted is None else done.status.wanted
    hosts = counted(target, "host") if len(have) == target else f"{len(have)} of {target} hosts (more are to follow)"
    hosts = hosts if target or have else "no host yet: a job makes hosts come"
    price = f", {dollars(done.status.burn_micros_h)}/h" if done.status.burn_micros_h else ""
    print_message(f"{changed}fleet {fleet.name} is up with {hosts}{price}")
    return fleet


def _ways_in(fleet: Fleet) -> list[str]:
    """Return the commands that open a shell on its machines, where that is possible."""
    folder = fleet.home.folder(fleet.name)
    names = [way.aliases[0] for way in ssh.read_targets(folder).ways]
    called = "ssh" if names and ssh.included(folder) else "spotfleet ssh"
    return [f"{called} {names[0]}" + (f"   (or {', '.join(names[1:3])}{' ...' if len(names) > 3 else ''})"
                                      if names[1:] else "")] if names else []


def _refuse_unknown(plan: UpPlan, file: Path) -> None:
    """Raise UsageError for words of `resources` that the provider does not know, instead of showing a plan."""
    if plan.change is PlanKind.NEW and plan.unknown and not plan.offers:
        lines = document.read(file.read_text("utf-8"), file).lines
        key = plan.unknown.partition(" ")[0]
        line = lines.get(("resources", key)) or lines.get(("resources",))
        raise UsageError(f"{file}:{f'{line}:' if line else ''} resources: {plan.unknown}",
                         hint=_other_resources(plan.provider))


def _check_offers(plan: UpPlan) -> None:
    """Raise UsageError if no offer fits, before anything is launched."""
    if plan.change is PlanKind.NEW and not plan.offers:
        raise UsageError(f"resources: {plan.why}", hint=_other_resources(plan.provider))
    if plan.change is PlanKind.NEW and plan.unsold:
        group, _, why = plan.unsold.partition(": ")
        raise UsageError(f"groups.{group}: {why}", hint=_other_resources(plan.provider))
    if plan.change is PlanKind.NEW and plan.dispatcher is None:
        raise UsageError(f"dispatcher: {plan.why}", hint="loosen `dispatcher` in the fleet file")


def _other_resources(provider: str) -> str:
    if provider == FleetSpec("").provider:
        return (f"change `resources`; or, as provider {provider} only emulates a cloud on this machine, write "
                "`provider: aws` or `provider: ssh` for real machines")
    return f"provider {provider} offers nothing that fits; change `resources` or add `any_of`"


def train(name: str, script: str, args: Sequence[str], *, detach: bool, down: bool, np: str, wait: bool,
          env: Sequence[str], secret: Sequence[str], name_of_job: str, spares: int, slots: int, priority: int,
          resize_policy: str, growth: str, deadline: str, work: str, restarts: RestartWords,
          group: str = "") -> None:
    deadline_s, (work_s, work_steps) = due(deadline, work)
    fleet = Fleet(name)
    job = fleet.train(script, args, np=workers(np) if np else None, name=name_of_job, envs=variables(env),
                      secrets=secrets(secret), down=down, wait=wait, spares=spares, slots=slots, priority=priority,
                      resize_policy=resize_policy, growth=schedule(growth), deadline_s=deadline_s, work_s=work_s,
                      work_steps=work_steps, options=_options(restarts), group=group, detach=True, progress=print_step)
    _attend(fleet, job, detach=detach, down=down)


# The options launcher, checkpoint_dir, resume_args, max_restarts, grace, no_retry.
RestartWords = tuple[str, str, str, int, str, bool]


def _options(words: RestartWords) -> RestartOptions:
    launcher, checkpoint_dir, resume_args, max_restarts, grace, no_retry = words
    try:
        grace_s = values.duration(grace)
    except ValueError as error:
        raise UsageError(f"--grace {grace}: {error}", hint="--grace 30s") from None
    return RestartOptions(launcher, not no_retry, max_restarts, grace_s, checkpoint_dir, resume_args)


def run(name: str, words: Sequence[str], tail: Sequence[str] | None, *, file: Path | None, nodes: int, each: bool,
        detach: bool, down: bool, wait: bool, env: Sequence[str], secret: Sequence[str], name_of_job: str,
        priority: int, restarts: RestartWords, group: str = "") -> None:
    """Run the words after `--`, or the task file's `run`. One word is a shell line, several are passed on as words."""
    command = tail[0] if tail and len(tail) == 1 else shlex.join(tail or ())
    if words or bool(command) == (file is not None):
        got = f"; got {' '.join(words)}" if words else ""
        raise UsageError(f"expected a command after `--`, or a task file{got}",
                         hint=f"spotfleet run -- {shlex.join(words) or 'python x.py'}, or spotfleet run -f TASK.yaml")
    if note := habits.note(command, nodes):
        print_message(f"note: {note}")
    fleet = Fleet(name)
    job = fleet.run(command, file=file, nodes=nodes, each=each, name=name_of_job, envs=variables(env),
                    secrets=secrets(secret), down=down, wait=wait, priority=priority, options=_options(restarts),
                    group=group, detach=True, progress=print_step)
    _attend(fleet, job, detach=detach, down=down)


def _attend(fleet: Fleet, job: Job, *, detach: bool, down: bool) -> None:
    """Show a job until its end, or what follows it."""
    print_message(f"job {job.id} on fleet {fleet.name}")
    if detach:
        report_queued(job)
        next_command(f"spotfleet logs -f {job.id}{_flag(fleet)}", f"spotfleet cancel {job.id}{_flag(fleet)}")
        return
    shown = _attached(fleet, job)
    if shown is not None:
        _ended(fleet, job, down, shown.decode(errors="replace"))


def _attached(fleet: Fleet, job: Job) -> bytes | None:
    """Print rank 0's output to its end; return the last of it, or None when Ctrl-C has detached."""
    shown = b""
    try:
        with print_progress(fleet, job.id):
            for data in job.logs(follow=True):
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
                shown = (shown + data)[-SHOWN_BYTES:]
        return shown
    except KeyboardInterrupt:
        print_message(f"\ndetached; job {job.id} goes on")
        next_command(f"spotfleet logs -f {job.id}{_flag(fleet)}   (attach again)",
                     f"spotfleet cancel {job.id}{_flag(fleet)}")
        return None


def _ended(fleet: Fleet, job: Job, down: bool, shown: str) -> None:
    status = final_status(fleet, job)
    if status.state == JobState.FAILED.value and not status.hint:
        status = replace(status, hint=scripts.module_advice(f"{shown}\n{status.error}"))
    if status.error.strip() in shown:  # its traceback is already printed
        status = replace(status, error="")
    failed: JobFailed | None = None
    try:
        succeeded(status, _flag(fleet))
        print_message(f"job {job.id} has {status.state}: {_done(status)}")
        if status.hint:
            print_message(f"hint: {status.hint}")
        if others := other_ranks(status):
            print_message(others)
    except JobFailed as error:
        failed = error
    if down:
        _take_down(fleet, discard=False)
    if failed:
        failed.exit_code = status.exit_status or failed.exit_code
        raise failed
    if not down:
        next_command(f"spotfleet cost {fleet.name}", f"spotfleet down {fleet.name}")


def other_ranks(status: JobStatus) -> str:
    """Return where the output is that was not shown: other processes of a command or of a script without elastic.run
    print things of their own, as with `sky launch`; those of an elastic job print the same."""
    if status.kind not in ("restart", "command") or status.max_workers < 2:
        return ""
    return f"shown was the output of rank 0; that of all ranks: `spotfleet logs {status.job} --all`"


def final_status(fleet: Fleet, job: Job) -> JobStatus:
    """Return the status of an ended job, also if the fleet has ended with it (--down) and its dispatcher is gone."""
    try:
        return job.status()
    except DispatcherUnreachable:
        if found := next((one for one in fleet.status().jobs if one.job == job.id), None):
            return found
        raise


def _done(status: JobStatus) -> str:
    """Return what a job has done: steps that were counted, else what its workers did."""
    if status.version:
        steps = f"{counted(status.version, 'step')}, {status.repeated} repeated"
        return f"{steps}; {status.tail}" if status.tail else steps
    return f"{status.why} ({counted(status.outside, 'step')} each)" if status.outside else status.why


def workers(text: str, option: str = "--np", what: str = "workers") -> tuple[int, int]:
    """Parse "MIN:MAX" or "N" into (MIN, MAX)."""
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise UsageError(f"{option} {text}: expected MIN:MAX with 1 <= MIN <= MAX",
                         hint=f"{option} 2:4 starts with 2 {what} and uses up to 4; {option} 2 is 2:2")
    return found


def schedule(text: str) -> dict[int, int]:
    """Parse "0:2,30:4" into {epoch: workers}."""
    try:
        return dict(values.growth(text)) if text else {}
    except ValueError as error:
        raise UsageError(f"--growth {text}: {error}",
                         hint="--growth 0:2,30:4 begins with 2 workers and has 4 from epoch 30 on") from None


def due(deadline: str, work: str) -> tuple[float, tuple[float, int]]:
    """Parse deadline and work: seconds until the deadline, and (seconds at full target, steps). 0 means none."""
    try:
        deadline_s = values.deadline(deadline) if deadline else 0.0
    except ValueError as error:
        raise UsageError(f"--deadline: {error}", hint="--deadline 60h counts from now") from None
    try:
        return deadline_s, values.work(work) if work else (0.0, 0)
    except ValueError as error:
        raise UsageError(f"--work: {error}", hint="--work 48h is the time that it takes with all hosts") from None


def variables(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not given and name not in os.environ:
            raise UsageError(f"--env {name}: is not in your environment", hint=f"--env {name}=VALUE, or export it")
        found[name] = value if given else os.environ[name]
    return found


def secrets(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        if "=" in name:
            name = name.partition("=")[0]
            raise UsageError(f"--secret {name}=...: a value on the command line can be seen by everybody",
                             hint="export it, then --secret NAME")
        if name not in os.environ:
            raise UsageError(f"--secret {name}: is not in your environment", hint=f"export {name}=...")
    return {name: os.environ[name] for name in names}


def cancel(name: str, job: str, *, everything: bool) -> None:
    fleet = Fleet(name)
    if everything and job:
        raise UsageError(f"cancel: expected a job or --all, got both: {job}", hint="keep one of them")
    if everything or not job:
        _cancel_all(fleet, [found for found in fleet.jobs() if not found.state.ended], really=everything)
        return
    found = fleet.job(job)
    status = found.status()
    if JobState(status.state).ended:
        print_message(f"job {job} has ended already ({status.state}: {status.why}); nothing to cancel")
        return
    print_message(f"cancelling job {job} ({status.state})")
    found.cancel()
    next_command(f"spotfleet jobs {fleet.name}")


def _cancel_all(fleet: Fleet, jobs: Sequence[Job], *, really: bool) -> None:
    """Cancel these jobs. Raises UsageError, which names them, unless that was `really` asked for."""
    names = ", ".join(found.id for found in jobs) or "none"
    if not really:
        raise UsageError("cancel: no job is named", hint=f"jobs of fleet '{fleet.name}' that have not ended: {names}; "
                                                         "`spotfleet cancel --all` ends them all")
    print_message(f"cancelling {counted(len(jobs), 'job')} of fleet {fleet.name}: {names}")
    for found in jobs:
        found.cancel()
    next_command(f"spotfleet jobs {fleet.name}")


def drain(name: str, host: str) -> None:
    fleet = Fleet(name)
    host = worker_host(fleet, host)
    print_message(f"draining {host}: its workers leave at a step boundary, and the fleet replaces it")
    fleet.drain(host)
    next_command(f"spotfleet status {fleet.name}")


def interrupt(name: str, host: str, notice_s: float | None) -> None:
    fleet = Fleet(name)
    host = worker_host(fleet, host)
    print_message(f"interrupting {host} " + ("now" if notice_s is None else f"after a notice of {notice_s:g} s"))
    fleet.interrupt(host, notice_s)
    next_command(f"spotfleet events {fleet.name}")


def worker_host(fleet: Fleet, text: str) -> str:
    """Return the name of the worker host whose name or address is `text`."""
    status = fleet.status()
    if status.state == "down":
        raise SpotfleetError(f"fleet '{fleet.name}' is down", hint="`spotfleet up FILE` makes it anew")
    workers = [h for h in status.hosts if h.role == Role.WORKER.value]
    hint = f"it has {', '.join(h.host for h in workers) or 'none now; see `spotfleet status`'}"
    if not text:
        raise UsageError(f"no host of fleet '{fleet.name}' is named", hint=hint)
    for host in status.hosts:
        if text in (host.host, host.address):
            if host in workers:
                return host.host
            raise SpotfleetError(f"{host.host} is the dispatcher's machine, which stays as long as the fleet",
                                 hint=f"of fleet '{fleet.name}' you can take away {', '.join(h.host for h in workers)}")
    raise SpotfleetError(f"fleet '{fleet.name}' has no host '{text}'", hint=hint)


def prune(name: str, *, keep: int, yes: bool, as_json: bool) -> None:
    fleet = Fleet(name)
    with told_if_slow(f"counting the files of ended jobs of fleet {fleet.name} ..."):
        found = fleet.ended_jobs(keep)
    if not found:
        if as_json:
            print("[]")
        print_message(f"nothing to remove: fleet {fleet.name} keeps the newest {counted(keep, 'job')} that "
                      f"{'have' if keep > 1 else 'has'} ended, and those of the last minute")
        return
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        _show_ended(found)
    unfetched = [job for job in found if job.unfetched_bytes]
    print_message(f"the files of {counted(len(found), 'job')} will be removed from the dispatcher's disk, "
                  f"{size(sum(job.bytes for job in found))}: logs, checkpoints, outputs")
    if unfetched:
        lost = size(sum(job.unfetched_bytes for job in unfetched))
        print_message(f"outputs of {counted(len(unfetched), 'job')} were never copied and will be lost, {lost}: "
                      f"`spotfleet outputs {unfetched[0].job}` copies them")
    if not confirm("Remove them?", yes):
        raise typer.Exit(1)
    pruned = fleet.prune([job.job for job in found])
    left = len(found) - len(pruned)
    print_message(f"removed: the files of {counted(len(pruned), 'job')}"
                  + (f"; {counted(left, 'job')} stayed, as something of them is still on its way" if left else ""))
    next_command(f"spotfleet jobs {fleet.name}", f"spotfleet cost {fleet.name} --by job")


def _show_ended(found: Sequence[EndedJob]) -> None:
    oldest = found[:SHOWN_JOBS]
    shown = [*oldest, *(job for job in found[SHOWN_JOBS:] if job.unfetched_bytes)]
    print(table(["job", "name", "state", "ended", "files", "outputs never copied"],
                [(job.job, job.name, job.state, f"{render.span(job.ended_s)} ago" if job.state != "unknown" else "-",
                  size(job.bytes), size(job.unfetched_bytes) if job.unfetched_bytes else "-") for job in shown],
                right=["files", "outputs never copied"], drop=["name", "state"]))
    if len(shown) < len(found):
        print_message(f"and {counted(len(found) - len(shown), 'newer job')} whose outputs were copied or are none")


def revoke(name: str, host: str, *, why: str, yes: bool) -> None:
    fleet = Fleet(name)
    host = worker_host(fleet, host)
    jobs = next((h.jobs for h in fleet.hosts() if h.host == host), ())
    print_message(f"fleet {fleet.name}: refuse the token of {host} from now on, for good; "
                  "end the machine and replace it")
    for job in jobs:
        print_message(f"  job {job} loses its workers there, as if they had been killed; its secrets were on that "
                      "host: change them if it was in the wrong hands")
    if not confirm("Go on?", yes):
        raise typer.Exit(1)
    fleet.revoke(host, why)
    print_message(f"{host} is trusted no more")
    next_command(f"spotfleet status {fleet.name}", f"spotfleet events {fleet.name}")


def down(name: str, *, yes: bool, discard: bool, bring_checkpoints: bool = False, as_json: bool = False) -> None:
    fleet = Fleet(name)
    if fleet.ended:
        kept, done = f"; its results are in {fleet.archive}" if fleet.archive else "", fleet.down()
        print_message(f"fleet {fleet.name} is down already; nothing of it is left{kept}")
        if as_json:
            _print_down(done)
        _report_incomplete(done, discard)
        return
    print_message(f"fleet {fleet.name}: " + (
        "copy records, logs, checkpoints and outputs to this machine, then end every machine" if not discard else
        "end every machine; what cannot be copied to this machine is lost"))
    for line in [] if yes else _to_be_cancelled(fleet):
        print_message(line)
    if not confirm("Go on?", yes):
        raise typer.Exit(1)
    try:
        _take_down(fleet, discard=discard, bring_checkpoints=bring_checkpoints, as_json=as_json)
    except KeyboardInterrupt:
        print_message(f"interrupted; `spotfleet down {fleet.name}` goes on where this stopped")
        raise Interrupted from None


def _to_be_cancelled(fleet: Fleet) -> list[str]:
    """Describe the jobs that `down` will cancel; [] if the dispatcher does not answer."""
    try:
        jobs = [j for j in fleet.status().jobs if not JobState(j.state).ended]
    except SpotfleetError:
        return []
    return [f"{are(len(jobs), 'job')} not done and will be cancelled: " +
            ", ".join(f"{j.job} ({j.state})" for j in jobs)] if jobs else []


def _take_down(fleet: Fleet, *, discard: bool, bring_checkpoints: bool = False, as_json: bool = False) -> None:
    done = fleet.down(discard=discard, bring_checkpoints=bring_checkpoints, progress=print_step)
    if done.note:
        print_message(f"note: {done.note}")
    if done.proof:
        print_message(done.proof)
    if as_json:
        _print_down(done)
    for line in (*done.missing, *done.partial):
        print_message(f"not collected: {line}")
    for line in done.elsewhere:
        print_message(line)
    found = "what was collected is" if done.missing or done.partial else "results are"
    print_message(f"fleet {fleet.name} is down: the provider lists nothing of it" +
                  (f"; {found} in {done.archive}" if done.archive else ""))
    next_command(f"spotfleet cost {fleet.name}")
    _report_incomplete(done, discard)
    if done.missing and not discard:
        raise typer.Exit(1)


def _report_incomplete(done: DownResult, discard: bool) -> None:
    """Report results that are missing from the archive without a decision of the user; the command has failed then."""
    if done.incomplete:
        print_message(done.incomplete)
        if not discard:
            raise typer.Exit(1)


def _print_down(done: DownResult) -> None:
    print(json.dumps(to_json(done), indent=1))


def _flag(fleet: Fleet) -> str:
    """Return " -c NAME" if there are several fleets, so that the fleet must be named."""
    return "" if len(fleet.home.living()) < 2 else f" -c {fleet.name}"
