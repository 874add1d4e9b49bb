"""EFA's installer: only the archive that its digest names is run. AWS's own was never fetched here."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "spotfleet/providers/aws/efa.sh"
pytestmark = [pytest.mark.processes,
              pytest.mark.skipif(Path("/opt/amazon/efa").exists(), reason="this machine has EFA")]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "EFA_FROM": folder.as_uri(), "RAN": str(folder / "ran")})


def archive(folder: Path) -> str:
    """An installer that notes that it ran."""
    text = b'#!/bin/sh\necho "$@" >"$RAN"\n'
    with tarfile.open(folder / "aws-efa-installer-1.2.3.tar.gz", "w:gz") as made:
        about = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
        about.size, about.mode = len(text), 0o755
        made.addfile(about, io.BytesIO(text))
    return hashlib.sha256((folder / "aws-efa-installer-1.2.3.tar.gz").read_bytes()).hexdigest()


def test_the_archive_with_its_digest_is_installed(tmp_path: Path):
    done = run(tmp_path, "1.2.3", archive(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "ran").read_text() == "-y --skip-limit-conf\n"


@pytest.mark.parametrize("digest, why", [("0" * 64, "has another SHA-256"), ("", "efa_sha256 is missing")])
def test_another_archive_is_not_run(tmp_path: Path, digest: str, why: str):
    archive(tmp_path)
    done = run(tmp_path, "1.2.3", digest)
    assert done.returncode == 1 and why in done.stderr and not (tmp_path / "ran").exists()


def test_without_a_version_nothing_is_fetched(tmp_path: Path):
    done = run(tmp_path, "", "")
    assert (done.returncode, done.stderr) == (0, "")
