"""Another user of the machine, who tries to read and to reach a fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.attack.live import LiveFleet

NOBODY = 65534
LIMIT_S = 120.0

# Runs as root until all is imported, since that user may not read our environment. Prints {probe: what it got}.
PROBES = '''
import encodings.idna, json, os, socket, ssl, sys
import urllib.error, urllib.request
asked = json.loads(sys.stdin.read())
os.setgroups([]); os.setresgid(*[asked["user"]] * 3); os.setresuid(*[asked["user"]] * 3)
found, context = {}, ssl._create_unverified_context()

def probe(what, work):
    try:
        found[what] = f"it got {work()!r}"[:300]
    except PermissionError:
        found[what] = ""
    except urllib.error.HTTPError as error:
        found[what] = "" if error.code == 401 else f"the answer was {error.code}"
    except OSError as error:
        found[what] = f"no refusal: {error!r}"

def fetch(url, data=None, tls=None):
    return urllib.request.urlopen(urllib.request.Request(url, data), timeout=10, context=tls).read(100)

def connect(path):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(path)

def readable(top):
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
    open_ones = [path for path in paths if os.access(path, os.R_OK)]
    if not open_ones:
        raise PermissionError
    return open_ones[:5]

probe("the dispatcher refuses it", lambda: fetch(asked["url"] + "/v1/status", tls=context))
probe("the local cloud refuses it", lambda: fetch(asked["cloud"], b'{"method": "truth", "args": {}}'))
probe("it reads no file of the fleet", lambda: readable(asked["home"]))
for path in asked["sockets"]:
    probe(f"it does not reach {path}", lambda: connect(path))
for pid in asked["pids"]:
    probe(f"it reads no environment of {pid}", lambda: open(f"/proc/{pid}/environ", "rb").read(10))
print(json.dumps(found))
'''


def probes_of_another_user(live: LiveFleet, url: str) -> dict[str, str]:
    """Return, for each promise, how that user broke it; "": not."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    home = live.stage.home
    port = json.loads((home / "local" / "cloud.json").read_text())["port"]
    pids = {pid for machine in live.stage.cloud.truth() for pid in machine.processes}
    sockets = [str(path) for path in Path(home).rglob("agent") if path.is_socket()]
    asked = {"user": NOBODY, "url": url, "cloud": f"http://127.0.0.1:{port}/call", "home": str(home),
             "sockets": sockets, "pids": sorted(pid for pid in pids if psutil.pid_exists(pid))}
    opened = _opened_to_others(home)
    try:
        done = subprocess.run([sys.executable, "-c", PROBES], input=json.dumps(asked), text=True, capture_output=True,
                              timeout=LIMIT_S, cwd="/", check=False)
    finally:
        for folder, mode in opened.items():
            folder.chmod(mode)
    assert done.returncode == 0, done.stderr[-1000:]
    return json.loads(done.stdout)


def _opened_to_others(home: Path) -> dict[Path, int]:
    """Let everybody through the folders above `home`, as in a shared /tmp; return their modes."""
    opened = {}
    for folder in home.parents:
        mode = folder.stat().st_mode & 0o7777
        if not mode & 0o001:
            opened[folder] = mode
            folder.chmod(mode | 0o011)
    return opened
