"""Cluster files of Ray: the head becomes the dispatcher's machine, the workers the hosts.

The file's own commands run as `setup`. Several types of workers become groups, so that each task of Ray gets hosts that
it fits on. With an image other than Ray's own, jobs run in containers and there is no Ray: types are alternatives then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spotfleet.config.foreign.source import Converted, ForeignKeys, name, script, without_empty
from spotfleet.model import DISPATCHERS

NOT_STARTED = "`spotfleet ray start` starts Ray with commands of its own"
PACE = "the dispatcher decides when to launch"
DISK_FROM = ("BlockDeviceMappings", "Ebs", "VolumeSize")
# Ray runs each command in a shell of its own, and the first that fails ends the start of the node.
MOST = 2  # workers of a file that names no `max_workers`, in Ray
LONGEST, GROUP_CHARS = 40, 12  # characters of FLEET-GROUP, and of a group's name (config/groups.py)
OF_MACHINES = ("CPU", "GPU", "memory", "object_store_memory")
OWN_IMAGE = re.compile(r"(docker\.io/)?rayproject/ray(-ml|-llm)?(:|$)")
STOPS = "set -e  # the first command that fails ends the setup\n"
OF_ITS_SHELL = re.compile(r"\b(cd|export|source|ulimit|conda activate)\b")
PROFILE = re.compile(r"\.(bashrc|profile|bash_profile)\b")
NETWORK = {"SubnetIds": ("subnets", r"subnet-[0-9a-f]{8,17}"), "SubnetId": ("subnets", r"subnet-[0-9a-f]{8,17}"),
           "SecurityGroupIds": ("security_groups", r"sg-[0-9a-f]{8,17}")}


def convert(data: Mapping[str, Any]) -> Converted:
    file = ForeignKeys(data)
    where = file.section("provider")
    kind = where.take("type", "")
    types = file.section("available_node_types")
    head, workers = _machines(file, types)
    setup, docker = _setup(file, workers), file.section("docker")
    image = _image(docker, workers, kind)
    minutes = file.take("idle_timeout_minutes")
    grouped = kind != "local" and not image and len(workers) > 1
    ranges = _ranges(file, workers, minutes) if grouped else {}
    least, most = (0, 0) if grouped else _nodes(file, workers)
    result: dict[str, Any] = {"name": name(file.take("cluster_name"))}
    if kind == "local":
        result |= _machines_over_ssh(file, where)
    else:
        result |= _cloud(kind, where, head, workers, ranges)
        result["nodes"] = None if grouped else _range(least, max(1, most, least), ray=not image)
    if grouped:
        longest = max(map(len, ranges))
        result["name"] = result["name"][:LONGEST - 1 - longest].rstrip("-")
    elif minutes and kind != "local" and not least:
        result["nodes"]["idle_after"] = f"{minutes:g}m"
    else:
        result["autostop"] = {"idle_minutes": minutes} if minutes else None
    result["file_mounts"] = file.take("file_mounts", {})
    result["setup"] = setup
    file.leave("head_setup_commands", "the dispatcher's machine runs none of your code")
    for key in list(docker.data):
        docker.leave(key, "`container` has an image, an engine and mounts")
    result["container"] = image
    result["ray"] = True if kind != "local" and not image else None  # with a container, jobs run in it and Ray cannot
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        file.leave(key, NOT_STARTED)
    for key in ("upscaling_speed", "autoscaling_mode", "target_utilization_fraction", "initial_workers",
                "aggressive_autoscaling"):
        file.leave(key, PACE)
    for key in ("rsync_exclude", "rsync_filter"):
        file.leave(key, "write the names into .gitignore or .spotfleetignore")
    for key in ("cluster_synced_files", "file_mounts_sync_continuously", "no_restart"):
        file.leave(key, "files are shipped by `train` and `ray submit`")
    auth = file.section("auth")
    if kind == "local":
        result["ssh"] |= without_empty({"user": auth.take("ssh_user"), "identity_file": auth.take("ssh_private_key")})
    elif (user := auth.take("ssh_user")) not in (None, "ubuntu"):
        result.setdefault(kind, {})["user"] = user
    auth.leave("ssh_private_key", "a fleet has a key of its own")
    for part in (auth, where, file):
        part.finish()
    return Converted(without_empty(result), tuple(file.left_out))


def _machines(file: ForeignKeys, types: ForeignKeys) -> tuple[ForeignKeys, list[ForeignKeys]]:
    """Return the head's machine and the workers', each as a `node_config` with the numbers of its type."""
    head_name = file.take("head_node_type")
    if not types.data:
        return file.section("head_node"), [file.section("worker_nodes")]
    found = {key: types.section(key) for key in list(types.data)}
    for kind in found.values():
        kind.leave("labels", "no job is placed by labels")
        _leave_resources(kind)
    head = found.pop(head_name, ForeignKeys({}))
    if head.data.get("max_workers"):  # then workers are of the head's type, too
        found[head_name] = ForeignKeys(head.data, head.path, head.left_out)
    machine = head.section("node_config")
    for key in ("min_workers", "max_workers", "docker"):
        head.take(key)
    if not found and machine.data:
        file.note("head_node_type", "the head is the only node, and becomes a host; the dispatcher has a small machine "
                                    "of its own")
        alone = {"node_config": machine.data, "min_workers": 1, "max_workers": 1}
        return ForeignKeys({}, "", file.left_out), [ForeignKeys(alone, head.path, file.left_out)]
    return machine, [*found.values()] or [ForeignKeys({}, "", file.left_out)]


def _setup(file: ForeignKeys, workers: list[ForeignKeys]) -> str:
    """Return the commands that Ray runs on each worker, as a script that ends at the first failure."""
    lists = [file.take(key) or [] for key in ("initialization_commands", "setup_commands", "worker_setup_commands")]
    if len(workers) == 1:
        lists[2] = workers[0].take("worker_setup_commands", lists[2])  # those of a type replace those of the file
    for worker in workers:
        worker.leave("worker_setup_commands", "`setup` is one for all hosts")
    commands = [script(command if isinstance(command, list) else [command]).rstrip("\n")
                for part in lists for command in part]
    if any(PROFILE.search(command) for command in commands):
        file.note("setup_commands", "`setup` and jobs read no ~/.bashrc and no profile: write variables under `envs`, "
                                    "and an `export PATH=...` at the head of `setup` and `run`")
    lines = [f"( {command} )" if OF_ITS_SHELL.search(command) else command for command in commands]
    return STOPS + script(lines) if lines else ""


def _leave_resources(kind: ForeignKeys) -> None:
    """Report the resources of a type that its machines do not have by themselves."""
    given = kind.take("resources", {})
    own = [r for r in given if r not in OF_MACHINES and not str(r).startswith("accelerator_type:")]
    if own:
        kind.note("resources", f"hosts offer what their machines have, and none of {', '.join(map(str, own))}: tasks "
                               "that ask for it would wait for ever")


def _ranges(file: ForeignKeys, workers: list[ForeignKeys], minutes: float | None) -> dict[str, dict[str, Any]]:
    """Return the name of a group and its range for each type, in their order; types without a node are removed."""
    file.take("min_workers")  # the types have their own
    most = file.take("max_workers", MOST)
    found: dict[str, dict[str, Any]] = {}
    for worker in list(workers):
        low, high = worker.take("min_workers", 0), min(worker.take("max_workers", most), most)
        if not high:
            workers.remove(worker)
            continue
        kind = worker.path.removeprefix("available_node_types.").rstrip(".")
        found[_group(kind, found)] = _range(low, max(high, low), ray=True) | (
            {"idle_after": f"{minutes:g}m"} if minutes else {})
    if sum(one["max"] for one in found.values()) > most:
        file.note("max_workers", f"a group has its own: `spotfleet ray start --hosts 1:{most}` gives Ray at most "
                                 f"{most} hosts of all groups")
    return found


def _range(least: int, most: int, *, ray: bool) -> dict[str, Any]:
    """Return a range of hosts. With `ray` the fleet begins with the fewest, as in Ray, and not with the most."""
    return {"min": least, **({"target": least} if ray and 0 < least < most else {}), "max": most}


def _group(kind: str, others: Mapping[str, Any]) -> str:
    """Return a group's name for the name of a type."""
    plain = re.sub(r"[^a-z0-9]", "", kind.lower()).removeprefix("ray") or "workers"
    plain = (plain if plain[0].isalpha() else f"g{plain}")[:GROUP_CHARS]
    names = [plain, *(f"{plain[:GROUP_CHARS - len(str(n))]}{n}" for n in range(2, 100))]
    return next(one for one in names if one not in others and one != DISPATCHERS)


def _image(docker: ForeignKeys, workers: list[ForeignKeys], provider: str) -> str | None:
    """Return the image of the workers: that of their type, that of all workers, or that of all nodes. None for one of
    Ray's own, in whose place the hosts get Ray."""
    common, of_workers = docker.take("image"), docker.take("worker_image")
    for key in ("head_image", "head_run_options"):
        docker.leave(key, "the dispatcher's machine runs none of your code")
    own = [worker.section("docker") for worker in workers]
    found = own[0].take("worker_image") if len(own) == 1 else None
    for worker in own:
        worker.finish()
    image = str(found or of_workers or common or "")
    if provider != "local" and OWN_IMAGE.match(image):
        docker.note("image", f"{image} is Ray itself: hosts get Ray by `ray`; install its other packages by `setup`")
        return None
    if image and provider != "local":
        docker.note("image", "jobs run in it, and `spotfleet ray` needs a fleet without `container`: for Ray remove "
                             "it, install its packages by `setup`, and write `ray: true`")
    return image or None


def _nodes(file: ForeignKeys, workers: list[ForeignKeys]) -> tuple[int, int]:
    """Return the least and the most workers, from the whole file and from the types."""
    least, most = file.take("min_workers"), file.take("max_workers")
    low = [w.take("min_workers") for w in workers]
    high = [w.take("max_workers") for w in workers]
    least = sum(n or 0 for n in low) if any(n is not None for n in low) else least or 0
    of_types = sum(n or 0 for n in high) if all(n is not None for n in high) else 0
    most = min(filter(None, (most, of_types)), default=max(MOST, least))
    return least, most


def _machines_over_ssh(file: ForeignKeys, where: ForeignKeys) -> dict[str, Any]:
    file.take("head_node")
    file.take("worker_nodes")
    hosts = where.take("worker_ips", [])
    return {"provider": "ssh", "ssh": {"dispatcher": where.take("head_ip"), "hosts": hosts},
            "nodes": {"min": 1, "max": max(1, len(hosts))}}


def _cloud(kind: str, where: ForeignKeys, head: ForeignKeys, workers: list[ForeignKeys],
           ranges: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the machines, as groups with these ranges, or without any as alternatives."""
    zones = [z.strip() for z in str(where.take("availability_zone", "")).split(",") if z.strip()]
    region = where.take("region")
    where.leave("cache_stopped_nodes", "hosts are never kept stopped; `interruption_behavior: stop` is another thing")
    found: list[dict[str, Any]] = []
    own: dict[str, Any] = {}
    for worker in workers:
        config = worker.section("node_config") if "node_config" in worker.data else worker
        found.append(_machine(config, own))
        if (networks := _network(config)) and region:
            own["networks"] = {region: networks}
        for part in {id(config): config, id(worker): worker}.values():
            part.finish()
    machine = _machine(head, {})
    for key in ("use_spot", "max_hourly_cost"):
        machine.pop(key, None)
    head.data.clear()
    resources: dict[str, Any] = {"infra": "/".join(filter(None, [kind, region]))}
    if machine.get("instance_type"):
        head.left_out.append(f"head: {machine['instance_type']} becomes the dispatcher's machine, on which Ray runs no "
                             "task: for a small one leave `dispatcher` out")
    if ranges:
        if zones:
            resources |= {"zone": zones[0]} if len(zones) == 1 else {"any_of": [{"zone": zone} for zone in zones]}
        groups = {group: {"nodes": nodes} | one for (group, nodes), one in zip(ranges.items(), found, strict=True)}
        return {"resources": resources, "groups": groups, "dispatcher": machine, kind: own}
    alternatives = [one | ({"zone": zone} if zone else {}) for one in found for zone in zones or [""]]
    if len(alternatives) == 1:
        resources |= alternatives[0]
    else:
        resources["any_of"] = alternatives
    return {"resources": resources, "dispatcher": machine, kind: own}


def _machine(config: ForeignKeys, own: dict[str, Any]) -> dict[str, Any]:
    """Return the resources of one `node_config`; what is the cloud's own goes into `own`."""
    kind = config.take("InstanceType") or config.take("machineType")
    options = config.section("InstanceMarketOptions")
    scheduling = config.take("scheduling", {})
    preemptible = any(one.get("preemptible") for one in (scheduling if isinstance(scheduling, list) else [scheduling])
                      if isinstance(one, dict))
    spot = options.take("MarketType") == "spot" or preemptible
    price = options.section("SpotOptions").take("MaxPrice")
    config.leave("guestAccelerators", "GPUs are not attached to a type: name one that has them, such as g2-standard-4")
    own |= without_empty({"image": config.take("ImageId"), "key_pair": config.take("KeyName")})
    for disk in config.take("disks", []):  # Google Cloud's
        given = disk.get("initializeParams") or {} if isinstance(disk, dict) else {}
        own |= without_empty({"disk": given.get("diskSizeGb"), "image": _image_path(given.get("sourceImage"))})
    for disk in config.take(DISK_FROM[0], []):
        if gib := (disk.get(DISK_FROM[1]) or {}).get(DISK_FROM[2]):
            own["disk"] = gib
    return without_empty({"instance_type": kind, "max_hourly_cost": float(price) if _number(price) else None}) | {
        "use_spot": spot}


def _image_path(path: Any) -> str:
    """Return an image of Google Cloud without the address of its API."""
    return str(path or "").rpartition("/v1/")[2]


def _network(config: ForeignKeys) -> dict[str, list[str]]:
    """Return the subnets and security groups of AWS that a `node_config` names."""
    found: dict[str, list[str]] = {}
    for key, (ours, form) in NETWORK.items():
        ids = config.data.get(key) or []
        ids = ids if isinstance(ids, list) else [ids]
        if ids and all(re.fullmatch(form, str(one)) for one in ids):
            found[ours] = [str(one) for one in ids]
            config.take(key)
        elif ids:
            config.leave(key, f"{ids[0]} is not the id of one; write yours under `aws.networks`")
    return found


def _number(value: Any) -> bool:
    return str(value or "").replace(".", "", 1).isdigit()
