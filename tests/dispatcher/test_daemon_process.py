"""The dispatcher as a process of its own: what only the command line and signals can show."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet import providers
from spotfleet.codec import to_json
from spotfleet.dispatcher.__main__ import main, serve
from spotfleet.errors import SpotfleetError
from spotfleet.model import FleetSpec
from spotfleet.providers.local import LocalCloud
from spotfleet.transport import certs
from spotfleet.transport.boot import DispatcherBoot
from spotfleet.transport.client import DispatcherClient, Endpoint

pytestmark = pytest.mark.processes
COMMAND = [sys.executable, "-m", "spotfleet.dispatcher", "--home"]
LIMIT_S = 30.0


@pytest.mark.parametrize(("boot", "word"), [
    (None, "boot.json does not exist"),
    ("{", "Expecting"),
    (json.dumps({"fleet": "f", "host": "f-d-0", "spec": {"name": 7}}), "FleetSpec.name"),
])
def test_a_home_without_a_good_boot_file_is_told_by_field(tmp_path: Path, boot: str | None, word: str,
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture):
    if boot is not None:
        (tmp_path / "boot.json").write_text(boot)
    monkeypatch.setattr(sys, "argv", ["dispatcher", "--home", str(tmp_path)])
    monkeypatch.setattr("spotfleet.dispatcher.__main__.raise_file_limit", lambda: None)
    before = os.umask(0o077)
    try:
        assert main() == 2
    finally:
        os.umask(before)
    assert word in caplog.text


def test_a_process_without_a_boot_file_says_so_where_people_look_and_in_its_log(tmp_path: Path):
    """A process of its own shows its status, both places, and that there is no traceback."""
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    for said in (done.stderr, (tmp_path / "dispatcher.log").read_text()):
        assert "boot.json does not exist" in said and "Traceback" not in said


def test_a_home_that_is_no_folder_is_a_usage_error(tmp_path: Path):
    done = subprocess.run([*COMMAND, str(tmp_path / "nowhere")], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, "nowhere is no folder" in done.stderr) == (2, True)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCloud]:
    home = tmp_path / "house"
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    try:
        yield LocalCloud(home)
    finally:
        LocalCloud(home).shutdown()


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_dispatcher_serves_until_sigterm_and_keeps_its_secrets_to_itself(tmp_path: Path, cloud: LocalCloud):
    made, home, port = certs.make("f", time.time()), tmp_path / "dispatcher", free_port()
    home.mkdir()
    boot = DispatcherBoot("f", "f-d-0", FleetSpec("f"), "fleet-secret-1", "admin-token-1", made.ca, made.cert, made.key)
    (home / "boot.json").write_text(json.dumps(to_json(boot)))
    env = {**os.environ, "SPOTFLEET_HOST_ADDRESS": "127.0.0.1", "SPOTFLEET_HOST_PORT": str(port)}
    process = subprocess.Popen([*COMMAND, str(home)], env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        client = DispatcherClient(Endpoint(f"https://127.0.0.1:{port}", "admin-token-1", made.ca), patience_s=LIMIT_S)
        assert client.status().fleet == "f"
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        for text in (said, (home / "dispatcher.log").read_text(), command):
            assert "admin-token-1" not in text and "fleet-secret-1" not in text and "PRIVATE KEY" not in text
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_a_dispatcher_that_waits_for_its_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Away:
        name = "away"

        def billing(self):
            raise SpotfleetError("no answer")

    made = certs.make("f", time.time())
    boot = DispatcherBoot("f", "f-d-0", FleetSpec("f"), "fleet-secret-1", "admin-token-1", made.ca, made.cert, made.key)
    (tmp_path / "boot.json").write_text(json.dumps(to_json(boot)))
    monkeypatch.setattr(providers, "load", lambda _name, _config: Away())

    async def scene() -> None:
        serving = asyncio.create_task(serve(tmp_path))
        await asyncio.sleep(0.3)  # it waits by now; were it not yet so, the signal would be heeded the sooner
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, LIMIT_S)

    asyncio.run(scene())
