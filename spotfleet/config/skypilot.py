"""SkyPilot's task files: their keys in the words of our fleet file, before the schema checks it.

    kept     the keys that mean the same: name, workdir, num_nodes, envs, secrets, setup, run, resources.accelerators,
             cpus, memory, disk_size, image_id, network_tier, use_spot, any_of, region, zone, instance_type, autostop
    renamed  ordered -> any_of and in_order, cloud -> infra, gpus -> accelerators, labels -> tags, file_mounts -> PATH:
             SOURCE
    noted    what changes nothing here: ports, disk_tier, job_recovery, config; and capital letters in names
    refused  what has no meaning here: Kubernetes, `service`, `pool`, `volumes`, shares of a GPU

A note is one line for the user; a problem stands beside the file's other problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from spotfleet.config.document import Document, Place
from spotfleet.config.gpus import with_memory
from spotfleet.storage.schemes import SCHEMES, STORES
from spotfleet.words import counted, did_you_mean

KEYS = frozenset({"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run",
                  "config", "volumes", "service", "pool", "event_callback", "experimental", "inputs", "outputs",
                  "estimated"})  # at the top of a task file
REFUSED = {
    "service": "replicas behind a load balancer are not run here; `spotfleet port-forward` reaches a port of one host",
    "pool": "a pool of workers that wait for jobs is a fleet here: `nodes: N`, and `spotfleet train` for each job",
    "volumes": "the volumes of another program cannot be mounted; name data under `file_mounts`",
}
KUBERNETES = ("kubernetes", "k8s", "ssh-node-pool")
PROGRAM = ("config", "event_callback", "experimental", "inputs", "outputs", "estimated")
NETWORK = {"vpc_name", "vpc_names", "use_internal_ips", "security_group_name", "subnet_names", "ssh_proxy_command"}
FIRST_STORE = "s3"  # the store of a bucket that names none
MOUNTED = ("MOUNT", "MOUNT_CACHED")
MODES = ("COPY", *MOUNTED)
SAME_MODEL = {"a100-40gb": "A100", "v100-16gb": "V100"}  # the plain name means that memory
WORKDIR = re.compile(r"(?:~|\$HOME|\$\{HOME\})/sky_workdir\b")  # SkyPilot's working directory
AT_WORKDIR = 'export SKY_WORKDIR="$PWD"; '  # on the script's first line, so that the lines of its messages stay
BY_MEMORY = re.compile(r"(?:(nvidia|amd):)?(\d+GB\+?)(?::(\d+))?", re.I)  # 80GB:8, 40GB+
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")

Values = Mapping[str, str]
Installed = Callable[[], list[str]]  # lists the providers; called only for a file that names a cloud


def is_task(data: Mapping[str, Any]) -> bool:
    """Return whether a file that names no provider is a task for real machines: it has no key but SkyPilot's, and asks
    for a size or an accelerator, or has a command to run."""
    if not set(data) <= KEYS:
        return False
    resources = data.get("resources")
    resources = resources if isinstance(resources, dict) else {}
    asked = [resources, *(a for key in ("any_of", "ordered") for a in _items(resources.get(key)))]
    if any("instance_type" in a for a in asked):
        return False  # the type tells which provider sells it
    sized = {"accelerators", "gpus", "cpus", "memory", "disk_size", "disk_tier", "image_id", "ports", "network_tier"}
    return any(sized & set(a) for a in asked) or "run" in data


def _items(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def adapt(document: Document, values: Values, installed: Installed) -> None:
    """Rewrite the data of `document`, with notes and problems. `values`: the variables that its texts may name."""
    data, installed = document.data, cache(installed)
    for key in REFUSED:
        if data.pop(key, None) is not None:
            document.add((key,), REFUSED[key])
    for key in PROGRAM:
        if (given := data.pop(key, None)) is not None:
            document.note(f"`{key}` is for SkyPilot itself and changes nothing here{_instead(given)}")
    _name(document)
    if isinstance(data.get("workdir"), dict):
        document.later(("workdir",), "a Git repository is not fetched; clone it, and name the folder")
        del data["workdir"]
    if isinstance(data.get("resources"), dict):
        data["resources"] = _resources(document, data["resources"], installed)
    for key in ("envs", "secrets"):
        if isinstance(data.get(key), dict):
            data[key] = {k: str(v).lower() if isinstance(v, bool) else v for k, v in data[key].items()}
    if isinstance(data.get("file_mounts"), dict):
        _mounts(document, values)
    for key in ("setup", "run"):
        if isinstance(text := data.get(key), str) and WORKDIR.search(text):
            data[key] = AT_WORKDIR + WORKDIR.sub("$SKY_WORKDIR", text)
            document.note(f"~/sky_workdir in `{key}` is $SKY_WORKDIR here, the working directory of the job")


def _instead(config: Any) -> str:
    """Return which of our keys have the meaning of a part of SkyPilot's configuration that a fleet would miss."""
    found = []
    if isinstance(config, dict):
        config = config.get("config_overrides") or config
        for cloud, part in config.items():
            if isinstance(part, dict) and (named := sorted(set(part) & NETWORK)):
                found.append(f"for {', '.join(named)} write the network and `public_addresses` under `{cloud}`")
        if isinstance(config.get("docker"), dict) and config["docker"].get("run_options"):
            found.append("folders of `docker.run_options` are `container: {image: ..., mounts: ...}`")
    return "".join(f"; {one}" for one in found)


def _name(document: Document) -> None:
    name = document.data.get("name")
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z][\w.@-]*", name):
        changed = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
        if changed != name:
            document.data["name"] = changed
            document.note(f"the fleet's name is '{changed}': names have small letters, digits and '-'")


# --- resources


def _resources(document: Document, given: dict[str, Any], installed: Installed) -> dict[str, Any]:
    resources = _place(document, dict(given), ("resources",), installed)
    if labels := resources.pop("labels", None):
        tags = document.data.get("tags")
        if isinstance(labels, dict) and isinstance(tags or {}, dict):
            document.data["tags"] = {str(k): str(v) for k, v in labels.items()} | (tags or {})
    if "ordered" in resources and "any_of" not in resources:
        resources["any_of"], resources["in_order"] = resources.pop("ordered"), True
        for place, line in list(document.lines.items()):
            if place[:2] == ("resources", "ordered"):
                document.lines["resources", "any_of", *place[2:]] = line
    if isinstance(resources.get("any_of"), list):
        _alternatives(document, resources, installed)
    elif (cloud := _cloud(resources)) and _unknown(cloud, installed):
        document.add(("resources", "infra"), _no_provider(cloud, installed))
        del resources["infra"]
    if isinstance(resources.get("autostop"), dict):
        for key in ("wait_for", "hook", "hook_timeout"):
            if resources["autostop"].pop(key, None) is not None:
                document.note(f"`autostop.{key}` changes nothing here: a fleet is idle when it has no job")
    elif resources.get("autostop") is True:
        resources["autostop"] = {"idle_minutes": 5}
    return resources


def _alternatives(document: Document, resources: dict[str, Any], installed: Installed) -> None:
    """Leave out the alternatives on clouds without a provider, unless none would be left."""
    found: list[Any] = []
    missing: dict[str, int] = {}
    for index, item in enumerate(resources["any_of"]):
        one, cloud = item, ""
        if isinstance(item, dict):
            one = _place(document, dict(item), ("resources", "any_of", index), installed)
            cloud = _cloud(one)
        if cloud and _unknown(cloud, installed):
            missing[cloud] = missing.get(cloud, 0) + 1
        else:
            found.append(one)
    if missing and not found:
        document.add(("resources", "any_of"), _no_provider(next(iter(missing)), installed))
        found = [{}]
    for cloud, count in missing.items() if found != [{}] else ():
        document.note(f"{counted(count, 'alternative')} left out: {_no_provider(cloud, installed)}")
    resources["any_of"] = found
    clouds = dict.fromkeys(_cloud(one) for one in found if isinstance(one, dict))
    if "provider" not in document.data and not _cloud(resources) and "" not in clouds and clouds:
        document.data["provider"] = list(clouds) if len(clouds) > 1 else next(iter(clouds))


def _cloud(resources: Mapping[str, Any]) -> str:
    infra = resources.get("infra")
    return infra.partition("/")[0] if isinstance(infra, str) and infra[:1] != "*" else ""


def _unknown(cloud: str, installed: Installed) -> bool:
    return cloud.lower() not in installed()


def _no_provider(cloud: str, installed: Installed) -> str:
    if cloud.lower() in KUBERNETES:
        return "Kubernetes runs no fleet: a host is a machine of its own, in a cloud or reached over SSH"
    return f"no provider for {cloud} is installed; there is {', '.join(installed())}{did_you_mean(cloud, installed())}"


def _place(document: Document, one: dict[str, Any], at: Place, installed: Installed) -> dict[str, Any]:
    """Return one set of resources in our words."""
    if "cloud" in one and "infra" not in one:
        parts = [one.pop("cloud"), one.pop("region", None), one.pop("zone", None)]
        while parts and parts[-1] is None:
            parts.pop()
        one["infra"] = "/".join("*" if part is None else str(part) for part in parts) or None
    infra = one.get("infra")
    if isinstance(infra, str):
        cloud, slash, rest = infra.partition("/")
        one["infra"] = cloud.lower() + slash + rest
        if cloud.lower() in KUBERNETES:
            one["infra"] = cloud.lower()
    one = {key: value for key, value in one.items() if value is not None}
    images, place = one.get("image_id"), str(one.get("infra") or "").split("/")
    if isinstance(images, dict) and (image := images.get(one.get("region") or "".join(place[1:2]))):
        one["image_id"] = image  # the images are one for each region
    if "gpus" in one and "accelerators" not in one:
        one["accelerators"] = one.pop("gpus")
    if "accelerators" in one:
        _accelerators(document, one, at)
    notes: dict[str, Callable[[Any], str]] = {
        "ports": lambda ports: f"`ports` stay closed to the internet: `spotfleet port-forward {_first(ports)}` reaches "
                               "one through SSH",
        "disk_tier": lambda _: "`disk_tier` changes nothing: disks are of the provider's usual kind",
        "job_recovery": _recovery,
        "priority": lambda given: f"`priority` changes nothing here: `spotfleet train --priority {given}` is for a job",
        "spot_recovery": lambda _: "`spot_recovery` changes nothing: jobs always recover",
        "local_disk": lambda _: "`local_disk` changes nothing: the type decides",
    }
    for key, note in notes.items():
        if key in one:
            document.note(note(one.pop(key)))
    return one


def _recovery(given: Any) -> str:
    after = given.get("max_restarts_on_errors") if isinstance(given, dict) else None
    lost = "`job_recovery` changes nothing: jobs always recover"
    return f"{lost} from lost hosts; after errors of their own with `train --max-restarts {after}`" if after else lost


def _first(ports: Any) -> Any:
    return ports[0] if isinstance(ports, list) and ports else ports


def _accelerators(document: Document, one: dict[str, Any], at: Place) -> None:
    """Rewrite `accelerators` as a list of NAME:COUNT, and refuse what is no number of GPUs."""
    given, found = one["accelerators"], []
    if isinstance(given, dict):
        given = [name if count is None else f"{name}:{count}" for name, count in given.items()]
    for item in given if isinstance(given, list) else [given]:
        if sized := BY_MEMORY.fullmatch(str(item)):
            maker, memory, number = sized.groups()
            some = with_memory(memory, maker or "nvidia")
            if not some:
                document.add((*at, "accelerators"), f"no GPU with {memory} is known; name one, such as A100-80GB:8")
            found += [f"{name}:{number or 1}" for name in some]
            continue
        name, _, count = str(item).partition(":")
        if name.lower().startswith("tpu"):
            document.add((*at, "accelerators"), f"{name} is a TPU; workers run on GPUs or CPUs")
            del one["accelerators"]
            one.pop("accelerator_args", None)
            return
        if "." in count:
            document.add((*at, "accelerators"), f"{item} is a share of a GPU; a host has whole ones: {name}:1")
            del one["accelerators"]
            return
        name = SAME_MODEL.get(name.lower(), name)
        found.append(f"{name}:{count}" if count else name)
    if not found and given:
        del one["accelerators"]
        return
    one["accelerators"] = found if len(found) != 1 else found[0]
    if one.pop("accelerator_args", None):
        document.note("`accelerator_args` is for TPUs and changes nothing")


# --- file_mounts


def _mounts(document: Document, values: Values) -> None:
    found: dict[str, Any] = {}
    mounted: dict[str, str] = {}
    for target, source in document.data["file_mounts"].items():
        place: Place = ("file_mounts", str(target))
        name = _filled(document, place, str(target), values)
        if place[1] != name:
            document.lines["file_mounts", name] = document.lines.get(place, 1)
        if "://" in name:
            document.add(place, f"expected the target before the source, such as /data: {name}")
            continue
        if "$" in name:
            continue
        if not isinstance(source, dict):
            found[name] = _filled(document, place, source, values) if isinstance(source, str) else source
            continue
        if str(mode := source.get("mode") or "COPY").upper() not in MODES:
            document.add(place, f"expected mode {', '.join(MODES[:-1])} or {MODES[-1]}, got '{mode}'")
            continue
        bucket, path = _bucket(document, place, source, values), source.get("source")
        if isinstance(path, str) and not bucket:
            path = _filled(document, place, path, values)
            found |= {name: path} if _looks_local(path) or source.get("mode") in (None, "COPY") else {}
        elif bucket and _is_mounted(source):
            mounted[name] = bucket
            document.lines.setdefault(("mounted",), document.lines.get(place, 1))
        elif bucket:
            found[name] = bucket
    document.data["file_mounts"] = {k: v for k, v in found.items() if not (isinstance(v, str) and "$" in v)}
    if mounted:
        document.data["mounted"] = mounted


def _is_mounted(source: Mapping[str, Any]) -> bool:
    mode = str(source.get("mode") or ("COPY" if source.get("source") else "MOUNT"))
    return mode.upper() in MOUNTED


def _bucket(document: Document, place: Place, given: Mapping[str, Any], values: Values) -> str:
    """Return the URL of the bucket that a mount names; "" for a local source, or with a problem noted."""
    source, name = given.get("source"), given.get("name")
    if isinstance(source, str):
        source = _filled(document, place, source, values)
    if isinstance(source, str) and "://" in source:
        return _known(document, place, source)
    if source is not None and (given.get("mode") in (None, "COPY") or _looks_local(source)):
        if name is not None:
            kept = "; what a job writes there stays on its host" if _is_mounted(given) else ""
            document.note(f"file_mounts.{place[1]} is shipped with the working directory; no bucket is made of it"
                          f"{kept}")
        return ""
    name = name if name is not None else source
    if name is None:
        document.later(place, "names no bucket: write `name`")
        return ""
    store = _filled(document, place, str(given.get("store") or ""), values).lower()
    bucket = _filled(document, place, str(name), values)
    scheme = STORES.get(store, store) or FIRST_STORE
    return "" if "$" in bucket + store else _known(document, place, f"{scheme}://{bucket}")


def _known(document: Document, place: Place, url: str) -> str:
    scheme = url.partition("://")[0]
    if scheme in SCHEMES or "$" in url:
        return url
    document.later(place, f"{scheme} is no object store that hosts can read; name a bucket of {', '.join(STORES)}")
    return ""


def _looks_local(source: Any) -> bool:
    return isinstance(source, str) and source.startswith((".", "/", "~")) and "://" not in source


def _filled(document: Document, place: Place, text: str, values: Values) -> str:
    """Replace $NAME and ${NAME}; a variable without a value is noted for later."""
    def one(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not values.get(name):
            document.later(place, f"names the variable {name}, which has no value under `envs`; `--env {name}=...`")
            return found[0]
        return values[name]

    return VARIABLE.sub(one, text)
