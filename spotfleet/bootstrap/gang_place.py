"""`python3 gang_place.py METADATA_URL` in ROOT/gang: become the host of this machine's place. Run as root.

The machine fetches its token and its host key from the dispatcher in its boot.json, where the gang has a token for it.

The tag `spotfleet-member`, which the launching process sets, holds the place, or "index" for the launch index. If that
process was killed in between, the dispatcher sets the tag. Without the tag it is the launch index after TAG_S; after
ZERO_S where that is 0, as it may be 0 on all of them. On Google Cloud the machine's name holds its host.

Idempotent: ROOT/gang is removed last. Until then each boot runs this again and starts the host. A machine that finds no
place or gets no token powers itself off, as a host does that fails.
"""

from __future__ import annotations

import base64
import glob
import http.client
import json
import os
import shutil
import signal
import ssl
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S, PAUSE_S = 300.0, 1.0  # for a metadata server that does not answer yet
FETCH_S = float(os.environ.get("SPOTFLEET_FETCH_S", "900"))  # for a dispatcher that does not answer
TAG_S = float(os.environ.get("SPOTFLEET_TAG_S", "60"))
ZERO_S = float(os.environ.get("SPOTFLEET_ZERO_S", "900"))
HOST = "@SPOTFLEET_HOST@"  # stands for the host's name
TOKEN = "@SPOTFLEET_TOKEN@"  # stands for the host's token
GOOGLE = "/computeMetadata/"  # in the address of Google Cloud's metadata server
TAG, BY_INDEX = "tags/instance/spotfleet-member", "index"
SSHD, RUN = os.environ.get("SPOTFLEET_SSHD", "/etc/ssh"), os.environ.get("SPOTFLEET_RUN", "/run")


class GaveUp(Exception):
    """This machine becomes no host."""


def main() -> int:
    gang = Path(__file__).resolve().parent
    members = json.loads((gang / "members.json").read_text())
    try:
        become(gang, members)
    except GaveUp as error:
        print(error, file=sys.stderr, flush=True)
        if members.get("power_off"):
            switch_off()
        return 1
    return 0


def switch_off() -> None:
    """Power the machine off: a machine without an agent would be paid until somebody notices."""
    for command in (["systemctl", "poweroff"], ["shutdown", "-h", "now"], ["poweroff", "-f"]):
        with suppress(OSError):
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return


def become(gang: Path, members: dict[str, Any]) -> None:
    mine = place(sys.argv[1], members["hosts"])
    name = members["hosts"][mine]
    host = gang.parent / name
    host.mkdir(mode=0o700, exist_ok=True)
    for path in gang.iterdir():
        if path.name not in ("members.json", "gang_place.py"):
            shutil.copy2(path, host / path.name)
    texts = {path.replace(HOST, name): ((before + own + after).replace(HOST, name), int(mode, 8))
             for (path, mode, before, after), own in zip(members["files"], members["own"][mine], strict=True)}
    token, key = "", members["keys"][mine]
    if members.get("gang"):
        boot = json.loads(next(text for path, (text, _) in texts.items() if path.endswith("/boot.json")))
        token, key = fetched(boot, members["gang"], members["hosts"], name)
    for path, (text, mode) in texts.items():
        write(Path(path), text.replace(TOKEN, token), mode)
    if key:
        show(base64.b64decode(key), members["comment"].replace(HOST, name))
    for command in members["run"]:
        subprocess.run([word.replace(HOST, name) for word in command], check=True)
    shutil.rmtree(gang)


def fetched(boot: dict[str, str], gang: str, hosts: list[str], name: str) -> tuple[str, str]:
    """Return this member's token and host key, from the dispatcher; it may not have begun to answer yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # this authority signs only the dispatcher
    context.load_verify_locations(cadata=boot["ca"])
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(f"{boot['dispatcher'].rstrip('/')}/v1/gangs/{name}", method="POST",
                                     data=json.dumps({"hosts": hosts}).encode(),
                                     headers={"Authorization": f"Bearer {gang}", "Content-Type": "application/json"})
    begun = time.monotonic()
    while True:
        try:
            with direct.open(request, timeout=15) as answer:
                found = json.loads(answer.read())
                return found["token"], found["host_key"]
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            if time.monotonic() - begun > FETCH_S:
                raise GaveUp(f"{boot['dispatcher']} does not give this machine its token: {error}") from error
        time.sleep(PAUSE_S)


def place(url: str, hosts: list[str]) -> int:
    begun = time.monotonic()
    while True:
        try:
            if GOOGLE in url:  # its machines have names of their own: HOST-CODE
                name = asked(f"{url}/instance/name", "GET", {"Metadata-Flavor": "Google"})
                return hosts.index(name.rpartition("-")[0])
            token = asked(f"{url}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "300"})
            tag = metadata(url, token, TAG)
            if tag.isdigit():
                return int(tag)
            waited_s = time.monotonic() - begun
            if tag == BY_INDEX or waited_s > TAG_S:
                index = int(metadata(url, token, "ami-launch-index"))
                if tag == BY_INDEX or index or waited_s > ZERO_S:
                    return index
        except (OSError, ValueError) as error:
            if time.monotonic() - begun > LIMIT_S:
                raise GaveUp(f"the metadata server at {url} does not name this machine's place: {error}") from error
        time.sleep(PAUSE_S)


def metadata(url: str, token: str, path: str) -> str:
    """Return an item; "" if there is none."""
    try:
        return asked(f"{url}/latest/meta-data/{path}", "GET", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return ""


def asked(url: str, method: str, headers: dict[str, str]) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(url, method=method, headers=headers), timeout=5) as answer:
        return answer.read().decode()


def write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    part.replace(path)


def show(key: bytes, comment: str) -> None:
    """Make this the machine's only host key. `key`: seed and public key."""
    for other in glob.glob(f"{SSHD}/ssh_host_*"):
        if "ed25519" not in other:
            os.unlink(other)
    public = packed(b"ssh-ed25519") + packed(key[32:])
    write(Path(SSHD, "ssh_host_ed25519_key"), private_file(key, public, comment), 0o600)
    write(Path(SSHD, "ssh_host_ed25519_key.pub"), f"ssh-ed25519 {base64.b64encode(public).decode()} {comment}\n", 0o644)
    for unit in ("ssh", "sshd"):  # Debian's name, the others' name; a unit activated by socket may not run yet
        if subprocess.run(["systemctl", "try-restart", unit], capture_output=True, check=False).returncode == 0:
            return
    with suppress(OSError, ValueError):  # no systemd
        os.kill(int(Path(RUN, "sshd.pid").read_text()), signal.SIGHUP)


def private_file(key: bytes, public: bytes, comment: str) -> str:
    """Return the text of OpenSSH's file. Source: PROTOCOL.key of OpenSSH."""
    secret = os.urandom(4) * 2 + public + packed(key) + packed(comment.encode())
    secret += bytes(range(1, -len(secret) % 8 + 1))
    whole = b"openssh-key-v1\0" + packed(b"none") * 2 + packed(b"") + struct.pack(">I", 1) + packed(public)
    text = base64.b64encode(whole + packed(secret)).decode()
    lines = [text[i:i + 70] for i in range(0, len(text), 70)]
    return "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])


def packed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


if __name__ == "__main__":
    sys.exit(main())
