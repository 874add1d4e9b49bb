"""Where secrets lie, and where they do not: in real processes, under an umask that hides nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from spotfleet.protocol.messages import JOB_KEY
from tests.support.e2e.e2e_stage import Stage, hosts, wait_for

pytestmark = pytest.mark.processes

PASSWORD = "correct-horse-battery-staple"
EXPORTED = "of-the-shell-where-up-was-typed"


@pytest.fixture
def permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def holders(folder: Path, secrets: dict[str, str]) -> dict[Path, set[str]]:
    """The files below `folder` that hold a secret, and which; others may be replaced or removed meanwhile."""
    found: dict[Path, set[str]] = {}
    for path in (Path(top, name) for top, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):
            if path.is_file():
                data = path.read_bytes()
                found[path] = {name for name, value in secrets.items() if value.encode() in data}
    return {path: held for path, held in found.items() if held}


def environments(secrets: dict[str, str]) -> tuple[set[str], set[str]]:
    """(secrets on some command line, secrets in the environment of some process) of those that this run has started."""
    lines, environs = "", ""
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if process.pid != os.getpid() and "TEST_RUN_OF_SPOTFLEET" in environ:
                lines += "\0".join(process.cmdline())
                environs += "\0".join(environ.values())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return {n for n, v in secrets.items() if v in lines}, {n for n, v in secrets.items() if v in environs}


def known(stage: Stage, fleet: str) -> dict[str, str]:
    """Every secret of the running fleet, by what it is for."""
    keys = json.loads((stage.home / "fleets" / fleet / "keys.json").read_text())
    (boot,) = [json.loads(p.read_text()) for p in stage.home.glob("local/hosts/*/boot.json") if "-d-" not in str(p)]
    (job,) = [json.loads(p.read_text()) for p in stage.home.glob("local/hosts/*/jobs/*/secrets.json")]
    assert job["PASSWORD"] == PASSWORD
    body = keys["key"].split("-----")[2].strip().splitlines()[0]  # first line of the PEM, where JSON escapes nothing
    return {"admin": keys["admin_token"], "fleet": keys["fleet_secret"], "tls": body, "host": boot["token"],
            "cloud": json.loads((stage.home / "local" / "cloud.json").read_text())["token"],
            "job's own": PASSWORD, "job's key": job[JOB_KEY]}


def test_secrets_lie_in_few_files_of_their_owner_and_nowhere_else(stage: Stage, permissive: None,
                                                                  monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EXPORTED_IN_THE_SHELL", EXPORTED)
    fleet = stage.fleet("hush", least=1, target=1, more='run: "env > half; mv half mine; sleep 1000"')
    job = fleet.train(np=(1, 1), secrets={"PASSWORD": PASSWORD}, detach=True)
    wait_for("the job to run", lambda: [*stage.home.glob("local/hosts/*/jobs/*/source/mine")])
    secrets = known(stage, "hush")

    held = holders(stage.home, secrets)
    assert {(path.name, *sorted(names)) for path, names in held.items()} == {
        ("keys.json", "admin", "fleet", "tls"),  # the laptop's
        ("cloud.json", "cloud"),  # the emulated cloud's
        ("boot.json", "admin", "fleet", "tls"),  # the dispatcher's
        ("boot.json", "host"),  # the host's
        ("secrets.json", "job's key", "job's own"),  # on the dispatcher, while the job lives
        ("mine", "job's key", "job's own"),  # written by the job itself
    }
    for path in held:
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.parent.stat().st_mode & 0o077 == 0, path.parent
    assert EXPORTED not in next(path for path in held if path.name == "mine").read_text()
    on_lines, in_environments = environments(secrets | {"exported": EXPORTED})
    assert on_lines == set()
    assert in_environments <= {"job's own", "job's key"}
    shown = stage.cli("status", "-o", "json").stdout + stage.cli("events", "-o", "json", "--all").stdout
    assert not [name for name, value in secrets.items() if value in shown]

    job.cancel()
    wait_for("its end", lambda: job.state.ended)
    assert hosts(fleet)
    stage.cli("down", "-y")
    wait_for("empty disks", lambda: {p.name for p in stage.home.glob("local/hosts/*/*")} == {"console.log"})
    left = holders(stage.home, secrets)
    assert {(path.name, *sorted(names)) for path, names in left.items() if "local" not in path.parts} == {
        ("keys.json", "admin", "fleet", "tls")}  # useless after the end
    assert not [path for path, names in left.items() if names & {"job's own", "job's key"}]
