"""Launch of a host on a machine: claim it, copy files, start; the machine does the rest by itself.

    claim --ours--> files, wheel --> listing.json linked --> bootstrap.sh start --> (the machine reports the rest)
      '-- present: launched before          '-- linked already: another caller was first

A launch cut off before the listing is linked leaves a claim and no host. It is cleared DEAD_CLAIM_MIN later, or by
a new launch of the same host. LAUNCH_S bounds the claim and the copy together; `finish`, and the removal after a
failure, have SCRIPT_S each. A new login to the machine has limits of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, replace

from spotfleet.bootstrap import WHEEL, HostPlan, Wheel, script, wheel
from spotfleet.interruptions.folder import TAGS
from spotfleet.model import CloudHost, CloudState, EnvironmentSpec, Role, Run
from spotfleet.providers import LaunchRequest
from spotfleet.providers.ssh import diagnosis, listing, scripts
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError
from spotfleet.providers.ssh.listing import ListedHost
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.providers.ssh.transport import SCRIPT_S, Transport

LAUNCH_S = 60.0


@dataclass(frozen=True)
class MachineTaken:
    """A machine that another host or launch occupies."""

    host: str
    held: ListedHost | None  # None: an unfinished launch


class LaunchUnknown(MachineError):
    """Unknown result of a launch; repeating it is safe."""


def launch(transport: Transport, machine: ResolvedMachine, request: LaunchRequest,
           environment: EnvironmentSpec) -> MachineTaken | None:
    """Make `machine` the host of `request`. Return None if it is now or was before; MachineTaken if another host or
    launch holds it.

    Raises LaunchUnknown if the result is unknown; after any other MachineError there is no host.
    """
    end = time.monotonic() + LAUNCH_S
    root, request_id = machine.root, request.request_id
    report = _run(transport, machine, scripts.claim(root, request_id, environment.python))
    answers = report.answers
    if "present" in answers:
        return None
    if "python" in answers:
        raise MachineError(machine.name, diagnosis.no_python(environment.python, answers["python"]))
    if "held" in answers or "launching" in answers:
        host = answers.get("held") or answers["launching"]
        return MachineTaken(host, next((h for h in report.hosts if h.request_id == host), None))
    try:
        _bring(transport, machine, request, environment, report, end)
    except MachineError:
        _give_back(transport, machine, request_id)
        raise
    return None


def _bring(transport: Transport, machine: ResolvedMachine, request: LaunchRequest, environment: EnvironmentSpec,
           report: listing.Report,
           end: float) -> None:
    folder, dispatcher = report.answers["folder"], request.role is Role.DISPATCHER
    address = machine.address or report.answers["address"].removeprefix("::ffff:")
    port = int(report.answers["port"]) if dispatcher else 0
    code, brought = _code(dispatcher)
    plan = HostPlan(
        request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
        code.sha256, environment, root=folder.rpartition("/")[0],
        address=address if dispatcher else machine.address, port=port)
    line = CloudHost(
        request.request_id, f"{machine.name}/{request.request_id}", request.fleet, request.role,
        replace(request.offer, slots=machine.slots), CloudState.PENDING, (Run(report.at),), address, port)
    part = f".listing.{secrets.token_hex(4)}"
    files = {name: text.encode() for name, text in script.files(plan).items()}
    files |= {TAGS: json.dumps(request.tags).encode(), part: listing.written(line, request.boot.files).encode()}
    if brought:
        files[f"wheel/{code.name}"] = code.data
    transport.put(folder, files, end - time.monotonic())
    try:
        done = _run(transport, machine, scripts.finish(machine.root, request.request_id, part))
    except MachineError as error:
        raise LaunchUnknown(machine.name, error.trouble) if error.trouble.away else error from error
    if "lost" in done.answers:
        raise MachineError(machine.name, Diagnosis(f"{done.answers['lost'] or 'nobody'} has its claim by now"))


def _run(transport: Transport, machine: ResolvedMachine, text: str) -> listing.Report:
    result = transport.run(text, SCRIPT_S)
    if result.status:
        raise MachineError(machine.name, diagnosis.of_output(result.status, result.err, machine.root))
    return listing.read(result.out)


def _give_back(transport: Transport, machine: ResolvedMachine, request_id: str) -> None:
    """Remove everything of a failed launch; a machine that does not answer keeps a claim, which expires."""
    try:
        transport.run(scripts.remove(machine.root, request_id), SCRIPT_S)
    except MachineError:
        return


def _code(dispatcher: bool) -> tuple[Wheel, bool]:
    """Return the code for hosts, and whether it must be copied to them.

    Hosts fetch it from the dispatcher. A dispatcher has the path of its wheel in SPOTFLEET_WHEEL.
    """
    if dispatcher or not os.environ.get(WHEEL):
        return wheel.build(), True
    return wheel.running(), False
