"""Frames that belong to the user's script."""

from __future__ import annotations

import sys

from spotfleet.train.comm import script_lines


def frames() -> list[str]:
    return [frame.f_code.co_name for frame in script_lines._of_script(sys._getframe())]


def test_the_frames_around_the_launcher_on_ray_are_not_the_scripts():
    """Ray's own files are large: to look for loops in them took a second, at the first loss."""
    called: dict = {"call": lambda: frames()}
    exec(compile("found = call()", f"{script_lines.LAUNCHER}run/actors.py", "exec"), called)
    assert called["found"] == ["frames", "<lambda>"]
    assert test_the_frames_around_the_launcher_on_ray_are_not_the_scripts.__name__ in frames()
