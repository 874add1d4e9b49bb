"""Results and ends of submitted scripts, as the dispatcher keeps them. No Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spotfleet.codec import from_json
from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.ray.drivers import DriverDesk
from spotfleet.model import JobState
from spotfleet.protocol.ray_cluster import DriverStart
from spotfleet.storage import json_file


def desk_of(job: Path) -> DriverDesk:
    core: Any = SimpleNamespace(home=job.parents[1], jobs={
        "ray-1": SimpleNamespace(folder=job, state=JobState.RUNNING)})
    return DriverDesk(core)


def submitted(home: Path) -> tuple[DriverDesk, Path]:
    """Return the desk, and the folder of a script that it has been given."""
    folder = home / "jobs" / "ray-1"
    folder.mkdir(parents=True)
    bundles: Any = SimpleNamespace(refuse_incomplete=lambda bundle: None)
    desk = desk_of(folder)
    name = asyncio.run(desk.start("ray-1", bundles, "", DriverStart("python t.py", {"A": "1"})))
    return desk, folder / "drivers" / name


def test_the_files_of_a_script_are_outputs_of_its_job(tmp_path: Path):
    _, script = submitted(tmp_path)
    given = from_json(DriverStart, json_file.read(script / "start.json"))
    (Path(given.envs["SPOTFLEET_OUTPUT"]) / "model.pt").write_text("weights")
    (tmp_path / "boot.json").write_text("secret")
    (Path(given.envs["SPOTFLEET_OUTPUT"]) / "link").symlink_to(tmp_path / "boot.json")
    assert given.envs["A"] == "1"
    found = {name: path.read_text() for name, path in archive.outputs(tmp_path / "jobs" / "ray-1")}
    assert found == {"script@d1/model.pt": "weights"}


def test_a_cancelled_script_is_stopped_whatever_its_status_and_for_a_new_dispatcher_too(tmp_path: Path):
    desk, script = submitted(tmp_path)
    desk.stop(script)
    again = desk_of(script.parents[1])
    assert desk.wanted("ray-1") == again.wanted("ray-1") == ()
    (script / "exit").write_text("15")  # Ray's own handler of SIGTERM ends a driver so
    assert [(d.state, d.exit_status) for d in again.status("ray-1")] == [("stopped", 15)]


def test_a_script_that_has_ended_cannot_be_cancelled_any_more(tmp_path: Path):
    desk, script = submitted(tmp_path)
    (script / "exit").write_text("0")
    desk.stop(script)
    assert [d.state for d in desk.status("ray-1")] == ["succeeded"]
