"""A worker's output folder, its shipper, and a dispatcher's real copies, without processes or a network."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from spotfleet.agent.files.outputs import OutputShipper
from spotfleet.dispatcher.disk.outputs import Outputs
from spotfleet.protocol.messages import unpack_pieces

WORKER = "f-1/0/1"


class Wire:
    """A dispatcher's copies, reached without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outputs = Outputs(folder)
        self.dispatcher = 0
        self.bytes = 0
        self.bodies: list[list] = []
        self.full, self.lose_answers, self.refuse = False, 0, ""

    async def post_output(self, job: str, worker: str, body: bytes) -> tuple[int, dict]:
        await asyncio.sleep(0)
        if self.full:
            asked = aiohttp.RequestInfo(URL("https://dispatcher"), "POST", CIMultiDictProxy(CIMultiDict()))
            raise aiohttp.ClientResponseError(asked, (), status=507, message="no room")
        if self.refuse:
            return 413, {"error": self.refuse}
        self.bytes += len(body)
        self.bodies.append(unpack_pieces(body))
        held = self.outputs.apply(worker, self.bodies[-1])
        if self.lose_answers:
            self.lose_answers -= 1
            raise aiohttp.ServerDisconnectedError
        return 200, {"held": held}

    def files(self) -> dict[str, bytes]:
        return contents(self.folder / WORKER.replace("/", "@"))

    def forget_all(self) -> None:
        """Another dispatcher, with another disk."""
        self.folder, self.dispatcher = self.folder.with_name("another"), self.dispatcher + 1
        self.outputs = Outputs(self.folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def is_link(path: Path) -> bool:
    return path.is_symlink() or path.parent.is_symlink()


class Stage:
    """One worker's folder, its shipper, and the copies."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "output"
        self.folder.mkdir()
        self.wire = Wire(tmp_path / "copies")
        self.said: list[str] = []
        self.hurry = False
        self.shipper = OutputShipper(self.wire, "job", WORKER, self.folder, lambda: self.hurry,  # type: ignore[arg-type]
                                     self.said.append)

    def write(self, name: str, data: bytes | str, age_s: float = 10.0) -> Path:
        """A file that has been quiet for `age_s`."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        self.age(path, age_s)
        return path

    def age(self, path: Path, age_s: float = 10.0) -> None:
        os.utime(path, (time.time(), time.time() - age_s))

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.005)

    async def has(self, **files: bytes) -> None:
        wanted = {name.replace("__", "."): data for name, data in files.items()}
        await self.until(lambda: self.wire.files() == wanted)
