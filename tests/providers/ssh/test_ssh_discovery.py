"""The host-discovery script: what it may say, and that it can hold nobody up."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from spotfleet.providers.ssh import discovery
from spotfleet.providers.ssh.discovery import Discovery, DiscoveryFailed, read, run

LIMIT_S = 30.0


def test_each_line_is_a_host_with_its_slots():
    text = "node1\nnode2:8\n\n  # all of rack 3\nnode3 # new\n[fd00::1]:4\nfd00::2\nnode1:2\n"
    assert read(text) == (("node1", 1), ("node2", 8), ("node3", 1), ("fd00::1", 4), ("fd00::2", 1))
    assert read("") == ()


@pytest.mark.parametrize("text, said", [
    ("a\nb:many", "line 2: expected HOST or HOST:SLOTS"),
    ("a:0", "line 1: expected slots, a whole number of at least 1"),
    ("Traceback (most recent call last):", "line 1"),
    ("ann@node", "line 1: expected the name or the address of a machine, got 'ann@node'; write {host: node, user: an"),
    ("a; rm -rf /", "line 1"),
])
def test_a_line_that_is_no_machine_is_named_and_the_whole_answer_refused(text, said):
    with pytest.raises(DiscoveryFailed) as caught:
        read(text)
    assert said in str(caught.value)


def test_a_script_says_by_its_first_line_what_runs_it():
    assert run("echo a:2", 10.0) == (("a", 2),)
    assert run("#!/usr/bin/env python3\nprint('b')", 10.0) == (("b", 1),)


@pytest.mark.parametrize("script, said", [
    ("echo a; echo no database >&2; exit 3", "the discovery script ended with status 3: no database"),
    ("#!/no/such/interpreter\n", "the discovery script cannot be started"),
    ("#!/bin/sh 'half\n", "the discovery script's first line \"#!/bin/sh 'half\" names no program"),
    ("echo a; kill -9 $$", "the discovery script ended with status -9"),
])
def test_a_script_that_fails_gives_no_list_and_says_why(script, said):
    with pytest.raises(DiscoveryFailed) as caught:
        run(script, 10.0)
    assert said in str(caught.value)


def test_a_script_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    began = time.monotonic()
    with pytest.raises(DiscoveryFailed, match=r"still running after 3 s and was ended: asking"):
        run(f"echo asking >&2\nsleep 1000 & echo $! >{tmp_path}/child\nsleep 1000", 3.0)
    assert time.monotonic() - began < LIMIT_S
    child = int((tmp_path / "child").read_text())
    wait(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_what_a_script_leaves_running_ends_with_it(tmp_path):
    assert run(f"sleep 1000 & echo $! >{tmp_path}/child\necho a", 10.0) == (("a", 1),)
    child = int((tmp_path / "child").read_text())
    wait(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait(true) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_last_good_list_holds_while_the_script_fails_and_what_is_wrong_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "AGAIN_S", 0.0)
    said = tmp_path / "said"
    said.write_text("a\nb:2")
    watched = Discovery(f"cat {said}", 10.0)
    assert watched.found() == (("a", 1), ("b", 2)) and watched.trouble == ""
    said.unlink()
    wait(lambda: watched.found() == (("a", 1), ("b", 2)) and "No such file" in watched.trouble)
    said.write_text("c")
    wait(lambda: watched.found() == (("c", 1),) and watched.trouble == "")


def test_once_there_is_a_list_nobody_waits_for_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "AGAIN_S", 0.0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    watched = Discovery(f"[ ! -e {tmp_path}/begun ] || cat {gate}\ntouch {tmp_path}/begun; echo a", 20.0)
    assert watched.found() == (("a", 1),)
    began = time.monotonic()
    for _ in range(50):
        assert watched.found() == (("a", 1),)
    assert time.monotonic() - began < 5.0
    gate.open("w").close()  # lets it end


def test_without_a_script_there_is_nothing_to_be_found():
    assert Discovery("", 10.0).found() == ()


def test_a_host_without_slots_has_those_of_the_fleet_file():
    assert read("a\nb:2\n[fd00::1]:3\n", 4) == (("a", 4), ("b", 2), ("fd00::1", 3))
