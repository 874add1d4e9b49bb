"""What ssh's words mean, and where its sockets lie."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.ssh import fanout, openssh
from spotfleet.ssh.openssh import meaning

CHANGED = """@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@
Host key for digits-1 has changed and you have requested strict checking.
Host key verification failed.
"""
UNKNOWN = """No ED25519 host key is known for digits-1 and you have requested strict checking.
Host key verification failed.
"""


BARRED = """kex_exchange_identification: Connection closed by remote host
ssh: connect to host d port 22: No route to host
"""
SAYINGS = {
    CHANGED: ("w0 shows another host key than the one that is pinned: it was installed anew, or someone sits between",
              "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!", True),
    UNKNOWN: ("no host key is pinned for w0", UNKNOWN.splitlines()[0], True),
    "me@w0: Permission denied (publickey).": ("w0 does not let the fleet's key in", "", True),
    "channel 2: open failed: administratively prohibited: open failed": ("sshd of w0 forbids forwarding", "", True),
    "channel 2: open failed: connect failed: Connection refused": ("w0 is there, its dispatcher does not listen", "",
                                                                   False),
    "ssh: connect to host w0 port 22: Connection refused": ("w0 runs no sshd at that port", "", False),
    "ssh: connect to host w0 port 22: No route to host": ("w0 cannot be reached", "", False),
    "Timeout, server 10.0.0.1 not responding.": ("w0 cannot be reached", "", False),
    "ssh: Could not resolve hostname w0: Name or service not known": ("the name of w0 is unknown here", "", False),
    BARRED: ("w0 cannot be reached", "ssh: connect to host d port 22: No route to host", False),
    "kex_exchange_identification: Connection closed by peer": ("sshd of w0 does not answer as it should", "", False),
    "Connection timed out during banner exchange": ("sshd of w0 does not answer as it should", "", False),
}


@pytest.mark.parametrize("said", SAYINGS)
def test_each_failure_of_ssh_is_told_in_our_words_with_its_own_beside_them(said):
    why, line, person = SAYINGS[said]
    found = meaning(said, "w0")
    assert (found.why, found.person) == (f"{why} ({line or said})", person)
    assert bool(found.hint) >= person  # what only a person can mend comes with the fix


def test_what_is_unknown_is_told_in_ssh_s_last_words():
    assert meaning("one\nsomething new\n\n", "w0").why == "w0 cannot be entered: something new"
    assert meaning("", "w0").why == "w0 cannot be entered: ssh has ended without a word"


def test_sockets_lie_where_only_we_can_go_and_under_a_short_path(tmp_path: Path):
    control = openssh.control_path(tmp_path, "a fleet")
    assert stat.S_IMODE(control.parent.stat().st_mode) == 0o700 and control.parent.stat().st_uid == os.getuid()
    assert len(str(control)) <= openssh.SOCKET_BYTES
    assert control == openssh.control_path(tmp_path, "a fleet") != openssh.control_path(tmp_path, "another")


def test_a_folder_that_another_user_could_have_laid_out_is_not_used(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a test's own folder is too long for sockets
        monkeypatch.setattr(openssh, "SHARED", Path(short))
        theirs, house, far = Path(short, f"spotfleet-{os.getuid()}"), Path(short, "house"), Path(short, "far" * 40)
        theirs.mkdir()
        theirs.chmod(0o755)
        assert openssh.private_folder(house) == house / "run"
        with pytest.raises(NeedsPerson, match="is not ours alone"):
            openssh.private_folder(far)
        theirs.rmdir()
        theirs.symlink_to(house / "run")
        with pytest.raises(NeedsPerson, match="is not ours alone"):
            openssh.private_folder(far)


def test_an_ssh_that_is_too_old_or_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "ssh"
    monkeypatch.setenv("PATH", str(tmp_path))
    openssh.version.cache_clear()
    with pytest.raises(NeedsPerson, match="no `ssh` on this machine"):
        openssh.version()
    fake.write_text("#!/bin/sh\necho OpenSSH_7.2p2 >&2\n")
    fake.chmod(0o755)
    with pytest.raises(NeedsPerson, match=r"OpenSSH_7\.2p2") as caught:
        openssh.version()
    assert "7.3 or newer" in caught.value.hint
    fake.write_text("#!/bin/sh\necho 'OpenSSH_for_Windows_8.1p1, LibreSSL 3.0.2' >&2\n")
    assert openssh.version() == (8, 1)
    openssh.version.cache_clear()


def test_a_limit_of_time_is_asked_for_in_words_that_every_login_shell_reads():
    line = fanout.limited("printf '%s|' \"it's\" 'a  b'", 20.0)
    assert shlex.split(line)[:-1] == ["exec", "sh", "-c"]  # no `if` for fish or csh to read
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout == "it's|a  b|"
