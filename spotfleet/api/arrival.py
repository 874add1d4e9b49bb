"""From the launch of a cloud's machine to its dispatcher's first answer: told in words, and its code brought to it.

    listed --running, has an address--> its sshd answers --> its code is brought --> it installs --> dispatcher runs
                                        (host key pinned)    (the wheel)             '--failed: a person must look

Nothing is remembered but what was told: killed at any point, the next `up` looks at the machine and goes on. The code
is the wheel that runs here; it is put in place whole or not at all.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.api import ssh
from spotfleet.api.house import Folder
from spotfleet.api.ssh import Way
from spotfleet.bootstrap import Wheel, wheel
from spotfleet.bootstrap.cloud_init import ROOT
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.ssh import openssh
from spotfleet.ssh.tunnel import NotConnected

ASK_S = 30.0
BRING_S = 300.0  # for the wheel, which has a few megabytes
BOOTING_S = 180.0  # until then a machine may show another host key, or know no key of ours: cloud-init sets both
LATE_S = 15.0  # a dispatcher that does not answer so long after its start: its log may say why
LOG_TIME = re.compile(r"^[\d-]+ [\d:,]+ (\S+ [A-Z]+ )?")
LOG_CHARS = 400
DIED = 2  # so many machines that ended by themselves before they were of use: the next one would too

Progress = Callable[[str], None]

ASK = """
h={host}
[ -e "$h/settings.sh" ] && [ -e "$h/bootstrap.sh" ] || {{ echo absent; exit 0; }}
. "$h/settings.sh"
bash "$h/bootstrap.sh" look
echo "$WHEEL_NAME $WHEEL_SHA256"
[ "$(sha256sum 2>/dev/null <"$h/wheel/$WHEEL_NAME" | cut -d' ' -f1)" = "$WHEEL_SHA256" ] && echo there || echo lacking
tail -n 1 "$h/console.log" 2>/dev/null
:
"""
PUT = """
umask 077
cd {host} && mkdir -p wheel && rm -f wheel/.part.* || exit 1
part=wheel/.part.$$
cat >"$part" && [ "$(sha256sum <"$part" | cut -d' ' -f1)" = {sha256} ] && mv -f "$part" wheel/{name} && exit 0
rm -f "$part"
echo "what came is not whole" >&2
exit 1
"""


@dataclass(frozen=True)
class Said:
    """What the machine says of itself."""

    state: str = "absent"  # or one of bootstrap's; absent: cloud-init has not written it yet
    why: str = ""
    wheel_name: str = ""
    wheel_sha256: str = ""
    has_wheel: bool = False
    log: str = ""  # the last line of its dispatcher, without the time


class Arrival:
    """Of one fleet's dispatcher, during one command."""

    def __init__(self, folder: Folder, provider: str, progress: Progress) -> None:
        self._folder, self._provider, self._progress = folder, provider, progress
        self._told = ""
        self._running_since: dict[str, float] = {}  # host -> since it was seen to run; monotonic
        self._ready_since: dict[str, float] = {}  # host -> since its dispatcher's process was seen to run
        self.why = ""  # what it waits for

    def look(self, listed: Sequence[CloudHost], ours: str) -> bool:
        """Bring the machine `ours` one step further; is it time to ask its dispatcher? "" is none that counts.

        Raises NeedsPerson when no waiting will help.
        """
        host = next((h for h in listed if h.request_id == ours and h.role is Role.DISPATCHER), None)
        if host is None or host.state is CloudState.TERMINATED:
            return self._tell(f"waiting for {self._provider} to list {ours}" if ours and host is None else "")
        if host.state is not CloudState.RUNNING or host.ssh is None or not host.ssh.address:
            what = "stopped" if host.state is CloudState.STOPPED else "pending"
            return self._tell(f"{ours} is {what} at {self._provider}{f': {host.why}' if host.why else ''}")
        since = self._running_since.setdefault(ours, time.monotonic())
        way = self._way(host, listed)
        try:
            ssh.tunnel(self._folder, way).connect()
            said = _read(self._run(way, ASK.format(host=_home(host)), ASK_S))
        except NotConnected as error:
            booting = time.monotonic() - since < BOOTING_S
            return self._tell(f"{ours} boots; its sshd at {host.ssh.address} does not answer yet"
                              + ("" if booting else f": {error}"))
        except NeedsPerson as error:
            if time.monotonic() - since >= BOOTING_S:
                raise
            return self._tell(f"waiting for {ours} to take our keys: {error}")
        try:
            return self._go_on(way, host, said)
        except NotConnected as error:
            return self._tell(str(error))

    def _way(self, host: CloudHost, listed: Sequence[CloudHost]) -> Way:
        way = ssh.known(self._folder).find(host.request_id)
        if way is None or way.door != host.ssh:
            way = ssh.refresh(self._folder, listed, self._progress).find(host.request_id)
        assert way is not None
        return way

    def _go_on(self, way: Way, host: CloudHost, said: Said) -> bool:
        match said.state:
            case "absent":
                return self._tell(f"{host.request_id} answers over SSH; cloud-init prepares it")
            case "failed":
                raise NeedsPerson(f"the dispatcher's machine could not be prepared: {said.why}",
                                  hint=f"`spotfleet down {self._folder.name}`, mend that, then `spotfleet up` again; "
                                       "the machine powers itself off in 15 minutes")
            case "off":
                return self._tell(f"{host.request_id} is being switched off: {said.why}")
        if not said.has_wheel:
            self._bring(way, host, said)
        if said.why.startswith("waits for its code"):
            return False  # it has it by now
        if said.state != "running":
            return self._tell(f"{host.request_id}: {said.why or said.state}")
        since = self._ready_since.setdefault(host.request_id, time.monotonic())
        late = said.log and time.monotonic() - since >= LATE_S
        self._tell(f"{host.request_id} runs its dispatcher{f', which says: {said.log}' if late else ''}")
        return True

    def _bring(self, way: Way, host: CloudHost, said: Said) -> None:
        code = wheel.build()
        if (said.wheel_name, said.wheel_sha256) != (code.name, code.sha256):
            raise NeedsPerson(f"{host.request_id} waits for other code ({said.wheel_name}, {said.wheel_sha256[:12]}) "
                              f"than runs here ({code.name}, {code.sha256[:12]}): another version launched it",
                              hint=f"`spotfleet down {self._folder.name}`, then `spotfleet up` again; or go on with "
                                   "that version")
        self._tell(f"bringing the code to {host.request_id} ({len(code.data) / 1e6:.1f} MB)")
        self._run(way, put(host.request_id, code), BRING_S, code.data)

    def _run(self, way: Way, text: str, limit_s: float, data: bytes = b"") -> str:
        """What the script says, as root. Raises NotConnected for what may pass, NeedsPerson for what will not."""
        words = ["sh", "-c", text] if way.door.user == "root" else ["sudo", "-n", "sh", "-c", text]
        control = ssh.tunnel(self._folder, way).control
        line = openssh.command(ssh.config(self._folder), "-S", str(control), "-o", "BatchMode=yes", "-T",
                               way.aliases[-1], shlex.join(words))
        try:
            done = subprocess.run(line, input=data, capture_output=True, timeout=limit_s, cwd="/")
        except subprocess.TimeoutExpired:
            raise NotConnected(f"{way.host} does not answer within {limit_s:g} s") from None
        err = done.stderr.decode(errors="replace").strip()
        if done.returncode == 255:
            found = openssh.meaning(err, way.host)
            raise NeedsPerson(found.why, hint=found.hint) if found.person else NotConnected(found.why)
        if done.returncode and "sudo" in err:
            raise NeedsPerson(f"{way.door.user} may not become root on {way.host}: {err.splitlines()[-1]}",
                              hint="name in `aws.user` whom the image lets in with sudo and without a password")
        if done.returncode:
            raise NotConnected(f"{way.host}: {err or f'status {done.returncode}'}")
        return done.stdout.decode(errors="replace")

    def _tell(self, text: str) -> bool:
        self.why = text or self.why
        if text and text != self._told:
            self._told = text
            self._progress(text)
        return False


def refuse_dying(ends: Sequence[str], name: str) -> None:
    """Raise NeedsPerson where machines end by themselves one after another; `ends` are the cloud's reasons."""
    if len(ends) >= DIED:
        raise NeedsPerson(f"{len(ends)} machines for the dispatcher have ended by themselves: {ends[-1]}",
                          hint=f"`spotfleet check`; `spotfleet down {name}` ends what is left of the fleet")


def put(request_id: str, code: Wheel) -> str:
    """The script that takes the wheel from stdin, as root."""
    return PUT.format(host=shlex.quote(f"{ROOT}/{request_id}"), name=shlex.quote(code.name), sha256=code.sha256)


def _home(host: CloudHost) -> str:
    return shlex.quote(f"{ROOT}/{host.request_id}")


def _read(text: str) -> Said:
    lines = text.splitlines()
    if not lines or lines[0] == "absent":
        return Said()
    if len(lines) < 3 or lines[2] not in ("there", "lacking"):
        raise SpotfleetError(f"a machine says {text[:200]!r} of itself", hint="`spotfleet up` again")
    state, _, rest = lines[0].partition(" ")
    name, _, sha256 = lines[1].partition(" ")
    log = LOG_TIME.sub("", lines[3])[:LOG_CHARS] if len(lines) > 3 else ""
    return Said(state, rest.partition(" ")[2], name, sha256, lines[2] == "there", log)
