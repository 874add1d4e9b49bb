"""SPOTFLEET_HOME and all in it are private, also where the umask lets everybody in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.api.home import FleetRecord, Home, Keys
from spotfleet.bundle.blob import PieceCache
from spotfleet.catalog.store import Store
from spotfleet.errors import UsageError
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import FleetSpec
from spotfleet.providers.local.environment import passed
from spotfleet.providers.local.hosts import LocalMachines
from spotfleet.providers.local.link import LocalCloudLink
from spotfleet.storage import atomic


@pytest.fixture
def permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(top: Path) -> set[tuple[str, str]]:
    """(kind, mode) of each file and folder from `top` on."""
    found = [path.lstat().st_mode for path in (top, *top.rglob("*"))]
    return {("folder" if stat.S_ISDIR(mode) else "file", f"{stat.S_IMODE(mode):o}") for mode in found}


def test_a_new_home_is_private_from_its_first_folder_on(tmp_path: Path, permissive: None):
    home = Home(tmp_path / "new" / "home")
    folder = home.folder("f")
    with folder.locked():
        folder.make(FleetRecord(FleetSpec("f"), "f", 0.0), Keys("admin", "secret", "cert", "key"), "ca")
    with folder.locked_for_down(lambda line: None):
        Ledger(folder.ledger).close()
    folder.raise_if_going_down()
    home.move_to_old(folder)
    LocalMachines(home.path / "local", lambda request_id: None).prepare("f-w-0", "module", {"boot.json": "{}"})
    PieceCache(home.path / "cache" / "f.json").save()
    atomic.make_folder(Store(home.path).folder)
    assert modes(tmp_path / "new") == {("folder", "700"), ("file", "600")}


def test_a_home_where_others_may_write_is_reported_and_not_used(tmp_path: Path):
    home = tmp_path / "their home"
    home.mkdir()
    for mode in (0o777, 0o770, 0o702):
        home.chmod(mode)
        for use in (lambda: Home(home), lambda: LocalCloudLink(home).call("ping")):
            with pytest.raises(UsageError, match="where other users may write") as refusal:
                use()
            assert refusal.value.hint == f"chmod 700 '{home}'"
    assert list(home.iterdir()) == []
    home.chmod(0o755)
    assert Home(home).fleets() == []


def test_a_home_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        Home(tmp_path)


def test_hosts_of_this_machine_get_no_credentials_from_the_shell():
    shell = {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "PYTHONPATH": "/p", "CUDA_VISIBLE_DEVICES": "0",
             "OMP_NUM_THREADS": "4", "http_proxy": "http://proxy:3128", "SPOTFLEET_BACKEND": "gloo"}
    secret = {"AWS_SECRET_ACCESS_KEY": "s", "GITHUB_TOKEN": "s", "PW": "s", "NVIDIA_API_KEY": "s", "HF_TOKEN": "s",
              "https_proxy": "http://me:s@proxy:3128", "SPOTFLEET_JOB_KEY": "s", "PYTHONANYWHERE_PASSWORD": "s",
              "ARBITRARY": "1"}
    assert passed(shell | secret) == shell
    asked = {"SPOTFLEET_LOCAL_ENV": "ARBITRARY, GITHUB_*"}
    assert passed(shell | secret | asked) == shell | asked | {"ARBITRARY": "1", "GITHUB_TOKEN": "s"}
