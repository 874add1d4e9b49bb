"""HTTPS requests to the dispatcher for launches, files and logs. They pin the fleet's CA and send the host's token."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from spotfleet.agent import disk
from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.target_copies import TargetCopies
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.checkpoint_files import MANIFEST, CheckpointFile
from spotfleet.protocol.messages import Checkpoint, WorkerLaunch, load
from spotfleet.retry import Backoff
from spotfleet.storage import atomic
from spotfleet.storage.checkpoint_folder import digest_of, read_manifest
from spotfleet.transport.certs import client_context

log = logging.getLogger("spotfleet.agent")

RETRYABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)  # the dispatcher is away or answers 5xx: try again
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
NOT_THERE = 412  # status: this file of a checkpoint is not at the mounted target
ASKED_AT_ONCE = 5000  # digests; a request may have 4 MiB
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)

T = TypeVar("T")


def open_session(boot: AgentBoot, address: str, *, keep: bool = True) -> aiohttp.ClientSession:
    """Open a session that trusts only the fleet's CA and, if `address` is given, connects from it.

    Without `keep` no connection is reused: one from an address that this host has lost looks like any other.
    Names are not checked: a dispatcher is identified by its certificate, as its address may change.
    """
    connector = aiohttp.TCPConnector(ssl=client_context(boot.ca), local_addr=(address, 0) if address else None,
                                     force_close=not keep, socket_factory=_make_socket)
    return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT,
                                 headers={"Authorization": f"Bearer {boot.token}"})


def _make_socket(place: Any) -> socket.socket:
    """Create a socket whose idle connection ends soon after its peer, or this host's address, has gone.

    A transfer under way gets no such limit: a dispatcher with a slow disk may let an upload wait.
    """
    family, kind, protocol, *_ = place
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


async def retry_until_answered(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` until the dispatcher has answered; only success, another error or a cancellation ends it."""
    backoff = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S)
    while True:
        try:
            return await call()
        except RETRYABLE as error:
            if backoff.is_fresh:
                log.warning("%s: %s; trying again", what, error or type(error).__name__)
        await asyncio.sleep(backoff.next_s())


class Transfers:
    """Client of the dispatcher's routes for hosts. Methods raise RETRYABLE when the dispatcher cannot be reached."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: DispatcherEndpoint,
                 copies: TargetCopies | None = None) -> None:
        """`copies`: at a target that this host can read itself."""
        self._session = session
        self._endpoint = endpoint
        self._copies = copies

    async def renew(self, session: aiohttp.ClientSession) -> None:
        """Use `session` from now on, and close the old one. Transfers under way fail, and their callers retry.

        On an address that this host has lost they would wait for long.
        """
        old, self._session = self._session, session
        await old.close()

    async def close(self) -> None:
        await self._session.close()

    @property
    def dispatcher(self) -> int:
        """A number that changes whenever the dispatcher may be another one, or may have lost data."""
        return self._endpoint.answers

    def _url(self, *parts: str, **query: str | int) -> URL:
        path = "/".join(quote(p, safe="") for p in parts)  # worker names hold slashes
        tail = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in query.items())
        return URL(f"{self._endpoint.url}/v1/{path}" + (f"?{tail}" if tail else ""), encoded=True)

    async def launch(self, job: str) -> WorkerLaunch:
        async with self._session.get(self._url("jobs", job, "launch")) as answer:
            answer.raise_for_status()
            return load(WorkerLaunch, await answer.read())

    async def bundle(self, digest: str, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Download one blob of a working directory."""
        await self._download(self._url("bundles", digest), target, digest, on_bytes)

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Return the `digests` that the dispatcher does not have."""
        found: list[str] = []
        for start in range(0, len(digests), ASKED_AT_ONCE):
            asked = {"digests": list(digests[start:start + ASKED_AT_ONCE])}
            async with self._session.post(self._url("bundles", "missing"), json=asked) as answer:
                answer.raise_for_status()
                found += [str(digest) for digest in (await answer.json())["missing"]]
        return found

    async def checkpoint(self, job: str, wanted: Checkpoint, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Download a checkpoint to `target`: a folder, or a tar of an earlier release."""
        if not wanted.name:
            url = self._url("jobs", job, "checkpoints", str(wanted.version))
            return await self._download(url, target, wanted.digest, on_bytes, go_on=True)
        draft = target.with_name(f"{target.name}.part")
        await self.checkpoint_share(job, wanted, draft, on_bytes, lambda files: list(files))
        atomic.rename(draft, target, sync=False)  # fetched again from the dispatcher

    async def checkpoint_share(self, job: str, wanted: Checkpoint, into: Path, on_bytes: Callable[[int], None],
                               share: Callable[[Mapping[str, CheckpointFile]], list[str]]) -> list[str]:
        """Download a checkpoint's manifest and the files that `share` chooses of those in it to the folder `into`;
        return their names."""
        into.mkdir(mode=0o700, exist_ok=True)
        await self._file(job, wanted, into / MANIFEST, wanted.digest, on_bytes)
        try:
            files = read_manifest(into).files
        except ValueError as error:
            raise SpotfleetError(f"checkpoint {wanted.version} of {job}: {error}",
                                 hint="the manifest on the dispatcher is damaged") from error
        names = share(files)
        for name in names:
            await self._file(job, wanted, into / name, files[name].sha256, on_bytes)
        return names

    async def _file(self, job: str, wanted: Checkpoint, into: Path, digest: str,
                    on_bytes: Callable[[int], None]) -> None:
        """Fetch a file that is not there yet, from the target or the dispatcher; the last try may have brought it."""
        if into.is_file() and await asyncio.to_thread(digest_of, into) == digest:
            on_bytes(into.stat().st_size)
        elif self._copies is None or not await self._copies.copy(job, wanted, into, digest, on_bytes):
            url = self._url("jobs", job, "checkpoints", str(wanted.version), into.name)
            await self._download(url, into, digest, on_bytes, go_on=True)

    async def _download(self, url: URL, target: Path, digest: str,
                        on_bytes: Callable[[int], None] = lambda size: None, *, go_on: bool = False) -> None:
        """Fetch into `target`, which appears only whole and verified; `on_bytes` receives the size of each piece.

        SpotfleetError if the digest differs, DiskFull if there is no room. With `go_on` a transfer that broke off goes
        on where it stopped: one of many gigabytes may need several tries.
        """
        partial = target.with_name(target.name + ".part")
        seen = hashlib.sha256()
        have = await asyncio.to_thread(_hash_file, seen, partial) if go_on and partial.is_file() else 0
        async with self._session.get(url, headers={"Range": f"bytes={have}-"} if have else {}) as answer:
            if have and answer.status == 206:
                on_bytes(have)
            else:  # all of it comes, or an error: the file there is no longer than ours
                have, seen = 0, hashlib.sha256()
                partial.unlink(missing_ok=True)
            answer.raise_for_status()
            try:
                with partial.open("ab") as file:
                    async for chunk in answer.content.iter_chunked(1 << 20):
                        await asyncio.to_thread(_hash_and_write, seen, file, chunk)
                        on_bytes(len(chunk))
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise disk.as_disk_full(error, target.parent) from error
        if seen.hexdigest() != digest:
            partial.unlink()
            raise SpotfleetError(f"{url.path} has digest {seen.hexdigest()[:12]}, expected {digest[:12]}",
                                 hint="the file on the dispatcher is damaged")
        atomic.rename(partial, target, sync=False)  # fetched again from the dispatcher

    async def append_log(self, job: str, worker: str, offset: int, data: bytes) -> int:
        """Send `data` as the bytes after `offset`; return how many bytes the dispatcher holds now."""
        async with self._session.post(self._url("jobs", job, "logs", worker, offset=offset), data=data) as answer:
            if answer.status != 409:
                answer.raise_for_status()
            size = (await answer.json())["size"]
            if not isinstance(size, int) or size < 0:
                raise aiohttp.ClientPayloadError(f"log offset: expected a size, got {size!r}")
            return size

    async def put_checkpoint(self, job: str, made: Checkpoint, file: Path,
                             opened: Callable[[BinaryIO], None] = lambda body: None) -> int:
        """Upload one file of a checkpoint; return the status. `opened` receives the open file, whose position is the
        progress."""
        return await self._put(self._checkpoint_url(job, made), file, opened)

    def _checkpoint_url(self, job: str, made: Checkpoint, **more: str) -> URL:
        part: dict[str, str | int] = {"part": made.part, "parts": made.parts} if made.parts > 1 else {}
        part |= {"name": made.name} if made.name else {}
        grant = {"grant": made.grant} if made.grant else {}
        return self._url("jobs", job, "checkpoints", str(made.version), generation=made.generation,
                         digest=made.digest, **part, **grant, **more)

    async def put_at_target(self, job: str, made: Checkpoint, file: Path, opened: Callable[[BinaryIO], None]) -> int:
        """Write one file of a checkpoint to the mounted target and report it to the dispatcher; return the status,
        NOT_THERE if it is not there. `opened` as in `put_checkpoint`."""
        progress = io.BytesIO()
        opened(progress)

        def on_bytes(size: int) -> None:
            progress.seek(size, os.SEEK_CUR)

        if self._copies is None or not await self._copies.put(job, made, file, on_bytes):
            return NOT_THERE
        url = self._checkpoint_url(job, made, at="target")
        async with self._session.put(url) as answer:
            if answer.status >= 500:
                answer.raise_for_status()
            return answer.status

    async def post_output(self, job: str, worker: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Post pieces of an output folder; return the status and the answer.

        A dispatcher that does not know the host or the job yet is RETRYABLE: it has only just taken over.
        """
        async with self._session.post(self._url("jobs", job, "outputs", worker), data=body) as answer:
            if answer.status >= 500 or answer.status in (401, 404):
                answer.raise_for_status()
            reply = await answer.json(content_type=None)
            return answer.status, reply if isinstance(reply, dict) else {}

    async def offer_checkpoints(self, job: str, worker: str, generation: int,
                                body: bytes) -> tuple[int, dict[str, Any]]:
        """Offer the manifest of the job's checkpoint folder; return the status and the answer, which lists the pieces
        to send first. A dispatcher that does not know the host or the job yet is RETRYABLE."""
        url = self._url("jobs", job, "folder", worker, generation=generation)
        async with self._session.post(url, data=body) as answer:
            if (answer.status >= 500 and answer.status != 507) or answer.status in (401, 404):
                answer.raise_for_status()
            if answer.status == 200:
                return answer.status, await answer.json()
            return answer.status, {"error": (await answer.text()).strip()}

    async def put_bundle(self, digest: str, file: Path) -> int:
        return await self._put(self._url("bundles", digest), file)

    async def _put(self, url: URL, file: Path, opened: Callable[[BinaryIO], None] = lambda body: None) -> int:
        """Upload `file`; return the status, below 500. A refusal is an answer; a server error is RETRYABLE."""
        with file.open("rb") as body:
            opened(body)
            async with self._session.put(url, data=body) as answer:
                if answer.status >= 500:
                    answer.raise_for_status()
                return answer.status


def _hash_file(seen, path: Path) -> int:
    """Add a file to the hash; return its size."""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            seen.update(chunk)
        return file.tell()


def _hash_and_write(seen, file, chunk: bytes) -> None:
    seen.update(chunk)
    file.write(chunk)
