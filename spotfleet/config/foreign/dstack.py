"""Configurations of dstack: fleets, tasks and dev environments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spotfleet.config.foreign.source import Converted, ForeignKeys, name, script, without_empty
from spotfleet.config.gpus import with_memory

MARKETS = {"spot": "spot", "on-demand": "on-demand", "auto": "auto"}
NO_SERVICE = "replicas behind a gateway are not run here; its commands run as a job"
GB = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(M|G|T)i?B?)?", re.I)
UNITS = {"M": 1 / 1024, "G": 1.0, "T": 1024.0, "": 1.0}
MAKERS = ("nvidia", "amd", "google", "intel", "tenstorrent")
# Each command of dstack runs only after the one before has succeeded.
STOPS = "set -e  # the first command that fails ends the job\n"
VARIABLES = {
    "NODE_RANK": "$SPOTFLEET_NODE_RANK", "NODES_NUM": "$SPOTFLEET_NUM_NODES", "NODES_IPS": '"$SPOTFLEET_NODE_IPS"',
    "MASTER_NODE_IP": "$MASTER_ADDR", "GPUS_PER_NODE": "$SKYPILOT_NUM_GPUS_PER_NODE",
    "GPUS_NUM": "$((SPOTFLEET_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))", "RUN_NAME": "$SPOTFLEET_JOB",
    "WORKING_DIR": "$PWD",
}  # DSTACK_ variables by ours
NAMED = re.compile(r"\bDSTACK_(\w+)")
FILLED_IN = re.compile(r"[ \t]*\$\{\{\s*(.*?)\s*\}\}")  # by dstack, before the shell reads it


def convert(data: Mapping[str, Any]) -> Converted:
    file = ForeignKeys(data)
    kind = file.take("type")
    result: dict[str, Any] = {"name": name(file.take("name") or kind)}
    resources = _resources(file.section("resources"))
    backends, regions = file.take("backends", []), file.take("regions", [])
    resources |= without_empty({"max_hourly_cost": _price(file.take("max_price"))})
    types, zones = file.take("instance_types", []), file.take("availability_zones", [])
    places = [{"region": r} for r in regions] if not zones else [{"zone": z} for z in zones]
    alternatives = [place | ({"instance_type": t} if t else {}) for t in types or [""] for place in places or [{}]]
    if len(alternatives) > 1:
        resources["any_of"] = alternatives
    else:
        resources |= alternatives[0]
    if ssh := file.take("ssh_config"):
        result |= _ssh(ForeignKeys(ssh, "ssh_config.", file.left_out))
        resources = {}
    elif backends:
        result["provider"] = backends if len(backends) > 1 else backends[0]
    policy = file.take("spot_policy")
    if policy in (None, "on-demand") and not ssh:
        resources["use_spot"] = False
        if policy is None and kind not in ("gateway", "volume"):
            file.note("spot_policy", "the file names none, which is on demand in dstack, so `use_spot: false` is "
                                     "written; remove it for spot machines")
    elif policy and not ssh:
        result["spot_policy"] = MARKETS.get(policy, policy)
    result["resources"] = resources
    result["nodes"] = _nodes(file.take("nodes"))
    if file.take("placement") == "cluster":
        result["placement"] = "cluster"
    if idle := file.take("idle_duration"):
        result["autostop"] = _duration(idle)
    result["max_lifetime"] = _duration(file.take("max_duration"))
    result["tags"] = file.take("tags", {})
    result |= _program(file, kind)
    file.finish()
    return Converted(without_empty(result), tuple(file.left_out))


def _program(file: ForeignKeys, kind: str) -> dict[str, Any]:
    """Return variables and commands."""
    envs = file.take("env", {})
    if isinstance(envs, list):
        pairs = [str(item).partition("=") for item in envs]
        envs = {key: value if given else None for key, given, value in pairs}
    if kind == "service":
        file.note("type", NO_SERVICE)
    if kind == "dev-environment":
        file.leave("ide", "`spotfleet ssh` and plain `ssh NAME` open a shell; an editor connects to the same name")
    file.leave("registry_auth", "put SKYPILOT_DOCKER_USERNAME, _PASSWORD and _SERVER under `secrets`")
    file.leave("python", "name the interpreter under `environment.python`")
    file.leave("ports", "`spotfleet port-forward NAME PORT` reaches a port of a host")
    file.leave("port", "`spotfleet port-forward NAME PORT` reaches a port of a host")
    file.leave("retry", "jobs always recover")
    file.leave("blocks", "a host has a slot for each GPU, and a job takes as many as `--np` says")
    files = {}
    for item in file.take("files", []):
        local, _, remote = str(item).partition(":")
        files[remote or local] = local
    image, folders = file.take("image"), []
    for volume in file.take("volumes", []):
        if isinstance(volume, dict):
            volume = f"{volume.get('instance_path') or volume.get('name') or ''}:{volume.get('path') or ''}"
        if image and re.fullmatch(r"/[^:\s]*:/[^:\s]*", str(volume)):
            folders.append(str(volume))
            file.note("volumes", f"{volume} is a folder of each host and lost with it: a bucket under `file_mounts` "
                                 "outlives hosts")
        else:
            file.note("volumes", f"{volume} cannot be mounted; name data under `file_mounts`")
    container = {"image": image, "mounts": folders} if folders else image
    secrets = [key for key, value in envs.items() if (found := FILLED_IN.search(str(value)))
               and found[1].startswith("secrets.")]
    for key in secrets:
        file.note(f"env.{key}", f"a secret of dstack; here it comes from your environment: `export {key}=...`")
    return {"container": container, "envs": {k: v for k, v in envs.items() if k not in secrets},
            "secrets": dict.fromkeys(secrets), "workdir": file.take("working_dir"), "file_mounts": files,
            "setup": _commands(file, "init"), "run": _commands(file, "commands")}


def _commands(file: ForeignKeys, key: str) -> str:
    """Return a list of commands as a script that stops at the first failure, with dstack's variables that it names."""
    text = script(file.take(key))
    if not text:
        return ""
    for given in dict.fromkeys(FILLED_IN.findall(text)):
        file.note(key, f"${{{{ {given} }}}} is filled in by dstack; here it is empty")
    text = FILLED_IN.sub("", text)
    head = ""
    for variable in dict.fromkeys(NAMED.findall(text)):
        if value := VARIABLES.get(variable):
            head += f"export DSTACK_{variable}={value}\n"
        else:
            file.note(key, f"DSTACK_{variable} has no value here")
    return STOPS + head + text


def _ssh(given: ForeignKeys) -> dict[str, Any]:
    hosts: list[Any] = []
    for item in given.take("hosts", []):
        one = ForeignKeys(item if isinstance(item, dict) else {"hostname": item}, "ssh_config.hosts.", given.left_out)
        found = without_empty({"host": one.take("hostname"), "port": one.take("port"), "user": one.take("user"),
                               "address": one.take("internal_ip"), "slots": _count(one.take("blocks"))})
        one.leave("identity_file", "one `ssh.identity_file` opens all machines")
        one.finish()
        hosts.append(found if len(found) > 1 else found.get("host"))
    given.leave("network", "each host advertises the source address of its route to the dispatcher")
    ssh = without_empty({"user": given.take("user"), "port": given.take("port"),
                         "identity_file": given.take("identity_file"), "hosts": hosts[1:]})
    given.finish()
    first = hosts[0]["host"] if hosts and isinstance(hosts[0], dict) else hosts[0] if hosts else None
    if first:
        given.note("hosts", f"{first} runs the dispatcher and no workers: name a smaller machine under "
                            "`ssh.dispatcher`, and put it back into `ssh.hosts`")
    return {"provider": "ssh", "ssh": {"dispatcher": first, **ssh}}


def _count(value: Any) -> Any:
    return value if isinstance(value, int) else None


def _nodes(value: Any) -> Any:
    if isinstance(value, dict):
        return without_empty({k: max(1, v) if isinstance(v, int) else v for k, v in value.items()})
    if isinstance(value, str) and (found := re.fullmatch(r"(\d*)\.\.(\d*)", value.strip())):
        least = max(1, int(found[1] or 1))
        return {"min": least, "max": max(least, int(found[2] or least))}
    return value or None


def _price(value: Any) -> Any:
    return float(value) if value else None


def _duration(value: Any) -> Any:
    return None if value in (None, "off", False, -1) else f"{value}s" if isinstance(value, int) else value


def _resources(given: ForeignKeys) -> dict[str, Any]:
    cpus, memory = _range(given, "cpu"), _range(given, "memory")
    found = without_empty({"cpus": cpus, "memory": memory, "accelerators": _gpu(given)})
    disk = given.take("disk")
    size = disk.get("size") if isinstance(disk, dict) else disk
    if size is not None and (number := GB.match(str(size))):
        found["disk_size"] = int(float(number[1]) * UNITS[(number[2] or "").upper()])
    given.leave("shm_size", "a host's processes share its memory")
    given.finish()
    return found


def _range(given: ForeignKeys, key: str) -> str | None:
    """Return "4" or "4+" for 4, "4..", "4..8", "x86:4.." and sizes with units."""
    value = given.take(key)
    text = str(value if not isinstance(value, dict) else value.get("count", "")).rpartition(":")[2]
    if value is None or not (number := GB.match(text)):
        return None
    least = f"{float(number[1]) * UNITS[(number[2] or '').upper()]:g}"
    if ".." not in text:
        return least
    if text.partition("..")[2]:
        given.note(key, f"the upper limit of {value} is left out")
    return f"{least}+"


def _gpu(given: ForeignKeys) -> Any:
    """Return accelerators for "A100:8", "80GB", "A100,H100:1..", {name: [A100], count: 2, memory: 40GB}."""
    value = given.take("gpu")
    if isinstance(value, dict):
        names, count, memory = value.get("name") or [], value.get("count"), value.get("memory")
        names, maker = [names] if isinstance(names, str) else list(names), value.get("vendor") or ""
    else:
        names, count, memory, maker = [], None, None, ""
        for part in str(value or "").split(":"):
            if re.fullmatch(r"\d+(\.\.\d*)?|\.\.\d+", part):
                count = part
            elif re.search(r"\d+(GB|TB|MB)", part, re.I):
                memory = part
            elif part.lower() in MAKERS:
                maker = part
            elif part:
                names += part.split(",")
    if value in (None, 0) or not (names or memory or count):
        return None
    vendor = next((m for m in MAKERS if m == str(maker).lower()), "nvidia")
    if not names:
        names, memory = with_memory(str(memory or ""), vendor), None
    if not names:
        given.note("gpu", f"{value}: no GPU of that kind is known; name one under `accelerators`")
        return str(value)  # `up` refuses it: a fleet without GPUs is not what the file asks for
    number = GB.match(str(memory or ""))
    count = str(count or 1)
    if ".." in count:
        given.note("gpu", f"{count} of them: the number for each host is exact here; the least is taken")
    least = count.partition("..")[0] or "1"
    sized = [f"{n}-{number[1]}GB" if number and n.upper() == "A100" and number[1] == "80" else n for n in names]
    found = [f"{n}:{least}" for n in sized]
    return found[0] if len(found) == 1 else found
