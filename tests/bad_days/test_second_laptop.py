"""`spotfleet attach`: a fleet that another machine has made is found by its tags, and every command works from here."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.api import Fleet
from spotfleet.api.home import Home
from spotfleet.api.lifecycle import down
from spotfleet.errors import NoCapacity
from spotfleet.model import Nodes
from spotfleet.providers.local import LocalCloud


@pytest.fixture
def second(up, monkeypatch: pytest.MonkeyPatch):
    """The same user with the same account, in front of another machine; `digits` was made on the first one."""
    home = up.home.with_name("home2")
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    return replace(up, home=home)


def test_a_second_laptop_attaches_and_everything_works_from_there(second):
    assert "there is no fleet 'digits'" in second.fails("status digits").err
    said = second.ok("attach digits")
    assert said.err == ("fleet digits is attached: 4 machines on local\n"
                        "next: spotfleet status digits\n      spotfleet cost digits\n      spotfleet down digits\n")
    assert json.loads(second.ok("status -o json").out)["state"] == "up"
    assert second.ok("train hello.py there").out == "hello there \n"
    job = json.loads(second.ok("jobs -o json").out)[0]["job"]
    assert second.ok(f"logs {job}").out == "hello there \n"
    second.ok("down -y")
    assert second.cloud.living() == []
    assert Path(second.home / "fleets" / "digits" / "archive" / "ledger.db").exists()


def test_its_cost_is_the_clouds_own_also_for_the_dispatchers_machine(second):
    second.ok("attach")  # the only one of the account
    live = json.loads(second.ok("cost -o json").out)
    assert live["dispatcher_micros"] > 0 and len(live["lines"]) == 4
    second.ok("down -y")
    cost = json.loads(second.ok("cost -o json").out)
    assert cost["micros"] == second.cloud.market.invoice(second.cloud.clock(), "digits").micros


def test_the_keys_are_for_their_owner_only_and_the_folder_is_that_of_up(second):
    second.ok("attach digits")
    first, here = Home(second.home.with_name("home")).folder("digits"), Home(second.home).folder("digits")
    assert stat.S_IMODE(os.stat(here.path / "keys.json").st_mode) == 0o600
    assert (here.keys, here.ca) == (first.keys, first.ca)
    assert (here.record.spec, here.record.cloud_name, here.record.url) == (
        first.record.spec, first.record.cloud_name, first.record.url)


def test_the_size_is_that_of_now_not_that_of_its_beginning(second):
    second.dispatcher.nodes = Nodes(1, 2, 5)
    second.ok("attach digits")
    assert Home(second.home).folder("digits").record.spec.nodes == Nodes(1, 2, 5)


def test_the_first_laptop_learns_that_the_second_took_it_down(second, monkeypatch):
    second.ok("attach digits")
    second.ok("down -y")
    monkeypatch.setenv("SPOTFLEET_HOME", str(second.home.with_name("home")))
    assert json.loads(second.ok("status -o json").out)["state"] == "down"


def test_a_fleet_that_is_here_is_not_attached_again(up):
    said = up.fails("attach digits", code=2)
    assert said.err == "error: fleet 'digits' is here already\nhint: spotfleet status digits\n"


def test_an_unknown_name_lists_what_the_account_has(second):
    assert second.fails("attach cifar").err == (
        "error: the account has no fleet 'cifar'\nhint: fleets found: digits\n")


def test_an_account_without_fleets_says_how_to_make_one(user):
    assert user.fails("attach").err == "error: the account has no fleet\nhint: `spotfleet up FILE` makes one\n"


def test_a_machine_whose_fleet_is_named_like_a_path_makes_no_folder(second, monkeypatch):
    boot = second.cloud.boot_files("digits-d-0")
    monkeypatch.setitem(boot, "boot.json", boot["boot.json"].replace('"name": "digits"', '"name": "../../digits"'))
    assert "says that its fleet is named '../../digits', which none is" in second.fails("attach", code=3).err
    assert not second.home.with_name("digits").exists() and not (second.home / "digits").exists()


def test_several_fleets_must_be_told_apart(up, monkeypatch):
    up.write("other.yaml", "name: other\nresources: {instance_type: cpu.small}\n")
    up.ok("up other.yaml -y")
    monkeypatch.setenv("SPOTFLEET_HOME", str(up.home.with_name("home2")))
    assert up.fails("attach", code=2).err == (
        "error: there are several fleets; say which one\nhint: one of: digits, other\n")
    up.ok("attach other")
    assert [f.name for f in Home().fleets()] == ["other"]


def test_an_ended_fleet_has_nothing_to_attach_to(second):
    first = Home(second.home.with_name("home")).folder("digits")
    down.take_down(first, lambda _line: None, discard=False, why="test")
    said = second.fails("attach digits")
    assert said.err.startswith("error: fleet 'digits' has ended: nothing of it is left\nhint: ")


def test_a_fleet_without_a_dispatcher_says_which_machines_live_and_what_to_do(second):
    second.dispatcher.cloud.terminate("digits-d-0")
    said = second.fails("attach digits")
    assert said.err.startswith("error: fleet 'digits' has no dispatcher, and 3 of its machines live: digits-0")
    assert "hint: `spotfleet up FILE` on the machine that made it" in said.err
    assert "`spotfleet leaks --fix` ends it" in said.err
    assert not (second.home / "fleets" / "digits").exists()


def test_a_dispatcher_that_does_not_answer_is_attached_to_so_that_it_can_be_ended(second, monkeypatch):
    monkeypatch.setattr("spotfleet.api.lifecycle.attach.PATIENCE_S", 0.2)
    second.dispatcher.stop()
    said = second.ok("attach digits")
    assert "note: no answer from the dispatcher at https://" in said.err
    second.ok("down -y --discard")
    assert second.cloud.living() == []


@pytest.fixture
def laptops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two homes; the emulated cloud lives in the first."""
    first, second = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("SPOTFLEET_HOME", str(first))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    try:
        yield first, second
    finally:
        LocalCloud(first).shutdown()


@pytest.mark.processes
def test_two_homes_share_one_emulated_cloud(laptops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the real daemon and dispatcher: only they show that boot files are read back and keys fit."""
    first, second = laptops
    (tmp_path / "f.yaml").write_text("name: shared\nresources: {instance_type: cpu.small}\n")
    LocalCloud(first).refuse("local/local-a/cpu.small/spot", "type")  # a dispatcher is enough here
    made = Fleet("f.yaml", first)
    while not (made.home.folder("shared").exists and made.home.folder("shared").record.reached):
        with pytest.raises(NoCapacity):
            made.up(timeout_s=2.0)
    monkeypatch.setenv("SPOTFLEET_LOCAL_CLOUD", str(first))
    fleet = Fleet.attach("shared", home=second)
    assert [(h.role, h.state) for h in fleet.hosts()] == [("dispatcher", "up")]
    fleet.down()
    assert LocalCloud(first).truth() == []
    assert fleet.cost().micros == LocalCloud(first).invoice("shared").micros
