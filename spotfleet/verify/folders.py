"""The working directory of one worker: a folder of its own, as on a host, that shows what lies in the present one."""

from __future__ import annotations

from pathlib import Path


def make_folder(base: Path, here: Path) -> Path:
    """Make a folder in `base` with a link to each entry of `here`, and around it links to the neighbours of `here`.

    Files that a script makes stay in it: no later run finds a checkpoint of an earlier one, and a replacement finds
    none of another worker's.
    """
    made = base / (here.name or "root")
    made.mkdir(parents=True)
    if here.name:
        _link(here.parent, base, leave=here.name)
    _link(here, made)
    return made


def _link(found: Path, folder: Path, leave: str = "") -> None:
    for entry in found.iterdir():
        if entry.name != leave:
            (folder / entry.name).symlink_to(entry)
