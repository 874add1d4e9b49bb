"""Commands of SkyPilot, dstack, Ray and launchers that somebody types out of habit, with ours for the same purpose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ALONE = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch))\b.*\s--standalone\b", re.S)
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "python", "python3")
OURS = {
    "stop": "`spotfleet down` ends the fleet and keeps its results; `spotfleet up FILE` makes it anew",
    "start": "`spotfleet up FILE`",
    "autostop": "write `autostop: {idle_minutes: 10}` into the fleet file, or `spotfleet launch FILE -i 10`",
    "show-gpus": "`spotfleet offers --gpus A100:8`", "gpus": "`spotfleet offers --gpus A100:8`",
    "offer": "`spotfleet offers`",
    "apply": "`spotfleet launch FILE`; for a file of dstack first `spotfleet convert FILE`",
    "ps": "`spotfleet status`, `spotfleet jobs`", "delete": "`spotfleet down`", "destroy": "`spotfleet down`",
    "submit": "`spotfleet train SCRIPT.py`, or `spotfleet run -- COMMAND`",
    "spot": "`spotfleet launch FILE`: hosts are spot machines, and jobs always recover",
    "managed": "`spotfleet launch FILE`", "serve": "replicas behind a load balancer are not run here",
    "storage": "buckets are named under `file_mounts` and `checkpoint.target`, and never made or removed here",
    "volumes": "buckets are named under `file_mounts` and `checkpoint.target`, and never made or removed here",
    "api": "there is no server: each fleet has a dispatcher, which `spotfleet up FILE` starts",
} | {name: "`spotfleet train SCRIPT.py` starts a script once for each slot; `spotfleet run --nodes N -- "
           f"{name} ...` runs {name} itself on N hosts" for name in LAUNCHERS}


RAYS = {  # after `spotfleet ray`
    "up": "`spotfleet up FILE` with `ray: true` in it, then `spotfleet ray start`; for a file of Ray: `convert`",
    "down": "`spotfleet ray stop` ends the Ray cluster, `spotfleet down` the whole fleet",
    "job": "`spotfleet ray submit SCRIPT.py` or `submit -- COMMAND`; then `status`, `logs` and `cancel`",
    "exec": "`spotfleet ray submit -- COMMAND`", "run": "`spotfleet ray submit SCRIPT.py`",
    "attach": "`spotfleet ray submit -- COMMAND` runs beside the head; `spotfleet ssh HOST` is a shell on a host",
    "monitor": "`spotfleet ray status`; `spotfleet events -w` has each decision", "list": "`spotfleet ray status`",
    "jobs": "`spotfleet ray status`", "summary": "`spotfleet ray status`", "nodes": "`spotfleet ray status`",
    "dashboard": "`spotfleet port-forward 8265`, with ray[default] among `environment.packages`",
    "memory": "`spotfleet ray submit -- ray memory`", "timeline": "`spotfleet ray submit -- ray timeline`",
    "drain-node": "`spotfleet chaos preempt HOST` drains a host as a notice does",
}


def hint(argv: list[str], message: str) -> str:
    """Return what to type instead of a command that does not exist here; "" if that is not known."""
    if argv[:1] == ["ray"] and len(argv) > 1:
        return RAYS.get(argv[1], "") if message.startswith("No such command") else ""
    if argv[:2] == ["jobs", "launch"]:
        return OURS["spot"]
    return OURS.get(argv[0], "") if argv and message.startswith("No such command") else ""


def is_task_file(words: Sequence[str]) -> bool:
    """Return whether a command is a YAML file here, as after `sky exec CLUSTER`."""
    return len(words) == 1 and words[0].lower().endswith((".yaml", ".yml")) and Path(words[0]).is_file()


def note(command: str, nodes: int) -> str:
    """Return what a command for several hosts does otherwise than it seems to; else ""."""
    if nodes > 1 and ALONE.search(command):
        return f"torchrun --standalone waits on each host for {nodes} hosts that cannot reach it: leave the flag out"
    return ""
