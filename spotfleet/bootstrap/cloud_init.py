"""User data for a machine that a cloud makes: the same files and script as over SSH, run by cloud-init as root.

The text is readable. GCP takes it unchanged; EC2 and Azure take `packed`, which cloud-init unpacks. It never contains
the wheel. A host fetches the wheel by digest, or the laptop copies it over SSH once the machine answers with the host
key that it was given here. It does not contain remove.sh either, since such a machine is removed as a whole; the other
scripts come without their comments.

A machine that the cloud stops and starts again becomes the same host: systemd runs its unit. Without systemd, a
per-boot script of cloud-init starts the host again.

Ubuntu installs security updates by itself, and needrestart then restarts each service that uses a replaced library:
our unit, too. A host lives for hours and upgrades nothing. A dispatcher goes on upgrading, and needrestart leaves our
unit alone.
"""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Sequence
from typing import Any

from spotfleet.bootstrap import CLAIM, HostPlan, script
from spotfleet.errors import UsageError
from spotfleet.model import Role
from spotfleet.ssh.keys import KeyPair

LIMIT_BYTES = 16_384  # EC2's limit, before base64
HOME = "/root"
ROOT = f"{HOME}/.spotfleet-host"  # for a plan that names no other root
EACH_BOOT = "/var/lib/cloud/scripts/per-boot"
EACH = """#!/bin/sh
# At the first boot `runcmd` starts it.
[ ! -e {host}/state ] || exec {start}
"""
NO_RESTART = ("/etc/needrestart/conf.d/spotfleet.conf", "$nrconf{override_rc}{qr(^spotfleet-)} = 0;\n")
NO_UPGRADES = ("/etc/apt/apt.conf.d/99spotfleet", 'APT::Periodic::Enable "0";\n')
UPGRADERS = ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service")
PACKAGES = ("python3-venv",)  # without it, cloud images of Debian and Ubuntu cannot make a virtual environment


def user_data(plan: HostPlan, *, user: str, authorized_keys: Sequence[str], host_key: KeyPair | None,
              packages: Sequence[str] | None = None, key_pair: bool = False) -> str:
    """Return a `#cloud-config` for this plan; `user` logs in with `authorized_keys`, and the machine shows only
    `host_key`.

    With `key_pair`, a key that the cloud itself installs is accepted too, for the image's own user. `packages` are
    system packages; None: the packages needed to make an environment, and none where one is inherited, so that a ready
    image contacts no server.
    """
    if packages is None:
        packages = () if plan.environment.inherit else PACKAGES
    root = HOME + plan.root[1:] if plan.root == "~" or plan.root.startswith("~/") else plan.root
    host = f"{root}/{plan.request_id}"
    start = ["env", f"HOME={HOME}", "bash", f"{host}/bootstrap.sh", "start"]
    files = {name: script.short(name) if name in script.SCRIPTS else text
             for name, text in script.files(plan).items() if _wanted(name, plan)}
    config: dict[str, Any] = {
        **_doors(user, list(authorized_keys), key_pair),
        "ssh_pwauth": False,
        **({} if host_key is None else {
            "ssh_deletekeys": True,
            "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        }),
        **({"bootcmd": [_upgrades_off()]} if plan.role is Role.WORKER else {}),
        **({"package_update": True, "packages": list(packages)} if packages else {}),
        "write_files": [_file(f"{root}/{CLAIM}", f"{plan.request_id}\n"),
                        *(_file(f"{host}/{name}", text) for name, text in files.items()),
                        _file(f"{EACH_BOOT}/spotfleet", EACH.format(host=host, start=shlex.join(start)), "0700"),
                        _file(*NO_RESTART, "0644"),
                        *([_file(*NO_UPGRADES, "0644")] if plan.role is Role.WORKER else [])],
        "runcmd": [["chmod", "700", root, host], start],
    }
    return "#cloud-config\n" + to_yaml(config)


def packed(text: str) -> bytes:
    """Compress `user_data` for a cloud with LIMIT_BYTES. Raises UsageError when it would not fit."""
    data = gzip.compress(text.encode(), mtime=0)
    if len(data) > LIMIT_BYTES:
        raise UsageError(f"user data has {len(data)} bytes packed, and a cloud takes {LIMIT_BYTES}",
                         hint="shorten the fleet file: packages, setup, run, tags")
    return data


def _wanted(name: str, plan: HostPlan) -> bool:
    return name != "remove.sh" and (name != "inherit.py" or plan.environment.inherit)


def _upgrades_off() -> list[str]:
    """Return the command that stops what upgrades; each boot runs it before those units start. An image may lack any
    of them."""
    return ["sh", "-c", f"for unit in {' '.join(UPGRADERS)}; do systemctl --no-block disable --now $unit; done; :"]


def _doors(user: str, keys: list[str], key_pair: bool) -> dict[str, Any]:
    if user == "root":
        return {"disable_root": False, "users": ["default"], "ssh_authorized_keys": keys}
    # cloud-init gives the cloud's key only to its `default` user; with the same name, both entries become one
    return {"disable_root": True, "users": [*(["default"] if key_pair else []), {
        "name": user, "shell": "/bin/bash", "lock_passwd": True, "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "ssh_authorized_keys": keys,
    }]}


def _file(path: str, text: str, mode: str = "0600") -> dict[str, str]:
    return {"path": path, "permissions": mode, "owner": "root:root", "content": text}


def to_yaml(config: dict[str, Any]) -> str:
    """Return YAML with texts of several lines printed line by line. libyaml writes it where PyYAML has it: each launch
    prints a hundred kilobytes, for which Python takes 30 times as long."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(config, Dumper=Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)
