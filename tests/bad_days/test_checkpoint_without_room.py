"""A checkpoint that its worker cannot write: told, nothing is left of it, tried again, and training goes on."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spotfleet.protocol.messages import WorkerOrders
from spotfleet.protocol.proofs import MemberProof
from spotfleet.train.checkpoint import entries, store_folder, writer
from spotfleet.train.checkpoint.format import Shard
from spotfleet.train.checkpoint.shards import TensorRow
from spotfleet.train.checkpoint.writer import Checkpointer
from tests.support.train.train_parts import restored

NUMBERS = torch.arange(1_000_000)
HELD = Shard(3, 1, 0, 1, [TensorRow((("model", "a"),), NUMBERS.dtype, (1_000_000,), True)], [NUMBERS])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_one_that_does_not_fit_leaves_nothing_and_one_that_fits_is_read_back(small: Path):
    filler = small / "filler"
    filler.write_bytes(bytes(4 << 20))
    with pytest.raises(OSError) as caught:
        store_folder.write_here(HELD, small / "work")
    assert caught.value.errno == errno.ENOSPC
    assert list((small / "work").iterdir()) == []
    filler.unlink()
    named, _ = store_folder.write_here(HELD, small / "work")
    assert torch.equal(restored(named).tensors[0], NUMBERS)


def test_training_goes_on_and_the_next_is_tried_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    reported = []
    control = SimpleNamespace(orders=WorkerOrders(checkpoint_every_s=3600.0),
                              update=lambda **changes: reported.append(changes["checkpoint"].version))
    runtime = SimpleNamespace(control=control, place=SimpleNamespace(rank=0), work=str(tmp_path), generation=1,
                              group=None, proof=MemberProof())
    saver, state = Checkpointer(runtime), SimpleNamespace(step_mode=True, version=0)
    monkeypatch.setattr(entries, "sources", lambda state: [NUMBERS])
    monkeypatch.setattr(entries, "rank_shard", lambda *_: HELD)
    now = [writer.time.monotonic()]
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def boundary_after(seconds: float) -> None:
        now[0] += seconds
        saver.at_boundary(state)
        if saver._writer is not None:
            saver._writer.join()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_folder, "write_here", refuse)
        boundary_after(3601.0)
    assert capsys.readouterr().out == (
        "spotfleet: checkpoint of version 3 cannot be written: No space left on device; training goes on, and it is "
        "tried again within 10 s\n")
    boundary_after(5.0)
    assert reported == []
    boundary_after(6.0)
    assert reported == [3]
    boundary_after(60.0)
    assert reported == [3]  # from here on as often as asked
