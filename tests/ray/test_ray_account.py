"""User of a cluster's head and scripts: its rights, and how it sees an environment in a closed folder. No Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.ray.cluster import account
from spotfleet.ray.cluster.account import HeadUser

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
ID = 398_321


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that only we can enter, with an environment and a key."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "envs" / "e").mkdir(parents=True, mode=0o755)
        (Path(folder) / "envs" / "e" / "python").write_text("packages")
        (Path(folder) / "key").write_text("secret")
        (Path(folder) / "key").chmod(0o644)
        yield Path(folder)


def run(user: HeadUser, command: str) -> str:
    done = subprocess.run(["bash", "-c", command], preexec_fn=user.enter, cwd="/", capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, umask=0o077)
    return done.stdout + done.stderr


def test_a_closed_folder_on_the_way_is_found(closed: Path):
    assert account.closed_folder(closed / "envs" / "e") == closed
    closed.chmod(0o711)
    assert account.closed_folder(closed / "envs" / "e") is None


def test_every_clouds_metadata_server_is_closed_to_this_user_alone():
    assert account.rules(HeadUser(ID)) == [
        [family, "rule", "to", net, "ipproto", "tcp", "uidrange", f"{ID}-{ID}", "priority", "100", "prohibit"]
        for family, net in (("-4", "169.254.0.0/16"), ("-6", "fd00:ec2::254/128"), ("-6", "fd20:ce::254/128"))]


def test_the_same_cluster_has_the_same_user_and_none_is_of_the_machine():
    ids = {account._free_id(Path(f"/tmp/sfr-{n:012}")) for n in range(50)}
    assert all(300_000 <= each < 500_000 for each in ids) and len(ids) == 50
    assert account._free_id(Path("/tmp/sfr-1")) == account._free_id(Path("/tmp/sfr-1"))


def test_variables_of_the_dispatchers_own_folders_do_not_reach_the_user():
    own = {"HOME": "/root", "USER": "root", "TMPDIR": "/root/tmp", "PATH": "/bin"}
    found = account.environment(own, Path("/tmp/h"))
    assert found == {"HOME": "/tmp/h", "USER": "ray", "LOGNAME": "ray", "PATH": "/bin"}


@as_root
def test_the_user_sees_the_environment_alone_of_a_closed_folder_and_nobody_else_is_affected(closed: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as outside:
        user = HeadUser(ID, hidden=(str(closed),), shown=((str(closed / "envs" / "e"), outside),))
        seen = run(user, f"id -u; cat {closed}/envs/e/python; echo; find {closed}; cat {closed}/key")
        assert not any(Path(outside).iterdir())
    assert seen.splitlines() == [str(ID), "packages", str(closed), f"{closed}/envs", f"{closed}/envs/e",
                                 f"{closed}/envs/e/python", f"cat: {closed}/key: No such file or directory"]
    assert (closed / "key").read_text() == "secret"
    assert "Permission denied" in run(HeadUser(ID), f"cat {closed}/key")


@as_root
def test_a_process_of_the_user_that_has_dropped_its_mark_ends_too_and_no_other_does(closed: Path):
    def started(user: HeadUser | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]}, start_new_session=True, cwd="/",
                                preexec_fn=user.enter if user is not None else None)

    ours, others, another = started(HeadUser(ID)), started(None), started(HeadUser(ID + 1))
    try:
        HeadUser(ID).end_all()
        assert ours.wait(30) == -9 and others.poll() is None and another.poll() is None
        HeadUser(ID).end_all()  # there is none: no error
    finally:
        for process in (ours, others, another):
            process.kill()
            process.wait()


@as_root
def test_an_environment_that_another_user_cannot_use_is_named(closed: Path, monkeypatch: pytest.MonkeyPatch):
    made, why = account.find(closed, os.environ)
    assert (made is None) == bool(why)
    monkeypatch.setattr(account, "TRY", "raise SystemExit('no Ray there')")
    assert account.find(closed, os.environ) == (
        None, f"another user cannot use the Python environment {sys.prefix}: no Ray there")


def test_without_root_there_is_no_other_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert account.find(Path("/tmp"), os.environ) == (None, "the dispatcher does not run as root")


@as_root
def test_rules_are_made_once_and_removed_again(tmp_path: Path):
    """In a network namespace of its own."""
    script = ("from spotfleet.ray.cluster.account import HeadUser, close_metadata, open_metadata; import subprocess\n"
              f"user = HeadUser({ID}); show = lambda: subprocess.run(['ip', '-4', 'rule'], stdout=1)\n"
              "print(close_metadata(user), close_metadata(user), flush=True); show(); open_metadata(user); show()")
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", script], capture_output=True, text=True)
    if "unshare" in done.stderr or "No such file" in done.stdout:
        pytest.skip(f"no network namespaces or no ip here: {done.stderr}{done.stdout}")
    assert done.stdout.count(f"uidrange {ID}-{ID}") == 1 and done.stdout.startswith(" \n"), done.stdout + done.stderr
