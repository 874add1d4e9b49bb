"""Keys of the fleet's own, as OpenSSH reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from spotfleet.errors import UsageError
from spotfleet.ssh import keys

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (Debian: openssh-client)")


def test_openssh_reads_the_fleets_key_and_finds_the_fleet_in_its_comment(tmp_path: Path):
    pair = keys.make("digits")
    (tmp_path / "key").write_text(pair.private)
    (tmp_path / "key").chmod(0o600)
    shown = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[:2] == pair.public.split()[:2]
    assert pair.public.split()[0] == "ssh-ed25519" and pair.public.split()[2] == "spotfleet:digits"
    (tmp_path / "key.pub").write_text(pair.public)
    told = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "key.pub"], capture_output=True, text=True, check=True)
    assert told.stdout.split()[2] == "spotfleet:digits"


def test_each_fleet_and_each_machine_has_a_key_of_its_own_that_is_never_printed():
    one, other, host = keys.make("digits"), keys.make("digits"), keys.derived_host_key("a secret", "digits-1")
    assert len({one.public.split()[1], other.public.split()[1], host.public.split()[1]}) == 3
    assert one.private not in repr(one) and "PRIVATE" not in repr(one)


def test_a_key_is_pinned_by_type_and_body_alone():
    public = keys.make("digits").public
    assert keys.pinned(f" {public}\n") == public.rpartition(" ")[0] == keys.pinned(public.rpartition(" ")[0])


@pytest.mark.parametrize("text", ["", "ssh-ed25519", "ssh-ed25519 nonsense", "ssh-rsa BODY",
                                  "10.0.0.1 ssh-ed25519 BODY"])
def test_what_is_no_public_key_is_refused(text):
    body = keys.make("f").public.split()[1]
    with pytest.raises(UsageError, match="is no public key"):
        keys.pinned(text.replace("BODY", body))
