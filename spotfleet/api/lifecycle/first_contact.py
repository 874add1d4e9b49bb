"""Setup of a cloud's machine until its dispatcher answers: progress messages, and upload of the code.

    listed --running, has an address--> its sshd answers --> code is uploaded --> it installs --> dispatcher runs
                                        (host key pinned)    (the wheel)          '--failed: a person must act

No state is kept except the last message: after a kill at any point, the next `up` reads the machine's state and goes
on. The code is the wheel that runs here; it is put in place atomically.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.api.access import ssh
from spotfleet.api.access.ssh import SshTarget
from spotfleet.api.home import FleetDir
from spotfleet.bootstrap import Wheel, wheel
from spotfleet.bootstrap.cloud_init import ROOT
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers.plugin import plugin_of
from spotfleet.ssh import openssh
from spotfleet.ssh.tunnel import NotConnected

ASK_S = 30.0
UPLOAD_S = 300.0  # for the wheel, which has a few megabytes
BOOTING_S = 180.0  # until then a machine may show another host key, or not accept ours: cloud-init sets both
LATE_S = 15.0  # a dispatcher that does not answer so long after its start: its log is shown
LOG_TIME = re.compile(r"^[\d-]+ [\d:,]+ (\S+ [A-Z]+ )?")
LOG_CHARS = 400
DIED = 2  # after this many machines have ended by themselves during setup, the next one would too

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
class ConsoleLine:
    """State of the machine as its script reports it."""

    state: str = "absent"  # or one of bootstrap's; absent: cloud-init has not written it yet
    why: str = ""
    wheel_name: str = ""
    wheel_sha256: str = ""
    has_wheel: bool = False
    log: str = ""  # the last line of its dispatcher, without the time


class DispatcherStartup:
    """Startup of one fleet's dispatcher, during one command."""

    def __init__(self, folder: FleetDir, provider: str, progress: Progress) -> None:
        self._folder, self._provider, self._progress = folder, provider, progress
        self._reported = ""
        self._running_since: dict[str, float] = {}  # host -> first time that it was listed as running; monotonic
        self._ready_since: dict[str, float] = {}  # host -> first time that its dispatcher's process was running
        self.why = ""  # reason of the present wait

    def advance(self, listed: Sequence[CloudHost], request_id: str) -> bool:
        """Advance the machine `request_id` by one step; return whether its dispatcher should be asked now.
        `request_id` is "" if the fleet has no such machine.

        Raises NeedsPerson when waiting will not help.
        """
        host = next((h for h in listed if h.request_id == request_id and h.role is Role.DISPATCHER), None)
        if host is None or host.state is CloudState.TERMINATED:
            unlisted = request_id and host is None
            return self._report(f"waiting for {self._provider} to list {request_id}" if unlisted else "")
        if host.state is not CloudState.RUNNING or host.ssh is None or not host.ssh.address:
            what = "stopped" if host.state is CloudState.STOPPED else "pending"
            return self._report(f"{request_id} is {what} at {self._provider}{f': {host.why}' if host.why else ''}")
        since = self._running_since.setdefault(request_id, time.monotonic())
        target = self._find_target(host, listed)
        try:
            ssh.tunnel(self._folder, target).connect()
            console = _read(self._run(target, ASK.format(host=_home(host)), ASK_S))
        except NotConnected as error:
            booting = time.monotonic() - since < BOOTING_S
            return self._report(f"{request_id} boots; its sshd at {host.ssh.address} does not answer yet"
                                + ("" if booting else f": {error}"))
        except NeedsPerson as error:
            if time.monotonic() - since >= BOOTING_S:
                raise
            return self._report(f"waiting for {request_id} to take our keys: {error}")
        try:
            return self._continue_setup(target, host, console)
        except NotConnected as error:
            return self._report(str(error))

    def _find_target(self, host: CloudHost, listed: Sequence[CloudHost]) -> SshTarget:
        target = ssh.read_targets(self._folder).find(host.request_id)
        if target is None or target.door != host.ssh:
            target = ssh.refresh(self._folder, listed, self._progress).find(host.request_id)
        assert target is not None
        return target

    def _continue_setup(self, target: SshTarget, host: CloudHost, console: ConsoleLine) -> bool:
        match console.state:
            case "absent":
                return self._report(f"{host.request_id} answers over SSH; cloud-init prepares it")
            case "failed":
                raise NeedsPerson(f"the dispatcher's machine could not be prepared: {console.why}",
                                  hint=f"`spotfleet down {self._folder.name}`, fix that, then `spotfleet up` again; "
                                       "the machine powers itself off in 15 minutes")
            case "off":
                return self._report(f"{host.request_id} is being switched off: {console.why}")
        if not console.has_wheel:
            self._upload_wheel(target, host, console)
        if console.why.startswith("waits for its code"):
            return False  # the reported state is from before the upload
        if console.state != "running":
            return self._report(f"{host.request_id}: {console.why or console.state}")
        since = self._ready_since.setdefault(host.request_id, time.monotonic())
        late = console.log and time.monotonic() - since >= LATE_S
        self._report(f"{host.request_id} runs its dispatcher{f', which says: {console.log}' if late else ''}")
        return True

    def _upload_wheel(self, target: SshTarget, host: CloudHost, console: ConsoleLine) -> None:
        code = wheel.build()
        if (console.wheel_name, console.wheel_sha256) != (code.name, code.sha256):
            raise NeedsPerson(f"{host.request_id} waits for other code ({console.wheel_name}, "
                              f"{console.wheel_sha256[:12]}) than runs here ({code.name}, {code.sha256[:12]}): "
                              "another version launched it",
                              hint=f"`spotfleet down {self._folder.name}`, then `spotfleet up` again; or go on with "
                                   "that version")
        self._report(f"bringing the code to {host.request_id} ({len(code.data) / 1e6:.1f} MB)")
        self._run(target, put(host.request_id, code), UPLOAD_S, code.data)

    def _run(self, target: SshTarget, text: str, limit_s: float, data: bytes = b"") -> str:
        """Run the script as root and return its output. Raises NotConnected for a passing failure, NeedsPerson for a
        lasting one."""
        words = ["sh", "-c", text] if target.door.user == "root" else ["sudo", "-n", "sh", "-c", text]
        control = ssh.tunnel(self._folder, target).control
        line = openssh.command(ssh.config(self._folder), "-S", str(control), "-o", "BatchMode=yes", "-T",
                               target.aliases[-1], shlex.join(words))
        try:
            done = subprocess.run(line, input=data, capture_output=True, timeout=limit_s, cwd="/")
        except subprocess.TimeoutExpired:
            raise NotConnected(f"{target.host} does not answer within {limit_s:g} s") from None
        err = done.stderr.decode(errors="replace").strip()
        if done.returncode == 255:
            found = openssh.meaning(err, target.host)
            raise NeedsPerson(found.why, hint=found.hint) if found.person else NotConnected(found.why)
        if done.returncode and "sudo" in err:
            raise NeedsPerson(f"{target.door.user} may not become root on {target.host}: {err.splitlines()[-1]}",
                              hint=f"name in `{self._user_key}` whom the image lets in with sudo and without a "
                                   "password")
        if done.returncode:
            raise NotConnected(f"{target.host}: {err or f'status {done.returncode}'}")
        return done.stdout.decode(errors="replace")

    @property
    def _user_key(self) -> str:
        return plugin_of(self._folder.record.spec.provider).user_key

    def _report(self, text: str) -> bool:
        self.why = text or self.why
        if text and text != self._reported:
            self._reported = text
            self._progress(text)
        return False


def refuse_dying(ends: Sequence[str], name: str) -> None:
    """Raise NeedsPerson if DIED machines have ended by themselves; `ends` are the cloud's reasons."""
    if len(ends) >= DIED:
        raise NeedsPerson(f"{len(ends)} machines for the dispatcher have ended by themselves: {ends[-1]}",
                          hint=f"`spotfleet check`; `spotfleet down {name}` ends what is left of the fleet")


def put(request_id: str, code: Wheel) -> str:
    """Return the script that stores the wheel from stdin, as root."""
    return PUT.format(host=shlex.quote(f"{ROOT}/{request_id}"), name=shlex.quote(code.name), sha256=code.sha256)


def _home(host: CloudHost) -> str:
    return shlex.quote(f"{ROOT}/{host.request_id}")


def _read(text: str) -> ConsoleLine:
    lines = text.splitlines()
    if not lines or lines[0] == "absent":
        return ConsoleLine()
    if len(lines) < 3 or lines[2] not in ("there", "lacking"):
        raise SpotfleetError(f"a machine says {text[:200]!r} of itself", hint="`spotfleet up` again")
    state, _, rest = lines[0].partition(" ")
    name, _, sha256 = lines[1].partition(" ")
    log = LOG_TIME.sub("", lines[3])[:LOG_CHARS] if len(lines) > 3 else ""
    return ConsoleLine(state, rest.partition(" ")[2], name, sha256, lines[2] == "there", log)
