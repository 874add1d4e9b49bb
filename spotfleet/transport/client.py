"""Synchronous client of the dispatcher's HTTP API; stdlib only, so that the CLI starts fast.

A restarting dispatcher is tolerated: each call is retried for `patience_s`, then raises DispatcherUnreachable.
Every call may be repeated safely, except a job submission, which is repeated only if it surely has not arrived.
Errors arrive as `{"error": ..., "hint": ..., "kind": "NoCapacity"}` and are raised again as that class.
A dispatcher of another protocol is refused with the fix, except for the calls of `down`: see `versions.py`.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from spotfleet import errors
from spotfleet.codec import from_json, to_json
from spotfleet.errors import DispatcherUnreachable, NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import JobSpec, Nodes, NotifySpec, PolicySpec, Role
from spotfleet.protocol import versions
from spotfleet.protocol.messages import EndedJob, FleetStatus, JobStatus, UnsentStatus
from spotfleet.protocol.ray_cluster import DriverStart, RayStatus
from spotfleet.storage.mirror import STREAMS, Piece
from spotfleet.transport.certs import client_context, validity

TIMEOUT_S = 30.0  # for one answer, in addition to the wait of a long poll
CONNECT_S = 5.0  # for the handshake
PAUSE_S = 0.3  # between two tries
CHUNK = 1 << 20
DIGESTS_PER_REQUEST = 5000  # a request may have 4 MiB
JOBS_PER_REQUEST = 200  # each removes files for some time
DOWNLOADS = 5  # starts of a transfer that breaks off, in all
NOT_RUNNING = "its machine answers, and no dispatcher runs there now"
RESTARTING = (502, 503)  # statuses of a dispatcher that is up but not ready
NO_ROUTE = (404, 405, 426)  # answers of a dispatcher of another release
NOT_THERE = (404, 416)
LINE_BYTES = 1 << 20  # longest line of a manifest
MOST_BYTES, ERROR_BYTES = 1 << 30, 1 << 16  # an answer's size; that of an error
WRONG_TIME = (9, 10)  # OpenSSL's codes for a certificate that is not valid yet, or has expired


@dataclass(frozen=True)
class Endpoint:
    """Address of a fleet's dispatcher, with the token and certificate that authenticate both sides."""

    url: str  # https://ADDRESS:PORT
    token: str = field(repr=False)
    ca: str = field(repr=False)  # PEM
    # Opens a stream to the dispatcher's port within so many seconds, by a tunnel; raises OSError. None: TCP to `url`.
    dial: Callable[[float], socket.socket] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class LogChunk:
    data: bytes
    offset: int  # where the next chunk begins
    end: bool  # the worker has ended and everything was read


@dataclass(frozen=True)
class Ending:
    """Progress of a fleet's `down`."""

    down: bool  # no worker host is left
    why: str
    left: dict[str, str]  # worker host -> state
    unsent: tuple[UnsentStatus, ...] = ()  # results that they hold; none from an older dispatcher


@dataclass
class _Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class DispatcherClient:
    """Client of one dispatcher. Each call opens a connection of its own."""

    streams = STREAMS  # connections of one transfer

    def __init__(self, endpoint: Endpoint, *, patience_s: float = 30.0, any_version: bool = False) -> None:
        """`any_version`: accept also a dispatcher of another protocol, which only `down` may."""
        self.endpoint = endpoint
        self.patience_s = patience_s
        self.ahead_s = 0.0  # our clock minus the dispatcher's, by its last answer
        self._any_version = any_version
        parts = urlsplit(endpoint.url)
        if parts.scheme != "https" or not parts.hostname:
            raise UsageError(f"{endpoint.url} is not https://ADDRESS:PORT")
        self._host, self._port = parts.hostname, parts.port or 443
        self._context = client_context(endpoint.ca)

    # --- the fleet

    def healthy(self) -> bool:
        """Return whether this fleet's dispatcher answers now; one try, without patience."""
        return not self.why_unreachable()

    def why_unreachable(self) -> str:
        """Explain why the dispatcher does not answer now; "" if it does."""
        try:
            reply = self._once("GET", "/healthz", None, {}, 5.0)
        except ssl.SSLError as error:
            return f"the server at {self.endpoint.url} is not this fleet's dispatcher ({error.reason or error})"
        except (OSError, http.client.HTTPException) as error:
            return f"nothing answers at {self.endpoint.url} ({str(error) or type(error).__name__})"
        if reply.status == 200:
            return ""
        return str(_object(reply.body).get("error") or f"{self.endpoint.url} answers {reply.status}")

    def status(self) -> FleetStatus:
        answer = self._json("GET", "/v1/status")
        with self._readable():
            return from_json(FleetStatus, answer)

    def events(self, after: int = 0, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return events with `seq` above `after`, each {"seq", "kind", "at", ...}; wait up to `wait_s` for one."""
        path = "/v1/events?" + urlencode({"after": after, "wait": f"{wait_s:g}"})
        return self._json("GET", path, wait_s=wait_s)["events"]

    def live(self, after: int | None, since: float) -> dict[str, Any]:
        """Return {now, status, events, last, series}: the status, events above `after` (None: the newest), and the
        jobs' series after `since`, Unix seconds."""
        query = {"since": since} if after is None else {"after": after, "since": since}
        reply = self._call("GET", f"/v1/live?{urlencode(query)}", accept=NO_ROUTE)
        if reply.status in NO_ROUTE:
            raise self._too_old("the page")
        with self._readable():
            answer = json.loads(reply.body)
            if missing := {"now", "status", "events", "last", "series"} - answer.keys():
                raise ValueError(f"{', '.join(sorted(missing))}: missing")
            return answer

    def metrics(self) -> str:
        """Return the metrics as OpenMetrics text."""
        reply = self._call("GET", "/metrics", accept=NO_ROUTE)
        if reply.status in NO_ROUTE:
            raise self._too_old("metrics")
        return reply.body.decode()

    @staticmethod
    def _too_old(what: str) -> SpotfleetError:
        return SpotfleetError(f"this fleet's dispatcher is of a release without {what}",
                              hint="`spotfleet status` works; a fleet that this release makes has it")

    def set_nodes(self, nodes: Nodes, group: str = "") -> None:
        self._json("PUT", f"/v1/nodes?group={group}" if group else "/v1/nodes", to_json(nodes))

    def set_policy(self, policy: PolicySpec) -> None:
        self._json("PUT", "/v1/policy", to_json(policy))

    def set_notify(self, notify: NotifySpec, webhook: str) -> None:
        """Replace the fleet's notifications. `webhook`: the URL, a secret."""
        body = json.dumps({"notify": to_json(notify), "webhook": webhook})
        if self._call("PUT", "/v1/notify", body=body, accept=NO_ROUTE).status in NO_ROUTE:
            raise self._too_old("`notify`")

    def drain(self, host: str) -> None:
        self._json("POST", f"/v1/hosts/{quote(host, safe='')}/drain", {})

    def interrupt(self, host: str, notice_s: float | None) -> None:
        self._json("POST", f"/v1/hosts/{quote(host, safe='')}/interrupt", {"notice_s": notice_s})

    def revoke(self, host: str, why: str = "") -> None:
        """Revoke the token of `host`; it is in force once this returns."""
        self._json("POST", f"/v1/hosts/{quote(host, safe='')}/revoke", {"why": why})

    def down(self, *, discard: bool = False) -> None:
        """Begin the end of the fleet. `discard`: hosts end although they hold results that do not arrive."""
        self._json("POST", "/v1/down", {"discard": discard})

    def ending(self) -> Ending:
        """Return the progress of `down`, for any dispatcher: read without the messages of this version."""
        answer = self._json("GET", "/v1/status")
        with self._readable():
            hosts = [h for h in answer.get("hosts", []) if h.get("role") == Role.WORKER.value]
            return Ending(answer.get("state") == "down", str(answer.get("why", "")),
                          {str(h.get("host")): str(h.get("state")) for h in hosts},
                          from_json(tuple[UnsentStatus, ...], answer.get("unsent", ())))

    def archive(self, out: BinaryIO) -> None:
        """Write the archive of the fleet to `out`; a broken transfer starts again from its beginning."""
        self._download("/v1/archive", out)

    def archive_manifest(self, *, outputs: str = "", check: bool = False,
                         bring: bool = False) -> Iterator[bytes] | None:
        """Return the lines of the archive's manifest (`protocol/archive.py`), with `outputs` of one job's outputs; None
        if this dispatcher has none: it is of another release, or does not know the job. With `check` it reads also the
        checkpoints that it has verified before; with `bring` it lists its own files of those at a mounted target."""
        asked = {"outputs": outputs, "check": check and "1", "bring": bring and "1"}
        query = urlencode({name: value for name, value in asked.items() if value})
        reply, connection = self._begin(f"/v1/archive/manifest?{query}", accept=NO_ROUTE)
        if reply.status in NO_ROUTE:
            connection.close()
            return None
        return self._lines(reply, connection)

    def archive_pieces(self, pieces: Sequence[Piece], *, outputs: str = "", packed: bool = False) -> bytes:
        """Return the bytes of all pieces, one after the other; with `packed` the dispatcher may deflate them on the
        way. `outputs`: as in the manifest. Raises FileNotFoundError where it does not have them."""
        headers = {"Accept-Encoding": "deflate" if packed else "identity"}
        query = f"?{urlencode({'outputs': outputs})}" if outputs else ""
        size = sum(piece.end - piece.start for piece in pieces)
        most = size + ERROR_BYTES
        if len(pieces) == 1 and pieces[0].end > pieces[0].start:
            (piece,) = pieces
            reply = self._call("GET", f"/v1/archive/files/{quote(piece.key, safe='/')}{query}", accept=NOT_THERE,
                               most=most, headers={**headers, "Range": f"bytes={piece.start}-{piece.end - 1}"})
        else:
            ranges = [[piece.key, piece.start, piece.end] for piece in pieces]
            reply = self._call("POST", f"/v1/archive/ranges{query}", body=json.dumps({"ranges": ranges}),
                               accept=NOT_THERE, headers=headers, most=most)
        if reply.status in NOT_THERE:
            raise FileNotFoundError(str(_object(reply.body).get("error") or pieces[0].key))
        if reply.headers.get("Content-Encoding") != "deflate":
            return reply.body
        with self._readable():
            return zlib.decompressobj().decompress(reply.body, size + 1)

    # --- jobs

    def has_bundle(self, sha256: str) -> bool:
        return self._call("HEAD", f"/v1/bundles/{sha256}", accept=(404,)).status == 200

    def put_bundle(self, sha256: str, path: Path) -> None:
        self._call("PUT", f"/v1/bundles/{sha256}", body=path)

    def put_blob(self, sha256: str, data: bytes) -> None:
        self._call("PUT", f"/v1/bundles/{sha256}", body=data)

    def missing_blobs(self, digests: Sequence[str]) -> set[str]:
        """Return the `digests` without a stored blob."""
        found: set[str] = set()
        for start in range(0, len(digests), DIGESTS_PER_REQUEST):
            body = {"digests": list(digests[start:start + DIGESTS_PER_REQUEST])}
            found.update(self._json("POST", "/v1/bundles/missing", body)["missing"])
        return found

    def persistent(self) -> PersistentClient:
        """Return a copy of this client with a persistent connection, for one thread that sends much."""
        return PersistentClient(self.endpoint, patience_s=self.patience_s, any_version=self._any_version)

    def submit(self, spec: JobSpec, secrets: dict[str, str], *, wait: bool) -> str:
        """Submit a job and return its name.

        Without `wait`, a job that cannot start now raises NoCapacity, and no job exists.
        """
        body = {"spec": to_json(spec), "secrets": secrets, "wait": wait}
        return self._json("POST", "/v1/jobs", body, once=True)["job"]

    def jobs(self) -> list[JobStatus]:
        found = self._json("GET", "/v1/jobs")
        return [from_json(JobStatus, j) for j in (found["jobs"] if isinstance(found, dict) else found)]

    def ended_jobs(self, keep: int) -> Iterator[EndedJob]:
        """Yield the ended jobs with the sizes of their files, oldest first, without the newest `keep`."""
        after, more = "", True
        while more:
            found = self._json("GET", f"/v1/ended?{urlencode({'keep': keep, 'after': after})}")
            rows, more = [from_json(EndedJob, row) for row in found["jobs"]], found["more"]
            yield from rows
            after = rows[-1].job if rows else after

    def prune(self, jobs: Sequence[str]) -> list[str]:
        """Remove the files of these ended jobs; return the jobs whose files were removed."""
        pruned: list[str] = []
        for start in range(0, len(jobs), JOBS_PER_REQUEST):
            pruned += self._json("POST", "/v1/prune", {"jobs": list(jobs[start:start + JOBS_PER_REQUEST])})["pruned"]
        return pruned

    def job(self, job: str) -> JobStatus:
        return from_json(JobStatus, self._json("GET", f"/v1/jobs/{quote(job, safe='')}"))

    def cancel(self, job: str) -> None:
        self._json("POST", f"/v1/jobs/{quote(job, safe='')}/cancel", {})

    def outputs(self, job: str, out: BinaryIO) -> None:
        """Write the collected output of `job` to `out`, as .tar.gz."""
        self._download(f"/v1/jobs/{quote(job, safe='')}/outputs", out)

    def outputs_fetched(self, job: str, at: float) -> None:
        """Record that all outputs of the manifest made at `at`, by the dispatcher's time, have been copied."""
        self._json("POST", f"/v1/jobs/{quote(job, safe='')}/fetched", {"at": at})

    def log_workers(self, job: str) -> list[str]:
        """List the workers of `job` that have a log, oldest first."""
        return self._json("GET", f"/v1/jobs/{quote(job, safe='')}/workers")["workers"]

    def logs(self, job: str, offset: int = 0, *, rank: int = 0, worker: str = "", wait_s: float = 0.0) -> LogChunk:
        who = {"worker": worker} if worker else {"rank": rank}
        query = urlencode({**who, "offset": offset, "wait": f"{wait_s:g}"})
        reply = self._call("GET", f"/v1/jobs/{quote(job, safe='')}/logs?{query}", wait_s=wait_s)
        after = int(reply.headers.get("X-Offset") or offset + len(reply.body))
        return LogChunk(reply.body, after, reply.headers.get("X-End") == "1")

    def ray(self) -> RayStatus:
        """Return the status of the fleet's Ray cluster."""
        reply = self._call("GET", "/v1/ray", accept=NO_ROUTE)
        if reply.status in NO_ROUTE:
            raise self._too_old("Ray clusters")
        with self._readable():
            return from_json(RayStatus, json.loads(reply.body))

    def start_driver(self, bundle: str, start: DriverStart) -> str:
        """Start a script beside the head of the Ray cluster; return its name."""
        return self._json("POST", "/v1/ray/drivers", {"bundle": bundle, "start": to_json(start)}, once=True)["driver"]

    def driver_logs(self, driver: str, offset: int, *, wait_s: float) -> LogChunk:
        query = urlencode({"offset": offset, "wait": f"{wait_s:g}"})
        reply = self._call("GET", f"/v1/ray/drivers/{quote(driver, safe='')}/logs?{query}", wait_s=wait_s)
        after = int(reply.headers.get("X-Offset") or offset + len(reply.body))
        return LogChunk(reply.body, after, reply.headers.get("X-End") == "1")

    def stop_driver(self, driver: str) -> None:
        self._json("POST", f"/v1/ray/drivers/{quote(driver, safe='')}/stop", {})

    def log_start(self, job: str, *, rank: int = 0, worker: str = "", tail: int | None = None, since_s: float = 0.0,
                  ) -> int:
        """Return the offset at which the last `tail` lines, and not before those of the last `since_s` seconds, begin.

        A dispatcher of an earlier release cannot tell: then the lines are counted here, and the time does not count."""
        query: dict[str, str | int] = {"worker": worker} if worker else {"rank": rank}
        query |= {} if tail is None else {"tail": tail}
        query |= {"since": f"{since_s:g}"} if since_s else {}
        reply = self._call("GET", f"/v1/jobs/{quote(job, safe='')}/logs/start?{urlencode(query)}", accept=NO_ROUTE)
        if reply.status not in NO_ROUTE:
            return int(_object(reply.body).get("offset") or 0)
        return 0 if tail is None else self._start_of_last(job, tail, rank, worker)

    def _start_of_last(self, job: str, lines: int, rank: int, worker: str) -> int:
        """Read the whole log and return the offset of its last lines."""
        starts, end = deque([0], maxlen=lines + 1), 0
        for chunk in self.stream(job, rank=rank, worker=worker, follow=False):
            end = chunk.offset
            begin = end - len(chunk.data)
            starts.extend(begin + found.end() for found in re.finditer(rb"\n", chunk.data))
        whole = [start for start in starts if start < end]  # nothing follows the last line's own end
        return whole[-lines:][0] if lines and whole else end

    def stream(self, job: str, offset: int = 0, *, rank: int = 0, worker: str = "", follow: bool = True,
               ) -> Iterator[LogChunk]:
        """Yield chunks as they come, until the end of the job; without `follow`, only the current content."""
        while True:
            chunk = self.logs(job, offset, rank=rank, worker=worker, wait_s=10.0 if follow else 0.0)
            if chunk.data:
                yield chunk
            if chunk.end or not (follow or chunk.data):
                return
            offset = chunk.offset

    # --- the wire

    def _json(self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, once: bool = False) -> Any:
        data = None if body is None else json.dumps(body)
        reply = self._call(method, path, body=data, wait_s=wait_s, once=once)
        with self._readable():
            return json.loads(reply.body) if reply.body.strip() else {}

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors about the content of an answer into SpotfleetError."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise SpotfleetError(f"the dispatcher at {self.endpoint.url} sends an answer that cannot be read: {error}",
                                 hint="try again; `spotfleet down --discard` ends the fleet in any case") from None

    def _call(self, method: str, path: str, *, body: str | bytes | Path | None = None, wait_s: float = 0.0,
              once: bool = False, accept: tuple[int, ...] = (), headers: dict[str, str] | None = None,
              most: int = MOST_BYTES) -> _Reply:
        """Try until an answer arrives or patience ends; raise the answer's error unless its status is in `accept`.
        `most`: the bytes that an answer may have, which is read into memory."""
        deadline = time.monotonic() + self.patience_s
        while True:
            problem, arrived = "", False
            try:
                reply = self._once(method, path, body, headers or {}, TIMEOUT_S + wait_s, most)
                if reply.status not in RESTARTING or "error" in _object(reply.body):
                    self._learn(reply)
                    if reply.status >= 400 and reply.status not in accept:
                        raise _error(reply)
                    return reply
                problem = f"it answers {reply.status}"
            except ssl.SSLCertVerificationError as error:
                raise self._distrust(error) from None
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
                arrived = not isinstance(error, ConnectionRefusedError)
                if not arrived:
                    problem = f"{problem}: {NOT_RUNNING}"
            if (once and arrived) or time.monotonic() >= deadline:
                raise self._unreachable(problem, maybe_done=once and arrived)
            time.sleep(PAUSE_S)

    def _learn(self, reply: _Reply) -> None:
        """Record the dispatcher's clock; raise NeedsPerson if its version is incompatible."""
        if date := reply.headers.get("Date"):
            self.ahead_s = time.time() - parsedate_to_datetime(date).timestamp()
        remote = versions.parse_version(reply.headers.get(versions.HEADER, ""))
        if remote and not self._any_version and (found := versions.compare(versions.own_version(), remote)):
            raise NeedsPerson(found.why, hint=found.hint)

    def _distrust(self, error: ssl.SSLCertVerificationError) -> SpotfleetError:
        if error.verify_code not in WRONG_TIME:
            return DispatcherUnreachable(
                f"the server at {self.endpoint.url} is not this fleet's dispatcher ({error.verify_message})",
                hint="the machine may be gone and its address reused; see `spotfleet status`")
        now, (begin, end) = time.time(), validity(self.endpoint.ca)
        off, side = (begin - now, "before") if now < begin else (now - end, "after")
        return NeedsPerson(
            f"this machine's clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC, {off / 86400:.0f} days "
            f"{side} the time of the fleet's certificate",
            hint="set the clock, for instance with `sudo timedatectl set-ntp true`, and try again; the fleet goes on")

    def _once(self, method: str, path: str, body: str | bytes | Path | None, headers: dict[str, str],
              timeout_s: float, most: int = MOST_BYTES) -> _Reply:
        connection = self._connection(timeout_s)
        try:
            reply = self._request(connection, method, path, body, headers)
            return _Reply(reply.status, reply.headers, _body(reply, most))
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPSConnection:
        """Open a connection. Connecting has a short timeout, an answer a long one."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=self._context)
        if self.endpoint.dial is None:
            connection.connect()
        else:
            raw = self.endpoint.dial(CONNECT_S)
            try:
                raw.settimeout(CONNECT_S)
                connection.sock = self._context.wrap_socket(raw, server_hostname=self._host)
            except BaseException:
                raw.close()
                raise
        connection.sock.settimeout(timeout_s)
        return connection

    def _request(self, connection: http.client.HTTPSConnection, method: str, path: str, body: str | bytes | Path | None,
                 headers: dict[str, str]) -> http.client.HTTPResponse:
        version = str(versions.own_version())
        headers = {"Authorization": f"Bearer {self.endpoint.token}", versions.HEADER: version, **headers}
        if isinstance(body, Path):
            with body.open("rb") as file:
                headers["Content-Length"] = str(body.stat().st_size)
                with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent: read the reason
                    connection.request(method, path, file, headers)
        else:
            if isinstance(body, str):
                headers["Content-Type"], body = "application/json", body.encode()
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body, headers)
        return connection.getresponse()

    def _begin(self, path: str, accept: tuple[int, ...],
               ) -> tuple[http.client.HTTPResponse, http.client.HTTPSConnection]:
        """Send a GET whose answer the caller reads; try until one begins or patience ends."""
        deadline = time.monotonic() + self.patience_s
        while True:
            connection = None
            try:
                connection = self._connection(TIMEOUT_S)
                reply = self._request(connection, "GET", path, None, {})
                if reply.status < 400 or reply.status in accept:
                    return reply, connection
                answer = _Reply(reply.status, reply.headers, _body(reply, MOST_BYTES))
                if reply.status not in RESTARTING or "error" in _object(answer.body):
                    raise _error(answer)
                problem = f"it answers {reply.status}"
            except ssl.SSLCertVerificationError as error:
                raise self._distrust(error) from None
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            if connection is not None:
                connection.close()
            if time.monotonic() >= deadline:
                raise self._unreachable(problem, maybe_done=False)
            time.sleep(PAUSE_S)

    def _lines(self, reply: http.client.HTTPResponse, connection: http.client.HTTPSConnection) -> Iterator[bytes]:
        try:
            while text := reply.readline(LINE_BYTES):
                yield text
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(str(error) or type(error).__name__, maybe_done=False) from None
        finally:
            connection.close()

    def _download(self, path: str, out: BinaryIO) -> None:
        deadline, begun = time.monotonic() + self.patience_s, 0
        while True:
            _emptied(out)
            connection = None
            try:
                connection = self._connection(TIMEOUT_S)
                reply = self._request(connection, "GET", path, None, {})
                if reply.status >= 400:
                    raise _error(_Reply(reply.status, reply.headers, _body(reply, MOST_BYTES)))
                begun += 1
                while chunk := reply.read(CHUNK):
                    _write(out, chunk)
                    deadline = time.monotonic() + self.patience_s  # each chunk proves that it is alive
                if reply.length:
                    raise http.client.IncompleteRead(b"", reply.length)
                return
            except ssl.SSLCertVerificationError as error:
                raise self._distrust(error) from None
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= deadline or begun >= DOWNLOADS:
                    raise self._unreachable(str(error) or type(error).__name__, maybe_done=False) from None
                time.sleep(PAUSE_S)
            finally:
                if connection is not None:
                    connection.close()

    def _unreachable(self, problem: str, *, maybe_done: bool) -> DispatcherUnreachable:
        hint = "see `spotfleet jobs`: the job may have been accepted" if maybe_done else \
            "is this machine online? A dispatcher is restarted by itself, and training goes on without it; " \
            "try again, or end the fleet with `spotfleet down`"
        if NOT_RUNNING in problem and not maybe_done:
            hint += "; if this lasts, the last lines of console.log in its home say why it does not start"
        return DispatcherUnreachable(f"no answer from the dispatcher at {self.endpoint.url}: {problem}", hint=hint)


class PersistentClient(DispatcherClient):
    """Client that keeps its connection open between calls; for one thread. The owner must close it."""

    _open: http.client.HTTPSConnection | None = None
    _aborted = False

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def abort(self) -> None:
        """Abort the transfer that another thread is sending, at once and permanently."""
        self._aborted = True
        with suppress(AttributeError, OSError):  # not open, or closed meanwhile
            self._open.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def _once(self, method: str, path: str, body: str | bytes | Path | None, headers: dict[str, str],
              timeout_s: float, most: int = MOST_BYTES) -> _Reply:
        if self._aborted:
            raise DispatcherUnreachable("the transfer was given up")
        if self._open is None:
            self._open = self._connection(timeout_s)
        try:
            reply = self._request(self._open, method, path, body, headers)
            answer = _Reply(reply.status, reply.headers, _body(reply, most))
        except BaseException:
            self.close()
            raise
        if reply.will_close or reply.status >= 400:  # refused before all of it was sent: the rest would be misread
            self.close()
        return answer


def _body(reply: http.client.HTTPResponse, most: int) -> bytes:
    """Read an answer of at most so many bytes: a longer one must not fill this machine's memory."""
    data = reply.read(most + 1)
    if len(data) > most:
        raise SpotfleetError(f"the dispatcher sends an answer of more than {most} bytes",
                             hint="is that machine in other hands? `spotfleet down --discard` ends the fleet")
    if reply.length:
        raise http.client.IncompleteRead(data, reply.length)
    return data


def _emptied(out: BinaryIO) -> None:
    out.seek(0)
    out.truncate()


def _write(out: BinaryIO, data: bytes) -> None:
    """Write to our own disk; its failure is an error of this machine, so a retry would not help."""
    try:
        out.write(data)
    except OSError as error:
        raise SpotfleetError(f"what the dispatcher sends cannot be written here: {error.strerror or error}",
                             hint="make room on this machine's disk and try again") from None


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _error(reply: _Reply) -> SpotfleetError:
    answer = _object(reply.body)
    message = str(answer.get("error") or f"the dispatcher answered {reply.status}")
    kind = getattr(errors, str(answer.get("kind", "")), None)
    if not (isinstance(kind, type) and issubclass(kind, SpotfleetError)):
        kind = SpotfleetError
    return kind(message, hint=str(answer.get("hint", "")))
