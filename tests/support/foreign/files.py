"""Files that foreign scripts read, made small, and edits of a script's text."""

from __future__ import annotations

import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODULES = Path(__file__).parent / "modules"


@dataclass(frozen=True)
class Edit:
    """A replacement in a script: `old` occurs in it `times`."""

    old: str
    new: str
    times: int = 1


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Return `text` with all replacements made, one after the other."""
    for edit in edits:
        found = text.count(edit.old)
        assert found == edit.times, f"the text occurs {found} times, not {edit.times}:\n{edit.old}"
        text = text.replace(edit.old, edit.new)
    return text


@dataclass(frozen=True)
class LoopEdit:
    """The move of a loop into a function that elastic.run calls."""

    begin: str  # its first line
    end: str  # the line after it
    names: tuple[str, ...]  # variables that move into the state
    state: str  # what the state is made of

    def apply(self, text: str) -> str:
        assert text.count(self.begin) == text.count(self.end) == 1, self
        before, rest = text.split(self.begin)
        body, after = (self.begin + rest).split(self.end)
        margin = self.begin[:len(self.begin) - len(self.begin.lstrip())]
        for name in self.names:
            body = re.sub(rf"(?<!')\b{name}\b(?!')", f"state.{name}", body)
        inside = "".join(f"    {line}" if line.strip() else line for line in body.splitlines(keepends=True))
        return (f"{before}{margin}@hvd.elastic.run\n{margin}def run(state):\n{inside.rstrip()}\n\n"
                f"{margin}run(hvd.elastic.TorchState({self.state}))\n\n{self.end}{after}")


def make_here(folder: Path) -> None:
    """Make everything that the scripts read in `folder`, which is their working directory and holds the script."""
    shutil.copytree(MODULES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _digits(folder / "data" / "MNIST" / "raw")
    draws = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for name in ("ants", "bees"):
            (folder / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                image = draws.integers(0, 255, (3, 16, 16), dtype=np.uint8)
                np.save(folder / "images" / split / name / f"{number}.npy", image)
    (folder / "text").mkdir()
    for name, size in (("train", 2000), ("val", 500)):
        draws.integers(0, 65, size).astype(np.uint16).tofile(folder / "text" / f"{name}.bin")
    (folder / "text" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _digits(folder: Path) -> None:
    """Write images of digits in MNIST's size and format."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.pad(np.kron(digits.images * 15, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    folder.mkdir(parents=True)
    for name, part in (("train", slice(0, 96)), ("t10k", slice(96, 144))):
        _write_idx(folder / f"{name}-images-idx3-ubyte", images[part])
        _write_idx(folder / f"{name}-labels-idx1-ubyte", digits.target[part])


def _write_idx(path: Path, array: Any) -> None:
    data = array.astype(np.uint8)
    path.write_bytes(bytes([0, 0, 8, data.ndim]) + np.array(data.shape, ">i4").tobytes() + data.tobytes())
