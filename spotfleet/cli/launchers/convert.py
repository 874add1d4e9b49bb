"""The command `convert`: a fleet file from a file of Ray or dstack, or from Horovod's list of hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from spotfleet.cli.console import print_message
from spotfleet.config import document, foreign
from spotfleet.config.foreign import horovod
from spotfleet.config.foreign.source import Converted, name
from spotfleet.errors import UsageError
from spotfleet.words import counted

WHAT = "give a cluster file of Ray, a configuration of dstack, a hostfile or a host-discovery script, or -H HOST:SLOTS"


class _BlockDumper(yaml.SafeDumper):
    """Writer of YAML that keeps scripts as blocks of lines, so that they can be read and changed."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _text)


def convert(file: Path | None, *, hosts: str, slots: int, as_json: bool) -> None:
    found = _converted(file, hosts, slots)
    if as_json:
        print(json.dumps(found.data, indent=1))
    else:
        source = f" from {file}" if file else ""
        text = yaml.dump(found.data, Dumper=_BlockDumper, sort_keys=False)
        print(f"# made by `spotfleet convert`{source}\n{text}", end="")
    for line in found.left_out:
        print_message(f"left out: {line}")
    taken = f"; {counted(len(found.left_out), 'thing')} left out" if found.left_out else ""
    print_message(f"look at its plan with `spotfleet up FILE --dryrun`{taken}")


def _converted(file: Path | None, hosts: str, slots: int) -> Converted:
    if hosts:
        return of_hosts(horovod.HorovodHosts(listed(hosts, slots), slots=slots or 1), "horovod")
    if file is None:
        raise UsageError("nothing to convert", hint=WHAT)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint=WHAT) from None
    if text.startswith("#!") or os.access(file, os.X_OK):
        return of_hosts(horovod.HorovodHosts(script=str(file.resolve()), slots=slots or 1), name(file.stem))
    if file.suffix in (".yml", ".yaml"):
        return _of_yaml(file, text)
    try:
        return of_hosts(horovod.HorovodHosts(horovod.from_file(text, slots)), name(file.stem))
    except ValueError as error:
        raise UsageError(f"{file} is no hostfile: {error}", hint=WHAT) from None


def _of_yaml(file: Path, text: str) -> Converted:
    data = document.read(text, file).data
    found = foreign.convert(data)
    if found is None and str(data.get("apiVersion", "")).startswith("ray.io/"):
        raise UsageError(f"{file} is for Kubernetes (KubeRay), and is not converted",
                         hint="write a group for each of its workerGroupSpecs, with minReplicas and maxReplicas as "
                              "`nodes`, and `ray: true`: docs/ray.md, \"Demand makes hosts\"")
    if found is None:
        raise UsageError(f"{file} is no file of Ray or dstack",
                         hint=f"a fleet file, or a task file of SkyPilot, needs no conversion: spotfleet up {file}")
    return found


def listed(text: str, slots: int) -> tuple[tuple[str, int], ...]:
    """Parse the value of -H."""
    try:
        return horovod.from_list(text, slots)
    except ValueError as error:
        raise UsageError(f"-H {text}: {error}", hint="-H node1:4,node2:4") from None


def of_hosts(where: horovod.HorovodHosts, fleet: str) -> Converted:
    """Return the fleet file of a list of hosts, or of a script that prints one."""
    most = len(where.hosts) or 1
    data = horovod.fleet_file(fleet, where, "DISPATCHER", (1, most))
    notes = [] if where.here else ["ssh.dispatcher: write the name of the machine that runs the dispatcher, and no "
                                   "workers, instead of DISPATCHER"]
    notes += ["nodes: write how many of the script's machines shall work"] if where.script else []
    return Converted(data, tuple(notes))
