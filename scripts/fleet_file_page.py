"""Write docs/fleet-file.md, the reference of the fleet file's keys and of a job's variables, from the code.

    python scripts/fleet_file_page.py [--check]     with --check: exit 1 if the page is not what it would write

Keys, values and defaults come from the schema (`spotfleet/config/sections.py` and each plugin's section), the
variables from `spotfleet/agent/processes/env.py` and `spotfleet/train/default_group.py`. The meanings are written
here, by dotted key; a key without one is printed with "-", and one of a plugin that is not installed is left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from spotfleet.agent.processes.env import WorkerPaths, host_env, worker_env
from spotfleet.config import plugin_sections, values
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import WorkerLaunch

TOP = Path(__file__).parents[1]
PAGE = TOP / "docs" / "fleet-file.md"
HEAD = """# The fleet file: every key

This page is written by `python scripts/fleet_file_page.py` from the code. An unknown key is an error; several problems
are reported at once, each with its line. Relative paths start at the file's folder. A key in bold begins a section of
its own, which is below. `spotfleet up FILE --dryrun` shows the plan of a file and changes nothing.

```yaml
name: digits
nodes: {min: 2, target: 3}
resources: {instance_type: cpu.small}
```
"""
VARIABLES_HEAD = """## Variables of a job

Each worker, and the fleet file's `run`, has the variables of `envs` and `secrets`, and these. A worker's environment is
not that of your shell: `train --env NAME` and `--secret NAME` pass a variable of yours.
"""
TITLES = {"": "The file", "resources.any_of[]": "`resources.any_of`: alternatives, each on top of `resources`",
          "groups": "`groups`: by name, on top of `resources`",
          "ssh.hosts[]": "`ssh.hosts`: machines, `HOST`, `HOST:SLOTS` or these keys"}
MEANINGS = {
    "name": "of the fleet; default: the file's name",
    "workdir": "the folder that `train` ships: [files.md](files.md)",
    "num_nodes": "SkyPilot's word for a fixed number in `nodes`",
    "nodes": "how many hosts: a job starts with `min` and uses up to `max`; `target` are launched",
    "nodes.min": "hosts with which a job starts; default 1; 0: a job makes hosts come, [policy.md](policy.md)",
    "nodes.target": "hosts to launch; default: `max`",
    "nodes.max": "the most hosts; default: `target`",
    "nodes.idle_after": "with a `min` of 0: a host without work for this long is given back",
    "groups.any_of": "as `resources.any_of`, each on top of the group",
    "groups.disk_size": "of the whole fleet: under `resources`",
    "groups.image_id": "of the whole fleet: under `resources`",
    "groups.network_tier": "of the whole fleet: under `resources`",
    "groups": "named groups of hosts, each with its own range and machines: [policy.md](policy.md)",
    "provider": "where the machines are; default: that of `resources.infra`, else `local`, an emulation",
    "resources": "which machines the hosts may be",
    "dispatcher": "which machine the dispatcher has; it is always on demand",
    "interruption_behavior": "what the cloud does to a spot host that it takes back",
    "checkpoint": "[checkpoints.md](checkpoints.md)",
    "resize": "how training reacts to another number of workers: [resizing.md](resizing.md)",
    "autostop": "ends an idle fleet; also under `resources`, as in SkyPilot",
    "max_lifetime": "ends the fleet at this age; 0s: never",
    "orphan_after": "hosts without a dispatcher for this long save their state and end themselves; 0s: never",
    "envs": "variables of every job; without a value, yours",
    "secrets": "the same; they are stored apart and never printed",
    "file_mounts": "data in the working directory: [files.md](files.md)",
    "setup": "runs once on each host, before a job's first worker there",
    "setup_timeout": "limit of one try of `setup`; 0s: none",
    "run": "a shell command, run by `train` without a script",
    "tags": "more tags on everything that the fleet makes",
    "placement": "over pools, in one zone, or in one placement group",
    "all_or_nothing": "the first hosts are launched together in one pool, or none of them",
    "environment": "the hosts' Python environment",
    "spot_policy": "when on-demand hosts are used: [policy.md](policy.md)",
    "on_demand_base": "hosts of the target that are always on demand",
    "deadline": "of each job, from its submission",
    "work": "how long a job takes with all hosts, or its steps",
    "max_cost": "dollars for the whole fleet: it shuts down cleanly before that is spent",
    "max_hourly_cost": "dollars per hour for all machines together",
    "replace_slow": "hosts of slow workers are drained and replaced: [page.md](page.md)",
    "aws": "[aws.md](clouds/aws.md)",
    "ssh": "[machines.md](machines.md)",
    "resources.infra": "provider, region and zone in one; `*` means any",
    "resources.region": "default: any that the provider is set up for",
    "resources.zone": "default: any",
    "resources.instance_type": "default: any that fits",
    "resources.max_hourly_cost": "dollars per hour of one host",
    "resources.accelerators": "kind and number of GPUs; of a list any one",
    "resources.use_spot": "default: true",
    "resources.any_of": "alternatives; the cheapest available one is used",
    "resources.in_order": "use the first of `any_of` that is available, not the cheapest; as `ordered` of SkyPilot",
    "resources.autostop": "as `autostop` above",
    "autostop.idle_minutes": "without a job; 0: never",
    "autostop.down": "true: the fleet ends",
    "checkpoint.interval": "time between two checkpoints",
    "checkpoint.keep": "how many are kept",
    "checkpoint.target": "a mounted folder or a bucket that outlives the machines",
    "resize.policy": "what keeps its value: nothing, the global batch, or the learning rate per sample",
    "resize.warmup_steps": "steps over which scale-lr raises the rate",
    "resize.growth": "workers from each epoch on",
    "resize.max_join": "most workers that join at a time; 0: no limit",
    "resize.max_leave": "most workers that leave at a time when the fleet shrinks; 0: no limit",
    "resize.every": "least time between two changes",
    "environment.python": "the interpreter on the hosts, 3.11 or newer",
    "environment.packages": "installed before spotfleet, so that their versions hold",
    "environment.inherit": "true: use the packages of that interpreter",
    "environment.index_url": "package index; default: that of pip",
    "environment.installer": "auto: uv where it is, else pip",
    "aws.regions": "default: those of `resources`, else that of your AWS configuration; the cheapest is used",
    "aws.joined": "true: the networks of all regions reach each other",
    "aws.networks": "by region; default: the default VPC and its subnets",
    "aws.networks.vpc": "default: that of the subnets",
    "aws.networks.subnets": "default: those of the VPC",
    "aws.networks.security_groups": "default: `up` makes one",
    "aws.networks.dispatcher_security_groups": "more groups, of the dispatcher alone, such as one that lets SSH in",
    "aws.profile": "in your AWS configuration",
    "aws.public_addresses": "false: private addresses only",
    "aws.ssh_from": "networks that may reach the dispatcher's port 22; default: your address at `up`",
    "aws.image": "of hosts; default: Deep Learning AMI, plain Ubuntu without GPUs",
    "aws.dispatcher_image": "default: plain Ubuntu 24.04",
    "aws.user": "login user of these images",
    "aws.disk": "GiB of each host",
    "aws.dispatcher_disk": "GiB",
    "aws.kms_key": "encrypts the disks; default: the account's EBS key",
    "aws.key_pair": "an EC2 key pair that may log in too",
    "aws.dispatcher_profile": "an existing instance profile; default: `up` makes one",
    "aws.host_profile": "the same for hosts",
    "aws.dispatcher_credentials": "in a fleet on several clouds: the profile whose key a dispatcher elsewhere gets",
    "aws.event_queue": "true: read notices from EventBridge and SQS, too",
    "aws.interruption_queue": "an existing queue with EventBridge's events, read instead of one of the fleet's own",
    "aws.permissions_boundary": "bounds every role that `up` makes",
    "aws.capacity_reservation": "reserved capacity, used first",
    "ssh.dispatcher": "the machine of the dispatcher; it trains nothing",
    "ssh.hosts": "the machines that train",
    "ssh.user": "login user of all machines; default: as in your SSH configuration",
    "ssh.port": "of sshd on all machines",
    "ssh.identity_file": "your key; default: your agent's and the usual files",
    "ssh.known_hosts": "default: `~/.ssh/known_hosts`",
    "ssh.discovery_script": "prints the machines that there are now",
    "ssh.discovery_timeout": "limit of one run of it",
    "ssh.folder": "on each machine, for spotfleet's files",
    "mounted": "buckets that hosts mount instead of copying",
    "gcp": "[gcp.md](clouds/gcp.md)",
    "resources.cpus": "of a host; `8+`: at least so many",
    "resources.memory": "of a host, GiB; `32+`: at least so much",
    "resources.disk_size": "of a host, GiB",
    "resources.image_id": "of hosts; `docker:IMAGE` is `container: IMAGE`",
    "ray": "machines get Ray, for `spotfleet ray start`: [ray.md](ray.md)",
    "ray.version": "of Ray, on hosts and dispatcher",
    "ray.object_store": "share of a host's memory for Ray's objects",
    "ray.port": "where the head listens; default: 6379",
    "container": "jobs run in this image; or `{image, engine, mounts}` ([containers.md](containers.md))",
    "container.image": "of a registry, or a folder of the hosts with a root file system",
    "container.engine": "default: Docker where it runs, or else Podman; for a folder runc",
    "container.mounts": "further folders of the hosts in the container: `FOLDER[:TARGET][:ro]`",
    "resources.network_tier": "best: several hosts close together",
    "notify": "messages about events: [page.md](page.md)",
    "notify.webhook": "gets each message by POST",
    "notify.command": "is run for each message",
    "notify.events": "default: all of them",
    "gcp.project": "default: GOOGLE_CLOUD_PROJECT, or that of the credentials",
    "gcp.regions": "candidates; the cheapest is used; default: all",
    "gcp.network": "default: `default`",
    "gcp.subnetworks": "by region; default: the network's own",
    "gcp.public_addresses": "false: private addresses only",
    "gcp.ssh_from": "networks that may reach the dispatcher's port 22; default: your address at `up`",
    "gcp.image": "of hosts; default: Deep Learning VM, Ubuntu without GPUs",
    "gcp.dispatcher_image": "default: Ubuntu 24.04",
    "gcp.user": "login user; the machines make it",
    "gcp.disk": "GiB of each host",
    "gcp.dispatcher_disk": "GiB",
    "gcp.disk_type": "default: pd-balanced, or hyperdisk-balanced where it must be",
    "gcp.local_ssds": "for machine types that include none",
    "gcp.service_account": "of hosts; default: none, or the default one for a checkpoint target",
    "gcp.dispatcher_service_account": "default: the project's default one",
    "gcp.network_tags": "more tags of all machines; you make their firewall rules, and `up` makes none",
    "gcp.dispatcher_network_tags": "more tags of the dispatcher alone, such as that of a rule that lets SSH in",
    "gcp.disk_key": "of all disks; default: Google's own keys",
    "gcp.dispatcher_credentials": "in a fleet on several clouds: the key file that a dispatcher elsewhere gets",
    "ssh.hosts[].host": "name or address",
    "ssh.hosts[].slots": "workers at a time, one for each GPU",
    "ssh.hosts[].port": "default: that of all machines",
    "ssh.hosts[].user": "default: that of all machines",
    "ssh.hosts[].host_key": "its public host key; default: from known_hosts",
    "ssh.hosts[].address": "at which other hosts reach it; default: `host`",
    "ssh.hosts[].accelerator": "the kind of its GPUs",
    "ssh.hosts[].hourly_cost": "dollars per hour, for `cost`",
    "ssh.hosts[].folder": "default: that of all machines",
}
ELSEWHERE = ("ssh.dispatcher", "groups.nodes", "groups.any_of")  # their keys stand in another section
# The same key with the same meaning elsewhere: prefix -> prefix.
ALIKE = {"groups.nodes": "nodes", "groups.": "resources.",
         "resources.any_of[].": "resources.", "dispatcher.": "resources.", "resources.autostop.": "autostop.",
         "ssh.dispatcher.": "ssh.hosts[]."}
VARIABLES = {
    "SPOTFLEET_OUTPUT": "folder whose files are copied to you: [files.md](files.md)",
    "SPOTFLEET_JOB": "name of the job", "SPOTFLEET_WORKER": "name of the process, HOST/SLOT/INCARNATION",
    "SPOTFLEET_WORKERS": "MIN:MAX of the job", "SPOTFLEET_LOCAL_RANK": "number of the worker on its host",
    "SPOTFLEET_ADDRESS": "the host's address for other hosts",
    "SPOTFLEET_WORK": "a folder of the process for files of its own; used by spotfleet.train",
    "SPOTFLEET_FETCHED": "folder for a checkpoint that is fetched; used by spotfleet.train",
    "SPOTFLEET_SOCKET": "the agent's socket; used by spotfleet.train",
    "SPOTFLEET_RESIZE": "the job's `resize`, as JSON; used by spotfleet.train",
    "OMP_NUM_THREADS": "1, unless `envs` sets it", "PYTHONUNBUFFERED": "1, so that output is seen at once",
    "PATH": "begins with the folder of the workers' Python",
}
TORCH = "torchrun's meaning, while a generation of `spotfleet.train` lasts: [place.md](place.md)"


def page() -> str:
    lines = [HEAD]
    for place, section in _sections("", plugin_sections.of_every_plugin()):
        lines += [f"## {TITLES.get(place, f'`{place}`')}\n", "| key | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(f"{place}.{name}" if place else name, name, held) for name, held in section.model_fields.items()]
        lines.append("")
    lines += [VARIABLES_HEAD, "| variable | value |", "|---|---|"]
    lines += [f"| {name} | {VARIABLES.get(name, '-')} |" for name in _variables()]
    lines += [f"| {', '.join(_torch_variables())} | {TORCH} |"]
    return "\n".join(lines) + "\n"


def _sections(place: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield place, section
    for name, held in section.model_fields.items():
        for inner, is_list in _inner(held.annotation):
            at = f"{place}.{name}" if place else name
            if not (at.endswith(".autostop") or at in ELSEWHERE):
                yield from _sections(f"{at}[]" if is_list else at, inner)


def _inner(annotation: Any, *, in_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, in_list
    for argument in get_args(annotation):
        yield from _inner(argument, in_list=in_list or get_origin(annotation) is list)


def _row(key: str, name: str, held: FieldInfo) -> str:
    is_section = any(_inner(held.annotation))
    value = _cell(_value(held))
    meaning = MEANINGS.get(key) or next((MEANINGS.get(key.replace(a, b, 1), "") for a, b in ALIKE.items()
                                         if key.startswith(a)), "")
    return f"| {f'**{name}**' if is_section else name} | {value} | {_cell(_default(held))} | {meaning or '-'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(held: FieldInfo) -> str:
    """Return the values that the key takes, in the words of the error for a wrong one."""
    for choice in (held.annotation, *get_args(held.annotation)):
        if get_origin(choice) is Literal:
            return " or ".join(get_args(choice))
    for part in (*held.metadata, *_metadata(held.annotation)):
        if isinstance(part, BeforeValidator):
            return _expected(part.func)
    return "keys" if any(_inner(held.annotation)) else "-"


def _metadata(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    for argument in get_args(annotation):
        yield from _metadata(argument)


def _expected(check: Any) -> str:
    if check is values.provider or check is values.providers:
        return "NAME, or a list of several clouds"
    try:
        check(_Wrong())
    except (ValueError, TypeError) as error:
        if found := re.match(r"expected (.*?)(?:, got |; |$)", str(error)):
            return found[1]
    return "-"


class _Wrong:
    """A value that no key takes."""

    def __repr__(self) -> str:
        return "this"


def _default(held: FieldInfo) -> str:
    value = held.get_default(call_default_factory=True)
    if held.is_required():
        return "required"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value >= 1:  # a duration; less is a share
        unit, size = next((u, s) for u, s in (("h", 3600), ("m", 60), ("s", 1)) if value % s == 0)
        return f"{value / size:g}{unit}"
    return str(value) if isinstance(value, (str, int, float)) and value else "-"


def _variables() -> list[str]:
    launch = WorkerLaunch("job", JobSpec("job"), {})
    return list(worker_env(host_env({}), launch, WorkerPaths("h/0/1", "job", 0, "", "", Path("/a/b/c"))))


def _torch_variables() -> tuple[str, ...]:
    """Read the names from the source: to import it takes torch."""
    tree = ast.parse((TOP / "spotfleet/train/default_group.py").read_text())
    return next(ast.literal_eval(node.value) for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIABLES")


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        same = PAGE.exists() and PAGE.read_text() == page()
        print("up to date" if same else f"{PAGE} is not up to date: run python scripts/fleet_file_page.py")
        return 0 if same else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
