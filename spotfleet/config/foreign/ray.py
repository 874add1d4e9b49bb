"""Cluster files of Ray: the head becomes the dispatcher's machine, the workers the hosts.

The file's own commands run as `setup`. Ray itself is not started: `spotfleet train` runs the script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spotfleet.config.foreign.source import Converted, ForeignKeys, name, script, without_empty

NOT_STARTED = "`spotfleet ray start` starts Ray with commands of its own"
PACE = "the dispatcher decides when to launch"
DISK_FROM = ("BlockDeviceMappings", "Ebs", "VolumeSize")
# Ray runs each command in a shell of its own, and the first that fails ends the start of the node.
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
    least, most = _nodes(file, workers)
    setup, docker = _setup(file, workers), file.section("docker")
    image = _image(docker, workers)
    result: dict[str, Any] = {"name": name(file.take("cluster_name"))}
    if kind == "local":
        result |= _machines_over_ssh(file, where)
    else:
        result |= _cloud(kind, where, head, workers)
        result["nodes"] = {"min": least, "max": max(1, most, least)}
    minutes = file.take("idle_timeout_minutes")
    if minutes and kind != "local" and not least:
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
        file.leave(key, "files are shipped by `train`")
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
        kind.take("resources")
    head = found.pop(head_name, ForeignKeys({}))
    if head.data.get("max_workers"):  # then workers are of the head's type, too
        found[head_name] = ForeignKeys(head.data, head.path, head.left_out)
    machine = head.section("node_config")
    for key in ("min_workers", "max_workers", "docker"):
        head.take(key)
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


def _image(docker: ForeignKeys, workers: list[ForeignKeys]) -> str | None:
    """Return the image of the workers: that of their type, that of all workers, or that of all nodes."""
    common, of_workers = docker.take("image"), docker.take("worker_image")
    for key in ("head_image", "head_run_options"):
        docker.leave(key, "the dispatcher's machine runs none of your code")
    own = [worker.section("docker") for worker in workers]
    found = own[0].take("worker_image") if len(own) == 1 else None
    for worker in own:
        worker.finish()
    return found or of_workers or common


def _nodes(file: ForeignKeys, workers: list[ForeignKeys]) -> tuple[int, int]:
    """Return the least and the most workers, from the whole file and from the types."""
    least, most = file.take("min_workers"), file.take("max_workers")
    low = [w.take("min_workers") for w in workers]
    high = [w.take("max_workers") for w in workers]
    least = sum(n or 0 for n in low) if any(n is not None for n in low) else least or 0
    of_types = sum(n or 0 for n in high) if all(n is not None for n in high) else 0
    most = min(filter(None, (most, of_types)), default=0) or least
    return least, most


def _machines_over_ssh(file: ForeignKeys, where: ForeignKeys) -> dict[str, Any]:
    file.take("head_node")
    file.take("worker_nodes")
    hosts = where.take("worker_ips", [])
    return {"provider": "ssh", "ssh": {"dispatcher": where.take("head_ip"), "hosts": hosts},
            "nodes": {"min": 1, "max": max(1, len(hosts))}}


def _cloud(kind: str, where: ForeignKeys, head: ForeignKeys, workers: list[ForeignKeys]) -> dict[str, Any]:
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
