"""Frames that belong to the user's script, and the text of its files."""

from __future__ import annotations

import linecache
import sys
from contextlib import contextmanager

import torch

import spotfleet.train as hvd
from spotfleet.train import runtime
from spotfleet.train.comm import script_lines
from tests.support.train import thread_fleet
from tests.support.train.thread_fleet import ThreadFleet, Worker


def frames() -> list[str]:
    return [frame.f_code.co_name for frame in script_lines._of_script(sys._getframe())]


def test_the_frames_around_the_launcher_on_ray_are_not_the_scripts():
    """Ray's own files are large: to look for loops in them took a second, at the first loss."""
    called: dict = {"call": lambda: frames()}
    exec(compile("found = call()", f"{script_lines.LAUNCHER}run/actors.py", "exec"), called)
    assert called["found"] == ["frames", "<lambda>"]
    assert test_the_frames_around_the_launcher_on_ray_are_not_the_scripts.__name__ in frames()


SCRIPT = """
def train(state):
    with nothing_to_read():
        for state.batch in range(state.batch, 3):
            found.append(running_loops(state))
"""


def test_the_scripts_files_are_parsed_before_a_worker_is_ready(monkeypatch, tmp_path):
    """Otherwise all workers would wait for that in the first step of a joiner, and in the first one after a loss."""
    thread_fleet.install(monkeypatch)
    monkeypatch.setattr(runtime, "_warm_up", lambda: None)  # seconds
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    @contextmanager
    def nothing_to_read():
        with monkeypatch.context() as patch:
            patch.setattr(linecache, "getlines", lambda *_: [])
            yield

    def script(worker: Worker) -> list[dict[str, str]]:
        hvd.init()
        names = {"found": [], "nothing_to_read": nothing_to_read, "running_loops": script_lines.running_loops}
        exec(compile(SCRIPT, str(path), "exec"), names)
        model = torch.nn.Linear(1, 1)
        hvd.elastic.run(names["train"])(hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), 0.1),
                                                               batch=0))
        return names["found"]

    fleet = ThreadFleet(script, 1)
    try:
        assert fleet.finish()[0].result == [{"batch": f"{tmp_path.name}/script.py:4"}] * 3
    finally:
        fleet.close()
