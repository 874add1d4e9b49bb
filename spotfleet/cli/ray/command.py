"""Code of `spotfleet ray`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from spotfleet.api import Fleet
from spotfleet.api.ray_cluster import RayStart
from spotfleet.cli.commands.read import emit
from spotfleet.cli.commands.write import variables, workers
from spotfleet.cli.console import next_command, print_message, print_step
from spotfleet.cli.options import Interrupted
from spotfleet.cli.tables import flow, table
from spotfleet.errors import JobFailed, SpotfleetError, UsageError
from spotfleet.protocol.ray_cluster import RayDriver, RayRequest, RayState, RayStatus
from spotfleet.words import counted, size, span

UP_S = 300.0  # for the head and the first raylet
POLL_S = 0.5
ENDED_WITH_IT = (137, 143)  # statuses of a script that is killed with its cluster


def start(name: str, *, hosts: str, gpus: int, priority: int, wait: bool, detach: bool, as_json: bool) -> None:
    fleet = Fleet(name)
    request = RayStart(workers(hosts, "--hosts", "hosts") if hosts else None, priority, gpus, wait)
    job = fleet.ray.start(request, print_step)
    print_message(f"job {job} on fleet {fleet.name} holds hosts for Ray")
    found = fleet.ray.status() if detach else _wait_until_up(fleet, job)
    if not detach:
        print_message(f"Ray is up at {found.address}, so far on {counted(len(_nodes(found)), 'host')}; more join soon"
                      if len(_nodes(found)) < len(found.hosts) else
                      f"Ray is up at {found.address}, on {counted(len(_nodes(found)), 'host')}")
    if as_json:
        emit(found)
    else:
        next_command(f"spotfleet ray status{_flag(fleet)}", f"spotfleet ray submit{_flag(fleet)} SCRIPT.py")


def _wait_until_up(fleet: Fleet, job: str) -> RayStatus:
    """Wait until a raylet has joined the head. Raises SpotfleetError if the job ends before."""
    end, last = time.monotonic() + UP_S, ""
    while True:
        found = fleet.ray.status()
        if found.job != job:
            ended = fleet.job(job).status()
            raise JobFailed(f"job {job} has ended before Ray was up: {ended.why}",
                            hint=f"spotfleet logs {job} has the output of a raylet")
        if _nodes(found):
            return found
        if found.report is not None and not found.report.ray:
            raise SpotfleetError(found.report.state.problem, hint="`spotfleet ray stop`, install it, and start again")
        if time.monotonic() > end:
            raise SpotfleetError(f"no raylet has joined within {UP_S:g} s: {found.why}",
                                 hint=f"spotfleet ray status; spotfleet logs {job}")
        if found.why != last:
            print_step(found.why)
            last = found.why
        time.sleep(POLL_S)


def _nodes(found: RayStatus) -> list:
    return [n for n in found.report.state.nodes if n.host] if found.report is not None else []


def status(name: str, *, as_json: bool) -> None:
    fleet = Fleet(name)
    found = fleet.ray.status()
    if as_json:
        emit(found)
        return
    if not found.job:
        print(f"no Ray cluster runs on fleet {fleet.name}")
        if found.drivers:
            print(f"\nscripts of the last one:\n\n{_scripts(found)}")
        next_command(f"spotfleet ray start{_flag(fleet)}")
        return
    print(text(found))


def text(found: RayStatus) -> str:
    """Return the status for people."""
    report = found.report
    state = report.state if report is not None else RayState(False, problem=found.problem or "the head starts")
    head = f"up at {found.address}" if state.up else f"not up: {state.problem}"
    versions = f", Ray {report.ray}, Python {report.python}" if report is not None and report.ray else ""
    lines = [f"job {found.job}: {found.why}", f"head: {head}{versions}"]
    if report is not None and report.starts > 1:
        lines.append(f"head: started {report.starts} times; {report.ended}")
    if report is not None and report.shared:
        lines.append(f"warning: a program in Ray can read the dispatcher's files or credentials: {report.shared}")
    if report is not None:
        lines.append(f"dashboard: spotfleet port-forward {report.dashboard}" if report.dashboard else
                     "dashboard: none; it needs ray[default] among `environment.packages`")
    rows = [(n.host, _resources(n.total), _resources(n.free), "draining" if n.draining else
             f"idle {span(n.idle_s)}" if n.idle_s else "busy") for n in state.nodes if n.host]
    joined = {row[0] for row in rows}
    rows += [(host, "", "", "its raylet has not joined") for host in found.hosts if host not in joined]
    parts = ["\n".join(map(flow, lines))]
    if rows:
        parts.append(table(("HOST", "RESOURCES", "FREE", "STATE"), sorted(rows)))
    waiting = [_request(r) for r in state.pending]
    waiting += [f"a group of {', '.join(_request(b) for b in gang.bundles)}" for gang in state.gangs]
    if waiting:
        parts.append(flow(f"waiting for room: {'; '.join(waiting)}"))
    if found.drivers:
        parts.append(_scripts(found))
    return "\n\n".join(parts)


def _scripts(found: RayStatus) -> str:
    return table(("SCRIPT", "STATE", "AGE", "COMMAND"), [
        (d.driver, d.state if d.exit_status in (None, 0) else f"{d.state} ({d.exit_status})", span(d.age_s), d.command)
        for d in found.drivers])


def _resources(found: dict[str, float]) -> str:
    return ", ".join(size(int(amount)) + f" {name}" if name in ("memory", "object_store_memory") else
                     f"{amount:g} {name}" for name, amount in found.items())


def _request(found: RayRequest) -> str:
    return f"{found.count} x {{{_resources(found.resources)}}}"


def submit(name: str, words: Sequence[str], *, detach: bool, env: Sequence[str], as_json: bool) -> None:
    fleet = Fleet(name)
    driver = fleet.ray.submit(words, variables(env), print_step)
    print_message(f"script {driver} runs beside the Ray head of fleet {fleet.name}")
    if detach:
        if as_json:
            emit({"driver": driver})
        next_command(f"spotfleet ray logs -f {driver}{_flag(fleet)}", f"spotfleet ray cancel {driver}{_flag(fleet)}")
        return
    _follow(fleet, driver)
    ended = fleet.ray.driver(driver)
    if ended.exit_status:
        raise _Failed(end_text(ended, runs=bool(fleet.ray.status().job)), ended.exit_status)


def end_text(ended: RayDriver, *, runs: bool) -> str:
    """Return how a script has ended. `runs`: the Ray cluster still does."""
    why = ", as the Ray cluster has ended" if not runs and ended.exit_status in ENDED_WITH_IT else (
        ": it was cancelled" if ended.state == "stopped" else "")
    return f"script {ended.driver} ended with status {ended.exit_status}{why}"


class _Failed(JobFailed):
    """End of a submitted script with a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status


def _follow(fleet: Fleet, driver: str) -> None:
    try:
        for data in fleet.ray.logs(driver, follow=True):
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print_message(f"script {driver} goes on")
        next_command(f"spotfleet ray logs -f {driver}{_flag(fleet)}", f"spotfleet ray cancel {driver}{_flag(fleet)}")
        raise Interrupted from None


def logs(name: str, driver: str, *, follow: bool) -> None:
    fleet = Fleet(name)
    for data in fleet.ray.logs(driver or _newest(fleet), follow=follow):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def _newest(fleet: Fleet) -> str:
    drivers = fleet.ray.status().drivers
    if not drivers:
        raise UsageError(f"no script has been submitted to the newest Ray cluster of fleet {fleet.name}",
                         hint="`spotfleet ray submit SCRIPT.py`; after `spotfleet down` the archive has their logs, "
                              "as jobs/JOB/logs/d1.log")
    print_message(f"output of {drivers[-1].driver}: {drivers[-1].command}")
    return drivers[-1].driver


def cancel(name: str, driver: str) -> None:
    fleet = Fleet(name)
    before = {d.driver: d.state for d in fleet.ray.status().drivers}
    fleet.ray.stop_driver(driver)
    state = before.get(driver, "running")
    print_message(f"script {driver} gets SIGTERM, and 5 s later SIGKILL" if state == "running" else
                  f"script {driver} had ended before: {state}")


def stop(name: str, *, as_json: bool) -> None:
    fleet = Fleet(name)
    found = fleet.ray.status()
    print_step(f"ending {counted(len(found.hosts), 'raylet')} and the head" if found.job else "no Ray cluster runs")
    job = fleet.ray.stop()
    if as_json:
        emit({"stopped": job})
    elif job:
        print_message("the Ray cluster has ended; the fleet's hosts stay")


def _flag(fleet: Fleet) -> str:
    return f" -c {fleet.name}" if len(fleet.home.living()) > 1 else ""
