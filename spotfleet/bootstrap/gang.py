"""User data for several machines that a cloud makes in one call; each machine selects its host by its place.

All machines get the same text. ROOT/gang holds the common files, and `members.json` there what differs: one text of
each other file, in which HOST stands for the host's name and which is cut where members differ, and for each member
its pieces. The first command, gang_place.py, makes the host's folder from both, continues like a single machine and
removes ROOT/gang.

A member's token and host key are not in the text, whose length clouds limit: the machine fetches both from its
dispatcher (POST /v1/gangs/HOST) with the gang's token. A reader of the user data of one machine can do so too, until
that member has joined: the members come and go together. Without a dispatcher that knows the secret, the text has both.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spotfleet.bootstrap import HostPlan, cloud_init, script
from spotfleet.errors import UsageError
from spotfleet.ssh.keys import KeyPair

GANG = "gang"  # used instead of a request_id
HOST = "@SPOTFLEET_HOST@"  # stands for the request_id in what is common
TOKEN = "@SPOTFLEET_TOKEN@"  # stands for the token that a member fetches
PLACE, MEMBERS = "gang_place.py", "members.json"
HEAD = "#cloud-config\n"


def user_data(plans: Sequence[HostPlan], *, user: str, authorized_keys: Sequence[str],
              host_keys: Sequence[KeyPair | None], key_pair: bool = False, tokens: Sequence[str] = (),
              secret: str = "") -> str:
    """Merge the `cloud_init.user_data` of all plans; the machine at place I becomes the host of plan I.

    With the `tokens` of all members and the fleet's `secret`, each member fetches its token and host key.
    """
    if tokens:
        plans = [replace(plan, files={name: text.replace(token, TOKEN) for name, text in plan.files.items()})
                 for plan, token in zip(plans, tokens, strict=True)]
    each = [parsed(cloud_init.user_data(plan, user=user, authorized_keys=authorized_keys, host_key=key,
                                        key_pair=key_pair))
            for plan, key in zip(plans, host_keys, strict=True)]
    first, folder = plans[0], _folder(each[0], plans[0].request_id)
    files = [{f["path"].replace(f"/{plan.request_id}/", f"/{GANG}/"): f["content"] for f in config["write_files"]}
             for plan, config in zip(plans, each, strict=True)]
    shared = [path for path, text in files[0].items() if all(of.get(path) == text for of in files)]
    named = [{f["path"].replace(f"/{p.request_id}/", f"/{HOST}/"): f["content"].replace(p.request_id, HOST)
              for f in config["write_files"] if f["path"].replace(f"/{p.request_id}/", f"/{GANG}/") not in shared}
             for p, config in zip(plans, each, strict=True)]
    modes = {f["path"].replace(f"/{first.request_id}/", f"/{HOST}/"): f["permissions"]
             for f in each[0]["write_files"]}
    cut = [(path, *_common([of[path] for of in named])) for path in named[0]]
    members = {
        "hosts": [p.request_id for p in plans],
        "run": json.loads(json.dumps(each[0]["runcmd"]).replace(first.request_id, HOST)),
        "files": [[path, modes[path], before, after] for path, before, after in cut],
        "own": [[of[path][len(before):len(of[path]) - len(after)] for path, before, after in cut] for of in named],
        "keys": ["" if key is None or tokens else raw_key(key) for key in host_keys],
        "power_off": first.power_off,
        "gang": gang_token(secret, [p.request_id for p in plans]) if tokens else "",
        "comment": "" if host_keys[0] is None else host_keys[0].public.split(" ", 2)[2].replace(first.request_id, HOST),
    }
    command = ["python3", f"{folder}/{PLACE}", first.metadata_url]
    whole = {
        **{k: v for k, v in each[0].items() if k not in ("ssh_keys", "write_files", "runcmd")},
        "write_files": [
            *({**f, "path": path} for f in each[0]["write_files"]
              if (path := f["path"].replace(f"/{first.request_id}/", f"/{GANG}/")) in shared),
            _file(f"{folder}/{PLACE}", script.text(PLACE)),
            _file(f"{folder}/{MEMBERS}", json.dumps(members, indent=0)),
            _file(f"{cloud_init.EACH_BOOT}/spotfleet-gang", "#!/bin/sh\n"
                  f"[ ! -e {shlex.quote(command[1])} ] || exec {shlex.join(command)}\n", "0700"),
        ],
        "runcmd": [command],
    }
    return HEAD + cloud_init.to_yaml(whole)


def gang_token(secret: str, hosts: Sequence[str]) -> str:
    """Return the token that lets each of `hosts` fetch its own: HMAC-SHA256(secret, "spotfleet gang HOST HOST ...")."""
    return hmac.new(secret.encode(), f"spotfleet gang {' '.join(hosts)}".encode(), hashlib.sha256).hexdigest()


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
    members = json.loads(alike.pop(MEMBERS, "{}"))
    if request_id in members.get("hosts", ()):
        own = members["own"][members["hosts"].index(request_id)]
        found = alike | {path.rpartition("/")[2]: (before + middle + after).replace(HOST, request_id)
                         for (path, _mode, before, after), middle in zip(members["files"], own, strict=True)
                         if f"/{HOST}/" in path}
    return found


def _common(texts: Sequence[str]) -> tuple[str, str]:
    """Return the longest common beginning of all texts, and the longest common end of what is left of them."""
    before = _beginning(texts)
    after = _beginning([text[len(before):][::-1] for text in texts])[::-1]
    return before, after


def _beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # all others are between them
    return first[:next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
                       min(len(first), len(last)))]


def raw_key(key: KeyPair) -> str:
    """Return seed and public key, in base64."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = serialization.load_ssh_private_key(key.private.encode(), None)
    return base64.b64encode(private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
                            + private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def _folder(config: dict[str, Any], request_id: str) -> str:
    """Return ROOT/gang."""
    inside = next(f["path"] for f in config["write_files"] if f"/{request_id}/" in f["path"])
    return f"{inside.partition(f'/{request_id}/')[0]}/{GANG}"


def _file(path: str, text: str, mode: str = "0600") -> dict[str, str]:
    return {"path": path, "permissions": mode, "owner": "root:root", "content": text}
