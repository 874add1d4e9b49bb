"""User data for several machines that a cloud makes in one call; each machine selects its host by its place.

All machines get the same text. ROOT/gang holds the common part, and `members.json` there holds the individual parts.
The first command, gang_place.py, makes the host's folder from both, continues like a single machine and removes
ROOT/gang. A reader of the user data of one machine has the tokens of all: they come and go together.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from spotfleet.bootstrap import HostPlan, cloud_init, script
from spotfleet.errors import UsageError
from spotfleet.ssh.keys import KeyPair

GANG = "gang"  # used instead of a request_id
PLACE, MEMBERS = "gang_place.py", "members.json"
HEAD = "#cloud-config\n"


def user_data(plans: Sequence[HostPlan], *, user: str, authorized_keys: Sequence[str],
              host_keys: Sequence[KeyPair | None], key_pair: bool = False) -> str:
    """Merge the `cloud_init.user_data` of all plans; the machine at place I becomes the host of plan I."""
    each = [parsed(cloud_init.user_data(plan, user=user, authorized_keys=authorized_keys, host_key=key,
                                        key_pair=key_pair))
            for plan, key in zip(plans, host_keys, strict=True)]
    first, folder = plans[0], _folder(each[0], plans[0].request_id)
    files = [{_general(f["path"], plan.request_id): f for f in config["write_files"]}
             for plan, config in zip(plans, each, strict=True)]
    shared = [path for path, file in files[0].items()
              if all(path in of and of[path]["content"] == file["content"] for of in files)]
    members = [{"host": plan.request_id, "run": config["runcmd"], "key": config.get("ssh_keys", {}),
                "files": [f for path, f in of.items() if path not in shared]}
               for plan, config, of in zip(plans, each, files, strict=True)]
    command = ["python3", f"{folder}/{PLACE}", first.metadata_url]
    whole = {
        **{k: v for k, v in each[0].items() if k not in ("ssh_keys", "write_files", "runcmd")},
        "write_files": [
            *({**files[0][path], "path": path} for path in shared),
            _file(f"{folder}/{PLACE}", script.text(PLACE)),
            _file(f"{folder}/{MEMBERS}", json.dumps(members, indent=0)),
            _file(f"{cloud_init.EACH_BOOT}/spotfleet-gang", "#!/bin/sh\n"
                  f"[ ! -e {shlex.quote(command[1])} ] || exec {shlex.join(command)}\n", "0700"),
        ],
        "runcmd": [command],
    }
    return HEAD + cloud_init.to_yaml(whole)


def packed(text: str, hosts: int) -> bytes:
    """Compress as `cloud_init.packed`. The UsageError names the number of hosts, which determines the size."""
    try:
        return cloud_init.packed(text)
    except UsageError as error:
        raise UsageError(f"{hosts} hosts at once are too many: {error}",
                         hint="all_or_nothing: false, fewer nodes, or a shorter fleet file") from error


def parsed(text: str) -> dict[str, Any]:
    """Parse a `#cloud-config`. Raises UsageError for another text."""
    import yaml

    try:
        config = yaml.safe_load(text) if text.startswith(HEAD) else None
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict) or not isinstance(config.get("write_files"), list):
        raise UsageError("its user data is none of ours", hint="is it a host of a fleet?")
    return config


def files_of(text: str, request_id: str) -> dict[str, str]:
    """Map names to texts in the folder of this host, from user data of one or several hosts; {} if the host is not in
    it."""
    found: dict[str, str] = {}
    alike: dict[str, str] = {}
    for file in parsed(text)["write_files"]:
        folder, _, name = file["path"].rpartition("/")
        if folder.endswith(f"/{GANG}"):
            alike[name] = file["content"]
        elif folder.endswith(f"/{request_id}"):
            found[name] = file["content"]
    alike.pop(PLACE, None)
    for member in json.loads(alike.pop(MEMBERS, "[]")):
        if member["host"] == request_id:
            own = [f for f in member["files"] if f"/{request_id}/" in f["path"]]
            found = alike | {f["path"].rpartition("/")[2]: f["content"] for f in own}
    return found


def _general(path: str, request_id: str) -> str:
    return path.replace(f"/{request_id}/", f"/{GANG}/")


def _folder(config: dict[str, Any], request_id: str) -> str:
    """Return ROOT/gang."""
    inside = next(f["path"] for f in config["write_files"] if f"/{request_id}/" in f["path"])
    return f"{inside.partition(f'/{request_id}/')[0]}/{GANG}"


def _file(path: str, text: str, mode: str = "0600") -> dict[str, str]:
    return {"path": path, "permissions": mode, "owner": "root:root", "content": text}
