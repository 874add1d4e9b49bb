"""A machine becomes a host: claimed, brought its files, started; the rest the machine does by itself.

    claim --ours--> files, wheel --> listing.json linked --> bootstrap.sh start --> (the machine says the rest)
      '-- present: launched before          '-- linked already: somebody else was first

Cut off before the listing is linked there is a claim and no host; it is cleared DEAD_CLAIM_MIN later, or by asking for
the same host again. Every wait is bounded by LAUNCH_S in all, entering the machine anew apart.
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
from spotfleet.providers.ssh import listing, scripts, trouble
from spotfleet.providers.ssh.connect import SCRIPT_S, Door
from spotfleet.providers.ssh.listing import Held
from spotfleet.providers.ssh.machines import Machine
from spotfleet.providers.ssh.trouble import Trouble, Troubled

LAUNCH_S = 60.0


@dataclass(frozen=True)
class Taken:
    """Somebody else has the machine."""

    host: str
    held: Held | None  # None: a launch that has not come to its end


class Unsure(Troubled):
    """Whether there is a host now, nobody knows; asking again is safe."""


def launch(door: Door, machine: Machine, request: LaunchRequest, environment: EnvironmentSpec) -> Taken | None:
    """Make `machine` the host of `request`, unless it is already. None when it is; Taken when it is another's.

    Raises Troubled, and then there is no host; or Unsure.
    """
    end = time.monotonic() + LAUNCH_S
    root, request_id = machine.root, request.request_id
    said = _run(door, machine, scripts.claim(root, request_id, environment.python))
    answers = said.answers
    if "present" in answers:
        return None
    if "python" in answers:
        raise Troubled(machine.name, trouble.no_python(environment.python, answers["python"]))
    if "held" in answers or "launching" in answers:
        host = answers.get("held") or answers["launching"]
        return Taken(host, next((h for h in said.hosts if h.request_id == host), None))
    try:
        _bring(door, machine, request, environment, said, end)
    except Troubled:
        _give_back(door, machine, request_id)
        raise
    return None


def _bring(door: Door, machine: Machine, request: LaunchRequest, environment: EnvironmentSpec, said: listing.Report,
           end: float) -> None:
    folder, dispatcher = said.answers["folder"], request.role is Role.DISPATCHER
    address = machine.address or said.answers["address"].removeprefix("::ffff:")
    port = int(said.answers["port"]) if dispatcher else 0
    code, brought = _code(dispatcher)
    plan = HostPlan(
        request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
        code.sha256, environment, root=folder.rpartition("/")[0],
        address=address if dispatcher else machine.address, port=port)
    line = CloudHost(
        request.request_id, f"{machine.name}/{request.request_id}", request.fleet, request.role,
        replace(request.offer, slots=machine.slots), CloudState.PENDING, (Run(said.at),), address, port)
    part = f".listing.{secrets.token_hex(4)}"
    files = {name: text.encode() for name, text in script.files(plan).items()}
    files |= {TAGS: json.dumps(request.tags).encode(), part: listing.written(line, request.boot.files).encode()}
    if brought:
        files[f"wheel/{code.name}"] = code.data
    door.put(folder, files, end - time.monotonic())
    try:
        done = _run(door, machine, scripts.finish(machine.root, request.request_id, part))
    except Troubled as error:
        raise Unsure(machine.name, error.trouble) if error.trouble.away else error from error
    if "lost" in done.answers:
        raise Troubled(machine.name, Trouble(f"{done.answers['lost'] or 'nobody'} has its claim by now"))


def _run(door: Door, machine: Machine, text: str) -> listing.Report:
    said = door.run(text, SCRIPT_S)
    if said.status:
        raise Troubled(machine.name, trouble.of_output(said.status, said.err, machine.root))
    return listing.read(said.out)


def _give_back(door: Door, machine: Machine, request_id: str) -> None:
    """Leave nothing of a launch that failed; a machine that does not answer keeps a claim, which dies."""
    try:
        door.run(scripts.remove(machine.root, request_id), SCRIPT_S)
    except Troubled:
        return


def _code(dispatcher: bool) -> tuple[Wheel, bool]:
    """The code that hosts run, and whether it must be brought to them: workers fetch it from their dispatcher, whose
    own bootstrap says where its wheel lies."""
    if dispatcher or not os.environ.get(WHEEL):
        return wheel.build(), True
    return wheel.running(), False
