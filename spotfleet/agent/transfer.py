"""HTTPS to the dispatcher besides the WebSocket: launches, files, logs. Pins the fleet's CA; sends the host's token."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from spotfleet.agent import disk
from spotfleet.agent.boot import Boot
from spotfleet.agent.whereabouts import Whereabouts
from spotfleet.certs import client_context
from spotfleet.errors import SpotfleetError
from spotfleet.messages import Checkpoint, Launch, load

log = logging.getLogger("spotfleet.agent")

TROUBLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)  # the dispatcher is away, or says 5xx: try again
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
ASKED_AT_ONCE = 5000  # digests; a request may have 4 MiB
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)

T = TypeVar("T")


def open_session(boot: Boot, address: str, *, keep: bool = True) -> aiohttp.ClientSession:
    """A session that trusts only the fleet's CA and, if `address` is given, speaks from it. Without `keep` it uses no
    connection twice: one that stands on an address that this host has no more looks like any other.

    Names are not checked: a dispatcher is known by its certificate, not by an address that changes.
    """
    connector = aiohttp.TCPConnector(ssl=client_context(boot.ca), local_addr=(address, 0) if address else None,
                                     force_close=not keep, socket_factory=_dialled)
    return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT,
                                 headers={"Authorization": f"Bearer {boot.token}"})


def _dialled(place: Any) -> socket.socket:
    """A socket whose connection ends soon after its peer, or this host's address, has gone while nothing is under way.
    No more than that: a dispatcher whose disk is slow may let an upload wait."""
    family, kind, protocol, *_ = place
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


async def patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` until the dispatcher has answered; ends only by success, by another error or by cancelling."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        try:
            return await call()
        except TROUBLE as error:
            if backoff_s == FIRST_BACKOFF_S:
                log.warning("%s: %s; trying again", what, error or type(error).__name__)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)


class Transfers:
    """The dispatcher's files, as far as a host may touch them. Raises TROUBLE when they cannot be reached."""

    def __init__(self, session: aiohttp.ClientSession, where: Whereabouts) -> None:
        self._session = session
        self._where = where

    async def renew(self, session: aiohttp.ClientSession) -> None:
        """Speak by `session` from now on. What is under way fails, and whoever wants it tries again: on an address
        that this host has no more it would wait for long."""
        old, self._session = self._session, session
        await old.close()

    async def close(self) -> None:
        await self._session.close()

    @property
    def dispatcher(self) -> int:
        """Changes whenever the dispatcher may have become another, or may have lost what it held."""
        return self._where.answers

    def _url(self, *parts: str, **query: str | int) -> URL:
        path = "/".join(quote(p, safe="") for p in parts)  # worker names hold slashes
        tail = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in query.items())
        return URL(f"{self._where.url}/v1/{path}" + (f"?{tail}" if tail else ""), encoded=True)

    async def launch(self, job: str) -> Launch:
        async with self._session.get(self._url("jobs", job, "launch")) as answer:
            answer.raise_for_status()
            return load(Launch, await answer.read())

    async def bundle(self, digest: str, target: Path, came: Callable[[int], None]) -> None:
        """One blob of a working directory."""
        await self._download(self._url("bundles", digest), target, digest, came)

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Those of `digests` that the dispatcher lacks."""
        found: list[str] = []
        for start in range(0, len(digests), ASKED_AT_ONCE):
            asked = {"digests": list(digests[start:start + ASKED_AT_ONCE])}
            async with self._session.post(self._url("bundles", "missing"), json=asked) as answer:
                answer.raise_for_status()
                found += [str(digest) for digest in (await answer.json())["missing"]]
        return found

    async def checkpoint(self, job: str, version: int, digest: str, target: Path, came: Callable[[int], None]) -> None:
        await self._download(self._url("jobs", job, "checkpoints", str(version)), target, digest, came)

    async def _download(self, url: URL, target: Path, digest: str,
                        came: Callable[[int], None] = lambda size: None) -> None:
        """Fetch into `target`, which appears only whole and verified; `came` hears of the size of each piece.
        SpotfleetError if the digest differs, DiskFull if it finds no room."""
        partial = target.with_name(target.name + ".part")
        seen = hashlib.sha256()
        async with self._session.get(url) as answer:
            answer.raise_for_status()
            try:
                with partial.open("wb") as file:
                    async for chunk in answer.content.iter_chunked(1 << 20):
                        await asyncio.to_thread(_hash_and_write, seen, file, chunk)
                        came(len(chunk))
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise disk.told(error, target.parent) from error
        if seen.hexdigest() != digest:
            partial.unlink()
            raise SpotfleetError(f"{url.path} has digest {seen.hexdigest()[:12]}, expected {digest[:12]}",
                                 hint="the file on the dispatcher is damaged")
        os.replace(partial, target)

    async def append_log(self, job: str, worker: str, offset: int, data: bytes) -> int:
        """Offer `data` as what follows byte `offset`; returns how many bytes the dispatcher holds now."""
        async with self._session.post(self._url("jobs", job, "logs", worker, offset=offset), data=data) as answer:
            if answer.status != 409:
                answer.raise_for_status()
            size = (await answer.json())["size"]
            if not isinstance(size, int) or size < 0:
                raise aiohttp.ClientPayloadError(f"log offset: expected a size, got {size!r}")
            return size

    async def put_checkpoint(self, job: str, made: Checkpoint, file: Path) -> int:
        """`made` is the whole, or one part."""
        part = {"part": made.part, "parts": made.parts} if made.parts > 1 else {}
        url = self._url("jobs", job, "checkpoints", str(made.version), generation=made.generation, digest=made.digest,
                        **part)
        return await self._put(url, file)

    async def post_output(self, job: str, worker: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer. A dispatcher that does not know us or the job yet is TROUBLE: it has only just taken
        over."""
        async with self._session.post(self._url("jobs", job, "outputs", worker), data=body) as answer:
            if answer.status >= 500 or answer.status in (401, 404):
                answer.raise_for_status()
            said = await answer.json(content_type=None)
            return answer.status, said if isinstance(said, dict) else {}

    async def put_bundle(self, digest: str, file: Path) -> int:
        return await self._put(self._url("bundles", digest), file)

    async def _put(self, url: URL, file: Path) -> int:
        """The status, below 500: a refusal is an answer; a server error is TROUBLE."""
        with file.open("rb") as body:
            async with self._session.put(url, data=body) as answer:
                if answer.status >= 500:
                    answer.raise_for_status()
                return answer.status


def _hash_and_write(seen, file, chunk: bytes) -> None:
    seen.update(chunk)
    file.write(chunk)
