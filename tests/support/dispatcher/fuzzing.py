"""A fleet in a thread of its own, so that hypothesis can throw requests at it; and what it throws."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st
from yarl import URL

from spotfleet.codec import to_json
from spotfleet.dispatcher.http.app import ROUTES, Route
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.fleet.domain.events import event_to_json
from spotfleet.model import Notice
from spotfleet.protocol.messages import AgentReport, WorkerReport, WorkerState
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import ADMIN, LIMIT_S, Stage, spec
from tests.support.dispatcher.fake_workers import Script

MEANT = ("NodesChanged", "LaunchIntended", "HostDraining", "HostNoticed", "TerminateIntended", "TokenRevoked",
         "JobSubmitted", "CheckpointKept", "FleetDown")  # the events that somebody wanted


class Target:
    """One fleet of two hosts; a job with a secret trains on the first."""

    def __init__(self, home: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.stage = self.do(self._enter(home))
        self.tls = certs.client_context(self.stage.ca)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * LIMIT_S)

    async def _enter(self, home: Path) -> Stage:
        stage = Stage(home, spec(2))
        await stage.__aenter__()
        stage.world.scripts = defaultdict(lambda: Script(steps=1_000_000))
        hosts = await stage.up(2)
        self.job = await stage.submit(Script(steps=1_000_000), (1, 1), secrets={"KEY": "hidden-value"})
        self.host = (await stage.at_version(self.job, 3)).workers[0].host
        self.other = next(h for h in hosts if h != self.host)
        self.worker = (await stage.job(self.job)).workers[0].worker
        return stage

    @property
    def names(self) -> dict[str, list[str]]:
        """What is real here, for each kind of place in a path."""
        return {"host": [self.host, self.other], "job": [self.job, self.job, "t-2"], "sha256": ["0" * 64],
                "version": ["5", "900"], "name": [".metadata", "__R_0.distcp"], "driver": ["d1"],
                "worker": [quote(self.worker, safe=""), self.worker, f"{self.other}%2F0%2F1"],
                "key": ["ledger.db", f"jobs/{self.job}/logs/rank-0.log", f"jobs/{self.job}/secrets.json"]}

    def close(self) -> None:
        self.do(self.stage.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()

    def ask(self, method: str, path: str, headers: dict[str, str], data: bytes) -> tuple[int, str, bytes]:
        """(status, content type, body). `path` goes out as it is."""

        async def go() -> tuple[int, str, bytes]:
            url = URL(self.stage.url + path, encoded=True)
            async with self.stage.http.request(method, url, data=data, headers=headers, allow_redirects=False,
                                               ssl=self.tls) as answer:
                return answer.status, answer.content_type, await answer.read()

        return self.do(go())

    def check_alive(self) -> None:
        """Its loops run, and the job makes progress."""
        daemon = self.stage.daemon
        assert [t.exception() for t in daemon._tasks if t.done() and t.exception()] == []
        version = self.do(self.stage.job(self.job)).version
        self.do(self.stage.at_version(self.job, version + 1))

    def digest(self) -> str:
        """Of everything a request could change, but not of what changes by itself, as on a machine under load."""
        return self.do(self._digest())

    async def _digest(self) -> str:
        dispatcher, home = self.stage.daemon.dispatcher, self.stage.home
        core = dispatcher.core
        await core.journal.flush()
        files = sorted((str(p.relative_to(home)), hashlib.sha256(p.read_bytes()).hexdigest() if p.name != "job.json"
                        else "") for p in home.rglob("*") if p.is_file() and not p.name.startswith(("ledger.db", ".")))
        events = [event_to_json(e) for _, e in core.journal.after(0)]
        held = [(j.id, j.state.ended, j.record.cancelled, j.record.hosts, sorted(j.secrets))
                for j in core.jobs.values()]
        parts = [files, [e for e in events if e["kind"] in MEANT], held, dispatcher.shutdown.why,
                 sorted(core.drains), sorted(core.connections)]
        return json.dumps(parts, indent=1, default=str)


NAMES = st.sampled_from([
    "..", "%2e%2e", "..%2f..%2fboot.json", "%2e%2e%2f%2e%2e%2fboot.json", "%00", "a%00b", "a" * 300, "%C3%A9", "%ff",
    "%", "%0d%0aX-A:%201", "-1", "0", "1", "1e400", "9" * 400, "%E0%A5%A7", "null", ".", "~", "f-d-0", "f-99", "rank-0",
    "0" * 64, "x/0/1", "x%2F0%2F1",
]) | st.text(max_size=12).map(lambda t: quote(t.encode("utf-8", "surrogatepass"), safe=""))
VALUES = st.sampled_from(["", "0", "-1", "1e400", "nan", "inf", "x", "1e17", "9" * 400, "%00", "0x10", "..%2F", "true"])
QUERY = st.dictionaries(st.sampled_from(["after", "offset", "rank", "worker", "generation", "digest", "version",
                                          "outputs", "check"]),
                        VALUES | NAMES | st.just("1") | st.just("0" * 64), max_size=4)
LEAVES = st.sampled_from([
    None, True, False, -1, 0, 1, 3, 2**63, 10**400, -(10**400), 1e308, 0.5, float("nan"), float("inf"), "", "x",
    "\ud800", "\0", "a" * 10_000, "../../boot.json", "é💩", [], {}, [[[[[[]]]]]], {"a": {"b": {"c": {}}}},
    [1, "x", None],
]).map(copy.deepcopy)  # `mutated` changes what it gets
JSONS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                        max_size=3), max_leaves=8)
JOB = {"spec": {"name": "t", "argv": ["t.py"], "run": "", "setup": "", "bundle": "", "min_workers": 1, "max_workers": 1,
                "envs": {"A": "b"}, "down": False, "checkpoint": {"interval_s": 60.0, "keep": 2, "target": ""}},
       "secrets": {"S": "t"}, "wait": True}
SHAPES = {"/jobs": JOB, "/nodes": {"min": 1, "target": 2, "max": 2}, "/interrupt": {"notice_s": 100_000},
          "/revoke": {"why": "x"}, "/ranges": {"ranges": [["ledger.db", 0, 10]]}, "/fetched": {"at": 1.0},
          "/drivers": {"bundle": "", "start": {"command": "true", "envs": {"A": "b"}}}}
CHANCE = st.sampled_from([True] * 4 + [False])


@st.composite
def mutated(draw: st.DrawFn, shapes: st.SearchStrategy[Any]) -> Any:
    """A valid shape with up to two of its parts replaced, removed or added."""
    value = json.loads(json.dumps(draw(shapes)))
    for _ in range(draw(st.integers(0, 2))):
        place = value
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if not place:
            continue
        if draw(st.integers(0, 4)) == 0:
            del place[key]
        else:
            place[key] = draw(JSONS)
    return value


BODIES = st.one_of(
    mutated(st.sampled_from([*SHAPES.values()])).map(lambda v: json.dumps(v).encode()),
    JSONS.map(lambda v: json.dumps(v).encode()),
    st.binary(max_size=64),
    st.sampled_from([b"", b"{", b"[" * 100_000, b'{"a":' * 5_000, b"\xef\xbb\xbf{}", b"\x1f\x8b\x08\x00garbage",
                     b"1" * 5_000, b'{"spec": {"name": "t", "argv": ["t.py"]}}']))
HEADERS = st.fixed_dictionaries({"Content-Type": st.sampled_from(
    ["application/json"] * 8 + ["application/octet-stream", "text/html; charset=\"", "application/json; charset=x"])},
    optional={
        "Range": st.sampled_from(["bytes=0-", "bytes=99-1", "bytes=-9999999", "bytes=a", "x"]),
        "Content-Encoding": st.sampled_from(["gzip", "deflate", "br", "x"]),
        "If-Modified-Since": st.just("yesterday"),
        "X-Spotfleet": st.sampled_from(["", "0 0", "1", "999999 x", "a b c", "-1 1"]),
        "Accept-Encoding": st.sampled_from(["gzip", "*;q=x", ""]),
    })


WORKER = WorkerState(WorkerReport("HOST/0/1", "JOB", version=3), 0, 1)
REPORT = to_json(AgentReport("HOST", "i", "127.0.0.1", 1, (WORKER,), Notice(1e5, kind="rebalance")))
FRAMES = st.one_of(  # an agent's; the sender puts in the names of a host and a job
    mutated(st.just(REPORT)).map(json.dumps), JSONS.map(json.dumps),
    st.text(max_size=50).map(lambda t: t.encode("utf-8", "replace").decode()), st.binary(max_size=50),
    st.sampled_from(["[" * 100_000, "x" * 100_000, b"\x81\x00"]))
METHODS = st.sampled_from(["GET", "PUT", "POST", "HEAD", "DELETE", "PATCH", "OPTIONS"])
AIMED = [r for r in ROUTES if r.path != "/v1/down"]  # which would leave nothing to aim at


def aimed(route: Route, real: dict[str, list[str]]) -> tuple[str, str, bytes]:
    """(method, path, body) as they should be."""
    parts = [p if p == (name := p.strip("{}").partition(":")[0]) else real[name][0] for p in route.path.split("/")]
    path = "/".join(parts)
    shape = next((s for suffix, s in SHAPES.items() if path.endswith(suffix)), {})
    return route.method, path, json.dumps(shape).encode() if route.method in ("PUT", "POST", "PATCH") else b""


@st.composite
def requests(draw: st.DrawFn, real: dict[str, list[str]]) -> tuple[str, str, bytes]:
    """(method, path, body): mostly a route of ours, with `real` names in its places or nasty ones."""
    route = draw(st.sampled_from(AIMED))
    parts = []
    for part in route.path.split("/"):
        name = part.strip("{}").partition(":")[0]
        parts.append(part if name == part else draw(st.sampled_from(real[name]) if draw(CHANCE) else NAMES))
    path = "/".join(parts) if draw(CHANCE) else draw(NAMES.map("/v1/{}".format))
    query = draw(QUERY)
    method = route.method if draw(CHANCE) else draw(METHODS)
    shape = next((s for suffix, s in SHAPES.items() if path.endswith(suffix)), {})
    body = draw(mutated(st.just(shape)).map(lambda v: json.dumps(v).encode()) if draw(CHANCE) else BODIES)
    path += "?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else ""
    return method, path, body if method in ("PUT", "POST", "PATCH") else b""


def strangers(host: str, token: Callable[[str], str], admin: str = ADMIN) -> st.SearchStrategy[str]:
    """Authorization headers that are nobody's; `token` gives the one of a host."""
    foreign = host_token("secret-of-another-fleet", host)
    return st.sampled_from([
        "", "Bearer", "Bearer ", f"Basic {admin}", f"Bearer {admin}x", f"Bearer {admin[:-1]}",
        f"Bearer {admin.upper()}", f"Bearer {foreign}",
        f"Bearer {token('f-77')}", f"Bearer {host}", f"Bearer {host}.",
        f"Bearer .{foreign}", f"Bearer {'x' * 5000}", "Bearer \udcff\udcfe",
        f"Digest {token(host)}",
        f"Bearer {token(host)}0", f"Bearer {host}.{'0' * 64}", f"Bearer {admin}, {admin}",
    ])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


