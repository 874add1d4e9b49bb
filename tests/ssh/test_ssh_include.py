"""Two lines at the top of ~/.ssh/config, which go without a trace."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.ssh import include
from spotfleet.ssh.include import IncludeLine, add, include_line, remove, with_line, without_line

OURS, OTHER = (include_line(Path(f"/home/u/{name}/fleets"), "*/ssh/config") for name in (".spotfleet", "other"))
WRITTEN = st.binary(max_size=200) | st.lists(st.sampled_from([
    b"Host *\n", b"  User x\n", b"\n", b"\r\n", b"Host a\r\n", b"# \x0c c\n", b"\xff\xfe", b"Include \"x\"\n", b"\r",
    b"last line without an end"]), max_size=8).map(b"".join)


@pytest.fixture
def spot(tmp_path: Path) -> IncludeLine:
    return IncludeLine(tmp_path / "home" / ".ssh" / "config", include_line(tmp_path / "fleets", "*/ssh/config"),
                tmp_path / "lock")


def with_fleet(spot: IncludeLine, name: str = "digits") -> Path:
    config = spot.lock.with_name("fleets") / name / "ssh" / "config"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.touch()
    return config


def leave(spot: IncludeLine, config: Path | None = None) -> None:
    """A fleet ends."""
    if config:
        config.unlink()
    remove(spot, spot.lock.with_name("fleets"), "*/ssh/config")


# --- bytes


@given(WRITTEN)
def test_a_users_file_comes_back_byte_for_byte(data):
    held = with_line(data, OURS)
    assert held.splitlines()[1] == OURS and held.endswith(data)
    assert with_line(held, OURS) == held
    assert without_line(held, OURS) == data


@given(WRITTEN, WRITTEN, st.booleans())
def test_two_homes_come_and_go_in_any_order(before, meanwhile, first):
    one, two = (OURS, OTHER) if first else (OTHER, OURS)
    held = with_line(with_line(before, OURS), OTHER) + meanwhile
    assert without_line(without_line(held, one), two) == before + meanwhile


@given(WRITTEN.filter(bool), WRITTEN)
def test_what_the_user_writes_meanwhile_above_or_below_is_kept_and_ours_is_put_on_top_again(above, below):
    edited = above + b"\n" + with_line(below, OURS)
    held = with_line(edited, OURS)
    assert held.splitlines()[1] == OURS
    assert without_line(held, OURS) == above + b"\n" + below


def test_the_lines_end_as_those_of_the_file_do():
    assert with_line(b"Host a\r\n", OURS).count(b"\r\n") == 3
    assert b"\r" not in with_line(b"Host a\n", OURS)


@given(st.sampled_from([include.FILE, include.FOLDER]), st.booleans())
def test_a_file_that_was_made_for_them_goes_with_the_last_of_them(made, first):
    one, two = (OURS, OTHER) if first else (OTHER, OURS)
    held = with_line(with_line(b"", OURS, made), OTHER)
    left = without_line(held, one)
    assert left is not None and include.COMMENT + made in left.splitlines()
    assert without_line(left, two) is None
    assert without_line(left + b"Host mine\n", two) == b"Host mine\n"


def test_an_empty_file_of_the_users_stays():
    assert without_line(with_line(b"", OURS), OURS) == b""


# --- the file


def test_without_an_ssh_folder_both_are_made_private_and_taken_away_again(spot):
    spot.config.parent.parent.mkdir()
    fleet = with_fleet(spot)
    add(spot)
    assert stat.S_IMODE(spot.config.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(spot.config.stat().st_mode) == 0o600
    leave(spot, fleet)
    assert not spot.config.parent.exists()
    assert not spot.lock.exists()


def test_a_folder_that_is_used_meanwhile_stays(spot):
    spot.config.parent.parent.mkdir()
    fleet = with_fleet(spot)
    add(spot)
    (spot.config.parent / "known_hosts").touch()
    leave(spot, fleet)
    assert [p.name for p in spot.config.parent.iterdir()] == ["known_hosts"]


def test_the_lines_stay_as_long_as_a_fleet_needs_them(spot):
    spot.config.parent.mkdir(parents=True)
    spot.config.write_bytes(b"Host a\n")
    first, second = with_fleet(spot), with_fleet(spot, "other")
    add(spot)
    leave(spot, first)
    assert spot.line in spot.config.read_bytes()
    leave(spot, second)
    assert spot.config.read_bytes() == b"Host a\n"


def test_mode_link_and_neighbours_are_kept(spot, tmp_path):
    spot.config.parent.mkdir(parents=True)
    real = tmp_path / "dotfiles" / "ssh_config"
    real.parent.mkdir()
    real.write_bytes(b"Host a")
    real.chmod(0o640)
    spot.config.symlink_to(real)
    fleet = with_fleet(spot)
    add(spot)
    assert spot.config.is_symlink() and spot.line in real.read_bytes()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    leave(spot, fleet)
    assert spot.config.is_symlink() and real.read_bytes() == b"Host a"
    assert [p.name for p in real.parent.iterdir()] == ["ssh_config"]


def test_what_is_no_file_is_left_alone(spot):
    spot.config.mkdir(parents=True)
    with pytest.raises(OSError, match="no regular file"):
        add(spot)


def test_a_save_in_the_same_moment_is_not_lost(spot, monkeypatch):
    spot.config.parent.mkdir(parents=True)
    spot.config.write_bytes(b"Host a\n")
    with_fleet(spot)
    dress, saves = include._dress, iter([b"Host a\nHost b\n"])

    def edit_meanwhile(*arguments: object) -> None:
        dress(*arguments)
        for data in saves:
            spot.config.write_bytes(data)

    monkeypatch.setattr(include, "_dress", edit_meanwhile)
    add(spot)
    assert without_line(spot.config.read_bytes(), spot.line) == b"Host a\nHost b\n"


def test_many_commands_at_once_leave_one_pair_of_lines_and_then_none(spot):
    spot.config.parent.mkdir(parents=True)
    spot.config.write_bytes(b"Host a\n")
    fleets = [with_fleet(spot, f"f{i}") for i in range(8)]

    def all_at_once(act, *each) -> None:
        threads = [threading.Thread(target=act, args=(spot, *rest)) for rest in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_at_once(add, *([] for _ in fleets))
    assert spot.config.read_bytes().splitlines().count(spot.line) == 1
    all_at_once(leave, *([fleet] for fleet in fleets))
    assert spot.config.read_bytes() == b"Host a\n"
    assert os.listdir(spot.config.parent) == ["config"]


def test_the_users_own_hosts_of_the_same_name_are_found(tmp_path):
    (tmp_path / "config").write_text("Host *\nHOST=digits\n  host  \"digits-w0\" other\n#Host digits-w1\n")
    assert include.own_hosts(tmp_path / "config", {"digits", "digits-w0", "digits-w1"}) == ["digits", "digits-w0"]
    assert include.own_hosts(tmp_path / "none", {"digits"}) == []
