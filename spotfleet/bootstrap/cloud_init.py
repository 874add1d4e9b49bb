"""User data for a machine that a cloud makes: the files and the script as over SSH, run by cloud-init as root.

It is text that a person can read. GCP takes it as it is; EC2 and Azure take `packed`, which cloud-init unpacks. The
wheel is never in it: a host fetches it by digest, or it is brought over SSH once the machine answers with the host key
that it was given here. remove.sh is not either, since such a machine goes as a whole.

A machine that the cloud stops and starts again becomes the same host: systemd runs its unit, and where there is none a
script of cloud-init's for each boot begins anew.
"""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Sequence
from typing import Any

from spotfleet.bootstrap import CLAIM, HostPlan, script
from spotfleet.errors import UsageError
from spotfleet.ssh.keys import KeyPair

LIMIT_BYTES = 16_384  # EC2's, before base64
HOME = "/root"
ROOT = f"{HOME}/.spotfleet-host"  # of a plan that names no other
EACH_BOOT = "/var/lib/cloud/scripts/per-boot"
EACH = """#!/bin/sh
# At the first boot `runcmd` starts it.
[ ! -e {host}/state ] || exec {start}
"""
PACKAGES = ("python3-venv",)  # cloud images of Debian and Ubuntu can make no virtual environment without


def user_data(plan: HostPlan, *, user: str, authorized_keys: Sequence[str], host_key: KeyPair | None,
              packages: Sequence[str] | None = None, key_pair: bool = False) -> str:
    """A `#cloud-config` for this plan; `user` enters by `authorized_keys`, and the machine shows `host_key` alone.

    With `key_pair`, a key that the cloud itself hands to the machine opens it too, as the image's own user.
    `packages` are the system's; None: what an environment is made with, and nothing where one is inherited, so that a
    ready image asks no server for anything.
    """
    if packages is None:
        packages = () if plan.environment.inherit else PACKAGES
    root = HOME + plan.root[1:] if plan.root == "~" or plan.root.startswith("~/") else plan.root
    host = f"{root}/{plan.request_id}"
    start = ["env", f"HOME={HOME}", "bash", f"{host}/bootstrap.sh", "start"]
    files = {name: text for name, text in script.files(plan).items() if _wanted(name, plan)}
    config: dict[str, Any] = {
        **_doors(user, list(authorized_keys), key_pair),
        "ssh_pwauth": False,
        **({} if host_key is None else {
            "ssh_deletekeys": True,
            "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        }),
        **({"package_update": True, "packages": list(packages)} if packages else {}),
        "write_files": [_file(f"{root}/{CLAIM}", f"{plan.request_id}\n"),
                        *(_file(f"{host}/{name}", text) for name, text in files.items()),
                        _file(f"{EACH_BOOT}/spotfleet", EACH.format(host=host, start=shlex.join(start)), "0700")],
        "runcmd": [["chmod", "700", root, host], start],
    }
    return "#cloud-config\n" + to_yaml(config)


def packed(text: str) -> bytes:
    """`user_data` for a cloud that takes LIMIT_BYTES; UsageError when it would not fit."""
    data = gzip.compress(text.encode(), mtime=0)
    if len(data) > LIMIT_BYTES:
        raise UsageError(f"user data has {len(data)} bytes packed, and a cloud takes {LIMIT_BYTES}",
                         hint="shorten the fleet file: packages, setup, run, tags")
    return data


def _wanted(name: str, plan: HostPlan) -> bool:
    return name != "remove.sh" and (name != "inherit.py" or plan.environment.inherit)


def _doors(user: str, keys: list[str], key_pair: bool) -> dict[str, Any]:
    if user == "root":
        return {"disable_root": False, "users": ["default"], "ssh_authorized_keys": keys}
    # cloud-init gives the cloud's key to its `default` user alone; of the same name, both entries become one
    return {"disable_root": True, "users": [*(["default"] if key_pair else []), {
        "name": user, "shell": "/bin/bash", "lock_passwd": True, "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "ssh_authorized_keys": keys,
    }]}


def _file(path: str, text: str, mode: str = "0600") -> dict[str, str]:
    return {"path": path, "permissions": mode, "owner": "root:root", "content": text}


def to_yaml(config: dict[str, Any]) -> str:
    """Texts of several lines stand there line by line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(config, Dumper=Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)
