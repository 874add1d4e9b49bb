"""Nobody answers, another program has the port, the folder here is damaged: bounded time, and words to go on with."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotfleet.api import fleet as fleet_module
from spotfleet.api.home import Home
from spotfleet.dispatcher import daemon
from spotfleet.transport import client
from tests.support.cli.cli_user import User
from tests.support.dispatcher.fake_fleet import Stage, spec

READS = ("status", "hosts", "jobs", "events", "logs", "cost", "status -o json", "cost -o csv")
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form only (SPOTFLEET_LONG=1)")


@contextmanager
def taken(port: int, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Another program's port: connections are accepted by the kernel, and nobody says a word."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen()
        yield sock


def test_a_command_that_reads_gives_up_soon_where_a_network_swallows_all(up: User, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_S", 0.05)
    monkeypatch.setattr(fleet_module, "READ_PATIENCE_S", 0.1)
    monkeypatch.setattr(fleet_module, "PATIENCE_S", 0.1)
    dispatcher = up.dispatcher
    dispatcher.stop()
    with taken(dispatcher.port):
        for command in READS:
            began = time.monotonic()
            said = up.fails(command)
            assert time.monotonic() - began < 30
            assert said.out == ""
            assert said.err.startswith(f"error: no answer from the dispatcher at https://127.0.0.1:{dispatcher.port}: ")
            assert said.err.endswith("hint: is this machine online? A dispatcher is restarted by itself, and training "
                                     "goes on without it; try again, or end the fleet with `spotfleet down`\n")


def test_the_real_limits_are_seconds():
    assert client.CONNECT_S + fleet_module.READ_PATIENCE_S + client.CONNECT_S < 30


def test_an_up_whose_dispatcher_does_not_come_says_what_answers_in_its_place(user: User, monkeypatch):
    from tests.support.cli.cli_cloud import FakeDispatcher

    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    start = FakeDispatcher.start

    def never(self: FakeDispatcher) -> None:
        start(self)
        self.stop()

    monkeypatch.setattr(FakeDispatcher, "start", never)
    said = user.fails("up fleet.yaml -y --timeout 3s")
    where = f"https://127.0.0.1:{user.dispatcher.port}"
    assert "error: no dispatcher within 3 s: its machine was launched but does not answer: nothing answers" in said.err
    assert f"{where} ([Errno 111] Connection refused); its log is dispatcher.log in its home" in said.err
    user.ok("down -y")
    assert user.cloud.living() == []


def test_a_dispatcher_whose_port_is_taken_says_so_once_and_serves_when_it_is_free(play, monkeypatch, caplog):
    monkeypatch.setattr(daemon, "PORT_AGAIN_S", 0.05)

    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        await stage.stop_dispatcher()
        with taken(stage.port):
            starting = asyncio.create_task(stage.start_dispatcher())
            words = f"port {stage.port} of 127.0.0.1 is taken by another program: end that program; tried again each"
            await stage.until("it to say so", lambda: any(words in r.getMessage() for r in caplog.records))
            await asyncio.sleep(0.2)
            assert not starting.done()
            assert sum(words in r.getMessage() for r in caplog.records) == 1
        await starting
        assert await stage.up(1) == [host]

    play(scene, spec(1))


GARBAGE = "\x00not json"


@pytest.mark.parametrize(("name", "words"), [
    ("fleet.json", "cannot be read: Expecting value"), ("keys.json missing", "is missing"),
    pytest.param("keys.json", "cannot be read: Expecting value", marks=LONGER),
    pytest.param("ca.pem", "cannot be read: Invalid PEM encoding", marks=LONGER),
    pytest.param("ca.pem missing", "is missing", marks=LONGER)])
def test_a_damaged_folder_is_named_and_made_anew_from_the_cloud(up: User, name, words):
    folder = up.home / "fleets" / "digits"
    file = folder / name.split()[0]
    file.unlink() if "missing" in name else file.write_text(GARBAGE)
    for command in ("status digits", "jobs digits", "down digits -y", "up fleet.yaml -y"):
        said = up.fails(command)
        assert f"error: {file} {words}" in said.err
        assert "hint: if the fleet lives, `spotfleet attach digits` makes its folder anew from what the" in said.err
    up.ok("attach digits")
    assert json.loads(up.ok("status -o json").out)["state"] == "up"
    assert list((up.home / "old").glob("digits-*"))
    up.ok("down -y")
    assert up.cloud.living() == []


def test_one_damaged_folder_does_not_hide_the_other_fleets(up: User):
    shutil.copytree(up.home / "fleets" / "digits", up.home / "fleets" / "broken")
    (up.home / "fleets" / "broken" / "fleet.json").write_text(GARBAGE)
    said = up.ok("status")
    assert "digits" in said.out and "broken" in said.out and "fleet.json cannot be read" in said.out
    assert [f.name for f in Home(up.home).living()] == ["broken", "digits"]


def test_a_metadata_port_that_is_taken_is_asked_for_again(tmp_path: Path, capfd):
    from spotfleet.providers.local import hosts as local
    from spotfleet.providers.local.hosts import LocalMachines, Placement

    with taken(0) as other:
        port = other.getsockname()[1]
        machines = LocalMachines(tmp_path, lambda _r: None,
                                 {"f-0": Placement("none", "127.0.0.1", 1, metadata_port=port)})
        machines._serve_metadata("f-0")
        machines._serve_metadata("f-0")
        said = capfd.readouterr().err
        assert said.startswith(f"f-0: metadata port {port} of 127.0.0.1: ") and said.count("metadata port") == 1
        assert "until it is free the host sees no notice" in said
    machines._unserved = {"f-0": time.monotonic() - local.PORT_AGAIN_S}
    machines.match([])
    try:
        assert machines.metadata_url("f-0") == f"http://127.0.0.1:{port}" and "f-0" in machines._metadata
    finally:
        machines.close()
