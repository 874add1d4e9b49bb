"""Contract of a base as JSON: the output `spotfleet` of a module in `terraform/`, read as `plugins.Base`.

A base sets keys of the fleet file that last longer than a run: region, network, firewall, identities, bucket. The fleet
file keeps the others; of images, disks and the queue, which a run may choose, the base has only defaults. A key that
lasts stands in one of the two, so that no reader has to know which one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from spotfleet import plugins
from spotfleet.config.document import Document
from spotfleet.errors import UsageError
from spotfleet.plugins import BASE_TAG, BASE_VERSION, Base, SectionPlugin
from spotfleet.version import __version__, upgrade

OUTPUT = "spotfleet"  # name of the module's output
A_RUN_CHOOSES = ("image", "dispatcher_image", "disk", "dispatcher_disk", "interruption_queue")
APPLY_AGAIN = "`terraform init -upgrade` and `terraform apply`"


class _Firewall(BaseModel):
    hosts: tuple[str, ...] = ()
    dispatcher: tuple[str, ...] = ()


class _Identities(BaseModel):
    hosts: str = ""
    dispatcher: str = ""


class _Contract(BaseModel):
    """Keys of the contract; those of a newer module that this release does not know are ignored."""

    version: int
    provider: str
    name: str
    region: str
    account: str = ""
    module: str = ""
    network: str = ""
    subnets: tuple[str, ...] = ()
    public_addresses: bool = False
    firewall: _Firewall = _Firewall()
    identities: _Identities = _Identities()
    checkpoints: str = ""
    queue: str = ""
    image: str = ""
    dispatcher_image: str = ""
    disk_gib: int = 0
    dispatcher_disk_gib: int = 0
    disk_key: str = ""
    tags: dict[str, str] = {}


def parse(text: str, where: str) -> Base:
    """Return the base in `text`: the output's value, all outputs as `terraform output -json` prints them, or one of
    those. UsageError for anything else, and for a version of the contract that this release does not read."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON: {error}",
                         hint="name the folder of the .tf files, or a file made by `terraform output -json > base.json`"
                         ) from None
    found = _value(data)
    if found is None:
        raise UsageError(f"{where}: has no output `{OUTPUT}`",
                         hint='write `output "spotfleet" { value = module.NAME.spotfleet }` beside a module of '
                              "spotfleet (`terraform/` in its repository; it takes a network that you have), and "
                              "`terraform apply`; or name the network in the fleet file, under its cloud")
    _refuse_other_version(found.get("version"), where)
    try:
        read = _Contract.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                         hint=f"this is not the output of a module of spotfleet; {APPLY_AGAIN} write it") from None
    if read.tags.get(BASE_TAG) != read.name:
        raise UsageError(f"{where}: tags: has no {BASE_TAG} = \"{read.name}\", to which the rights of the base's "
                         "roles are limited", hint=f"this is not the output of a module of spotfleet; {APPLY_AGAIN} "
                                                   "write it")
    plain = read.model_dump(exclude={"version", "firewall", "identities"})
    return Base(**plain, hosts_firewall=read.firewall.hosts, dispatcher_firewall=read.firewall.dispatcher,
                hosts_identity=read.identities.hosts, dispatcher_identity=read.identities.dispatcher)


def _value(data: Any) -> Mapping[str, Any] | None:
    """Return the contract in the JSON of the output or of all outputs; None if there is none."""
    for _ in range(3):  # {"spotfleet": {"value": {...}}}
        if not isinstance(data, dict) or "version" in data:
            break
        data = data.get(OUTPUT) or data.get("value")
    return data if isinstance(data, dict) else None


def _refuse_other_version(version: Any, where: str) -> None:
    if version == BASE_VERSION:
        return
    newer = isinstance(version, int) and version > BASE_VERSION
    raise UsageError(f"{where}: has version {version} of the contract, and spotfleet {__version__} reads version "
                     f"{BASE_VERSION}", hint=upgrade() if newer else f"{APPLY_AGAIN} with the module of this release")


def difference(base: Base) -> str:
    """Return how the module's release differs from this one; "" if it does not."""
    return "" if base.module == __version__ else (
        f"base {base.name} was made by the module of spotfleet {base.module or '(unknown)'}, and this is {__version__}")


def merge(document: Document, base: Base) -> None:
    """Put the keys that the base sets into a fleet file's document. Notes those that the file has as well."""
    data = document.data
    if (given := data.get("provider")) not in (None, base.provider):
        document.add(("provider",), f"is {given}, and base {base.name} is for {base.provider}: correct it, "
                                  "or name another base")
        return
    plugin: SectionPlugin = plugins.load(base.provider)
    keys = dict(plugin.base_keys(base))
    if not keys:
        document.add((), f"provider {base.provider} uses no base: leave --from-terraform or --discover out")
        return
    data["provider"] = base.provider
    _set(document, base.provider, keys, base)
    if base.checkpoints:
        _set(document, "checkpoint", {"target": base.checkpoints}, base)


def _set(document: Document, name: str, keys: Mapping[str, Any], base: Base) -> None:
    section = document.data.get(name) or {}
    if not isinstance(section, dict):
        return  # the schema reports it
    kept = {key for key in keys.keys() & section.keys() if key in A_RUN_CHOOSES or _within(section[key], keys[key])}
    for key in sorted(keys.keys() & section.keys() - kept):
        document.add((name, key), f"base {base.name} sets it, too: remove it here, or change it in Terraform")
    document.data[name] = {**section, **{key: value for key, value in keys.items() if key not in kept}}


def _within(given: Any, base: Any) -> bool:
    """Return whether the file's value is the base's, or a folder of the base's own."""
    return given == base or (isinstance(given, str) and isinstance(base, str) and "://" in base
                             and given.startswith(f"{base.rstrip('/')}/"))
