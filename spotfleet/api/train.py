"""Submission of a script on this machine as a job of the fleet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from spotfleet import bundle
from spotfleet.api.home import FleetRecord, Home
from spotfleet.api.lifecycle.upload import Shipped, ship
from spotfleet.api.machine import Progress
from spotfleet.bundle import scripts, targets
from spotfleet.errors import UsageError
from spotfleet.model import RESIZE_POLICIES, FleetSpec, HostState, JobSpec, ResizeSpec, Role
from spotfleet.protocol.messages import FleetStatus
from spotfleet.transport.client import DispatcherClient


@dataclass(frozen=True)
class RestartOptions:
    """How a job is started, and what follows the end of one of its processes."""

    launcher: str = ""  # one of LAUNCHERS; "": found from the script
    retry: bool = True  # False: the loss of a host fails the job
    max_restarts: int = 0  # after failures of the script; a lost host does not count
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    checkpoint_dir: str = ""  # folder in the working directory that follows the job to new hosts
    resume_args: str = ""  # added to the command once a checkpoint exists


@dataclass(frozen=True)
class TrainRequest:
    """Arguments of `train`."""

    script: str = ""  # empty: the fleet file's `run`
    args: tuple[str, ...] = ()
    np: tuple[int, int] | None = None  # workers; None: one per slot, at least `nodes.min`
    name: str = ""
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    down: bool = False
    wait: bool = False
    spares: int = 0
    slots: int = 0  # most slots of the fleet that the job takes; 0: all
    priority: int = 0
    resize_policy: str = ""  # this and the next override the fleet file's
    growth: tuple[tuple[int, int], ...] = ()
    deadline_s: float = 0.0  # from its submission; it and the work override the fleet file's
    work_s: float = 0.0  # at the fleet's full target
    work_steps: int = 0
    options: RestartOptions = RestartOptions()
    run: str = ""  # a shell command, in place of a script and of the fleet file's `run`
    nodes: int = 0  # hosts, of which each runs one process; 0: `np` decides
    each: bool = False  # the command runs on each host by itself
    group: str = ""  # named group of hosts; "": any


LAUNCHERS = ("elastic", "torchrun", "command")
LONGEST_NAME = 40
STARTER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
FILE_ENDINGS = frozenset({".pt", ".pth", ".ckpt", ".tar", ".bin", ".pkl", ".safetensors"})


def job_spec(spec: FleetSpec, request: TrainRequest, status: FleetStatus) -> JobSpec:
    """Build the job's spec, without its bundle. Raises UsageError for a script that is missing or outside the working
    directory."""
    run, options = request.run or spec.run, request.options
    if not request.script and not run:
        raise UsageError("nothing to run: no script is given, and the fleet file has no `run`",
                         hint="spotfleet train SCRIPT.py [args], or spotfleet run -- COMMAND")
    scripts.refuse_fleet_file(request.script)
    argv = (inside(Path(request.script), Path(spec.workdir)), *request.args) if request.script else ()
    kind = kind_for(argv, request, spec)
    refuse_group(spec, request.group)
    least, most = request.np or (default_np(status, request.group) if argv else default_hosts(status, request))
    if not 1 <= least <= most:
        raise UsageError(f"np: expected 1 <= MIN <= MAX, got {least}, {most}", hint="np=(2, 4) means 2 to 4 workers")
    least, most = limited(least, most, request)
    if request.spares < 0:
        raise UsageError(f"spares: expected 0 or more, got {request.spares}",
                         hint="spares=1 keeps one warm worker ready")
    policy = spec.policy
    deadline_s = request.deadline_s or policy.deadline_s
    work_s, work_steps = (request.work_s, request.work_steps) if request.work_s or request.work_steps else (
        policy.work_s, policy.work_steps)
    if deadline_s and not (work_s or work_steps):
        raise UsageError("a deadline needs the work, or nobody knows what is to be done by then",
                         hint='--work 48h (at full target), or --work "100000 steps"')
    if not request.np:
        most = max(least, most - request.spares)  # else every slot would train
    return JobSpec(
        name=request.name or job_name(request.script, request.run, spec), argv=argv, run="" if argv else run,
        setup=targets.with_targets(spec.setup, [*spec.file_mounts], spec.mounted),
        min_workers=least, max_workers=most, envs={**spec.envs, **request.envs}, down=request.down,
        checkpoint=spec.checkpoint, spares=request.spares, priority=request.priority,
        resize=resize_of(spec.resize, request, least, most), setup_timeout_s=spec.setup_timeout_s,
        file_mounts={targets.name_of(n): s for n, s in spec.file_mounts.items() if "://" in s},
        deadline_s=deadline_s, work_s=work_s, work_steps=work_steps, kind=kind.kind, gang=kind.gang,
        per_host=not argv, grace_s=options.grace_s, max_restarts=options.max_restarts, retry=options.retry,
        checkpoint_dir=inside_folder(options.checkpoint_dir), resume_args=options.resume_args,
        container=spec.container, group=request.group,
    )


def kind_for(argv: tuple[str, ...], request: TrainRequest, spec: FleetSpec) -> scripts.ScriptKind:
    """Return the kind of a job. Raises UsageError for options that its kind does not have."""
    options = request.options
    if options.launcher not in ("", *LAUNCHERS):
        raise UsageError(f"launcher {options.launcher!r} is unknown", hint=f"--launcher {'|'.join(LAUNCHERS)}")
    if argv:
        kind = scripts.launched(scripts.read(Path(spec.workdir) / argv[0]), options.launcher)
    else:
        kind = scripts.ScriptKind("command", gang=not request.each)
    given = [name for name, value in (
        ("--checkpoint-dir", options.checkpoint_dir), ("--resume-args", options.resume_args),
        ("--max-restarts", options.max_restarts)) if value]
    if given and not (kind.gang or kind.kind == "restart"):
        raise UsageError(f"{given[0]}: this job is not started anew as a whole"
                         + (f": {kind.why}" if kind.why else ""), hint="add --launcher torchrun")
    if options.max_restarts < 0 or options.grace_s < 0:
        raise UsageError("--max-restarts and --grace: expected 0 or more")
    return kind


def inside_folder(name: str) -> str:
    """Return the relative name of a folder in the working directory. Raises UsageError for any other."""
    path = PurePosixPath(name)
    if name and (path.is_absolute() or ".." in path.parts or not path.parts):
        raise UsageError(f"--checkpoint-dir {name}: expected a folder inside the working directory",
                         hint="--checkpoint-dir out, or '*.pt'; or let the script write to $SPOTFLEET_CHECKPOINT_DIR. "
                              "A folder that all hosts share needs no option")
    if path.suffix in FILE_ENDINGS and not name.endswith("/") and not any(c in path.name for c in "*?["):
        raise UsageError(f"--checkpoint-dir {name}: names a file, and expects a folder or a pattern",
                         hint=f"--checkpoint-dir '{path.with_suffix('')}*{path.suffix}' for this file; {name}/ if it "
                              "is a folder")
    return str(path) if name else ""


def kind_line(job: JobSpec, why: str) -> str:
    """Return one line about how a change of hosts acts on the job; "" for a job of unknown kind."""
    what = f"{job.argv[0]}: " if job.argv else ""
    because = f"; {why}" if why else ""
    if job.kind == "elastic":
        return f"{what}elastic job, training goes on through changes of hosts{because}"
    if job.restarts:
        until = f"SIGTERM, {job.grace_s:g} s, SIGKILL"
        end = "all processes are ended together and start anew" if job.retry else "the job fails"
        at = "a lost host" if job.kind == "command" else "each change of hosts"
        return f"{what}{job.kind} job, at {at} {end} ({until}){because}"
    return f"{what}command job, each process by itself{because}" if job.kind == "command" else ""


def resize_of(resize: ResizeSpec, request: TrainRequest, least: int, most: int) -> ResizeSpec:
    """Return the fleet file's resize settings, overridden by the request. Raises UsageError for a growth out of range.
    """
    if request.resize_policy:
        if request.resize_policy not in RESIZE_POLICIES:
            raise UsageError(f"resize policy {request.resize_policy!r} is unknown",
                             hint=f"--resize-policy {'|'.join(RESIZE_POLICIES)}")
        warmup_steps = resize.warmup_steps if request.resize_policy == "scale-lr" else 0
        resize = replace(resize, policy=request.resize_policy, warmup_steps=warmup_steps)
    resize = replace(resize, growth=request.growth or resize.growth)
    for epoch, workers in resize.growth:
        if not least <= workers <= most:
            raise UsageError(f"growth: {workers} workers from epoch {epoch}, but the job may have {least} to {most}",
                             hint="change the growth, --np MIN:MAX, or `nodes` in the fleet file")
    return resize


def inside(script: Path, workdir: Path) -> str:
    """Return the script's path relative to the working directory; it is searched in the current directory first."""
    scripts.refuse_fleet_file(str(script))
    found = next((p.resolve() for p in (script, workdir / script) if p.is_file()), None)
    if found is None and str(script).startswith("-"):
        raise UsageError(f"train has no option {script}",
                         hint="`spotfleet train --help` lists them; -c FLEET names the fleet; the script's own options "
                              "come after it")
    if found is None:
        raise UsageError(f"there is no script {script}",
                         hint=scripts.launcher_hint(str(script))
                         or f"looked for it here and in the working directory {workdir}")
    if not found.is_relative_to(workdir.resolve()):
        raise UsageError(f"{script} is outside the working directory {workdir}, which is all that is shipped",
                         hint="set `workdir` in the fleet file to a folder that holds it; `spotfleet up FILE` again")
    return str(found.relative_to(workdir.resolve()))


def default_np(status: FleetStatus, group: str = "") -> tuple[int, int]:
    """Return the numbers of slots of the fleet, or of one of its groups, at its smallest and at its largest: least and
    most workers."""
    named = next((g for g in status.groups if g.group == group), None)
    offered = named.slots if named else status.slots
    slots = [h.slots for h in status.hosts if h.role == Role.WORKER.value and h.state != HostState.GONE.value
             and group in ("", h.group)] or [offered or 1]
    least, most = _range(status, group)
    return least * min(slots), most * max(slots)


def _range(status: FleetStatus, group: str) -> tuple[int, int]:
    """Return the fewest and the most hosts of the fleet, or of one of its groups; at least one for a job."""
    named = next((g for g in status.groups if g.group == group), status)
    return max(named.min, 1), max(named.max, 1)


def refuse_group(spec: FleetSpec, group: str) -> None:
    """Raise UsageError for a group that the fleet does not have, or for none where hosts are of several kinds."""
    known = ", ".join(g.name for g in spec.groups)
    if group and group not in [g.name for g in spec.groups]:
        raise UsageError(f"--group {group}: the fleet has {'the groups ' + known if known else 'no groups'}",
                         hint=f"use one of: {known}" if known else "leave it out, or add `groups` to the fleet file")
    if not group and not spec.shares_jobs:
        raise UsageError(f"the fleet's groups have different machines, and the job names none of them: {known}",
                         hint=f"--group {spec.groups[0].name}")


def default_hosts(status: FleetStatus, request: TrainRequest) -> tuple[int, int]:
    """Return the least and the most hosts of a command."""
    if request.nodes:
        return request.nodes, request.nodes
    return _range(status, request.group)


def job_name(script: str, command: str, spec: FleetSpec) -> str:
    """Return the name of a job without one of its own: that of its script, also behind a starter of scripts, or of its
    program, else the file's.

    The dispatcher adds a number, and a word where that could be the name of a host.
    """
    words = [word for word in command.split() if "=" not in word]  # without variables in front of the program
    program = words[0] if words else ""
    if STARTER.fullmatch(Path(program).name):
        program = next((word for word in words if word.endswith(".py")), program)
    text = Path(script).stem if script else Path(program).stem[:LONGEST_NAME] if program else spec.name
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or "job"


def submit(home: Home, record: FleetRecord, secrets: Mapping[str, str], client: DispatcherClient, request: TrainRequest,
           progress: Progress) -> str:
    """Ship the working directory unless the fleet has it, submit the job and return its name."""
    job = job_spec(record.spec, request, client.status())
    secrets = {**secrets, **request.secrets}
    refuse_leaks(job, secrets)
    if line := kind_line(job, kind_for(job.argv, request, record.spec).why):
        progress(line)
    for line in _remarks(job, Path(record.spec.workdir), request.options.launcher):
        progress(line)
    shipped = ship_working_directory(home, record, secrets, client, progress)
    for line in shipped.left_out:
        progress(f"left out of the bundle: {line}")
    if argv_left_out := [n for n in shipped.left_out if job.argv and n.startswith(f"{job.argv[0]}: ")]:
        raise UsageError(f"the script cannot be shipped: {argv_left_out[0]}",
                         hint="read the secret from the environment instead")
    try:
        return client.submit(replace(job, bundle=shipped.sha256), dict(secrets), wait=request.wait)
    except UsageError:
        if not client.missing_blobs(shipped.blobs):
            raise
        # the dispatcher has lost its disk meanwhile
        shipped = ship_working_directory(home, record, secrets, client, progress)
        return client.submit(replace(job, bundle=shipped.sha256), dict(secrets), wait=request.wait)


def _remarks(job: JobSpec, workdir: Path, launcher: str) -> list[str]:
    """Return what a user should know about the job's script before it runs."""
    if not job.argv:
        return []
    facts = scripts.read(workdir / job.argv[0])
    lost = "" if job.checkpoint_dir else scripts.uncollected(facts, together=job.restarts)
    return [*scripts.remarks(facts, job.max_workers, launcher), *([lost] if lost else [])]


def ship_working_directory(home: Home, record: FleetRecord, secrets: Mapping[str, str], client: DispatcherClient,
                           progress: Progress) -> Shipped:
    """Upload the working directory of the fleet's file, with its mounts, unless it is there."""
    mounts = {targets.name_of(n): Path(source) for n, source in record.spec.file_mounts.items() if "://" not in source}
    return ship(client, Path(record.spec.workdir), mounts, home.path, tuple(secrets.values()), progress)


def refuse_leaks(job: JobSpec, secrets: Mapping[str, str]) -> None:
    """Raise UsageError for a secret in arguments or plain variables: `ps`, `status` and the ledger would show it."""
    for name, value in secrets.items():
        if len(value) >= bundle.SHORTEST_SECRET:
            places = [f"argument {i}" for i, a in enumerate(job.argv) if value in a]
            places += [f"variable {k}" for k, v in job.envs.items() if value in v]
            places += [key for key, text in (("run", job.run), ("setup", job.setup)) if value in text]
            if places:
                raise UsageError(f"{places[0]} holds the value of secret {name}",
                                 hint=f"read it from the variable {name} in your script instead")


def limited(least: int, most: int, request: TrainRequest) -> tuple[int, int]:
    """Return the numbers of workers within the request's `slots`. Raises UsageError."""
    if request.slots < 0:
        raise UsageError(f"slots: expected 1 or more, got {request.slots}", hint="slots=2 leaves room for other jobs")
    if request.np and request.slots:
        raise UsageError("np and slots both limit the workers: use one", hint="--slots N is --np MIN:N with nodes.min")
    return (min(least, request.slots), min(most, request.slots)) if request.slots else (least, most)
