"""A cloud in this process whose dispatchers answer the HTTP API over TLS, launch hosts by the real reconciler into
the emulated market, and run a job's script as one process here. Agents, membership and torch are left out."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from spotfleet import bundle, errors
from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk.jobfile import name_for
from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.events import JobChanged, JobSubmitted, NodesChanged, event_to_json
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import CloudState, FleetSpec, HostState, JobSpec, JobState, Nodes, PolicySpec, Role
from spotfleet.protocol.messages import NOT_COLLECTED, FleetStatus, HostStatus, JobStatus
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.transport.certs import server_context


class FakeCloud(InProcessProvider):
    """Give it to `providers.load`. `dispatchers` are those that run, by request_id."""

    def __init__(self, disk: Path) -> None:
        super().__init__(clock=time.time)
        self.disk = disk
        self.dispatchers: dict[str, FakeDispatcher] = {}
        self.broken = ""  # NeedsPerson from check() with this text
        self._lock = threading.RLock()

    def check(self) -> None:
        if self.broken:
            raise errors.NeedsPerson(self.broken, hint="ask your administrator")

    def _call(self, method, act):
        with self._lock:
            return super()._call(method, act)

    def launch(self, request: LaunchRequest) -> None:
        with self._lock:
            super().launch(request)
            if request.role is Role.DISPATCHER and request.request_id not in self.dispatchers:
                boot = json.loads(request.boot.files["boot.json"])
                dispatcher = FakeDispatcher(boot, self, self.disk / request.request_id)
                self.dispatchers[request.request_id] = dispatcher
                self.market.place(request.request_id, "127.0.0.1", dispatcher.port)

    def terminate(self, request_id: str) -> None:
        super().terminate(request_id)
        if dispatcher := self.dispatchers.pop(request_id, None):
            dispatcher.close()

    def close(self) -> None:
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.close()


@dataclass
class FakeJob:
    job: str
    spec: JobSpec
    secrets: dict[str, str]
    state: JobState = JobState.RUNNING
    why: str = "training"
    error: str = ""
    log: bytes = b""
    process: subprocess.Popen | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def status(self) -> JobStatus:
        return JobStatus(self.job, self.spec.name, self.state.value, self.why, error=self.error, version=7,
                         min_workers=self.spec.min_workers, max_workers=self.spec.max_workers)


class FakeDispatcher:
    def __init__(self, boot: dict, cloud: FakeCloud, home: Path) -> None:
        self.boot, self.cloud, self.home = boot, cloud, home
        home.mkdir(parents=True)
        self.spec = from_json(FleetSpec, boot["spec"])
        self.nodes, self.policy = self.spec.nodes, self.spec.policy
        self.ledger = Ledger(home / "ledger.db")
        self.jobs: dict[str, FakeJob] = {}
        self.uploads = 0
        self.revoked: dict[str, str] = {}  # host -> why
        self.going_down = ""
        self.notify: dict = {}  # as a later `up` has set it
        self.waits = ""
        self.lock = threading.RLock()
        self.alive = threading.Event()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        owner = self

        class Handler(FakeHandler):
            dispatcher = owner

        for name in ("cert", "key"):
            (self.home / name).write_text(self.boot[name])
        self.server = FakeServer(("127.0.0.1", self.port), Handler)
        context: ssl.SSLContext = server_context(self.home / "cert", self.home / "key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.alive.set()

    def stop(self) -> None:
        """The process dies; the machine stays."""
        if self.alive.is_set():
            self.alive.clear()
            self.server.shutdown()
            self.server.server_close()

    def close(self) -> None:
        self.stop()
        for job in self.jobs.values():
            if job.process and job.process.poll() is None:
                job.process.kill()
            job.done.wait(10)

    def tick(self) -> None:
        fleet = self.boot["fleet"]
        reconcile.create(self.ledger, self.cloud, fleet, self.nodes, time.time())
        wanted = reconcile.Wanted(fleet, Role.WORKER, 0 if self.going_down else self.nodes.target, self.spec.any_of)
        joined = {h.request_id: "1" for h in self.cloud.hosts(fleet) if h.state is CloudState.RUNNING}
        released = frozenset(h.request_id for h in self.ledger.state().hosts)
        actions = reconcile.tick(wanted, self.ledger, self.cloud, lambda *_: Boot("none"),
                                 reconcile.Observed(joined=joined, released=released), time.time())
        self.waits = "; ".join(a.why for a in actions if isinstance(a, reconcile.Wait))

    def status(self) -> FleetStatus:
        self.tick()
        hosts = self.ledger.state().hosts
        state = "up" if not self.going_down else "going down" if hosts else "down"
        shown = tuple(HostStatus(h.request_id, h.role.value, h.state.value, h.offer.pool, h.offer.slots,
                                 h.offer.price_micros_h, h.offer.on_demand_micros_h, h.address) for h in hosts)
        mine = next(h for h in self.cloud.hosts(self.boot["fleet"]) if h.request_id == self.boot["host"])
        me = HostStatus(mine.request_id, Role.DISPATCHER.value, HostState.UP.value, mine.offer.pool, 0,
                        mine.offer.price_micros_h, mine.offer.on_demand_micros_h, mine.address)
        shown = (me, *shown)
        return FleetStatus(self.boot["fleet"], state, self.going_down or self.waits, self.nodes.min, self.nodes.target,
                           self.nodes.max, shown, tuple(j.status() for j in self.jobs.values()),
                           sum(h.price_micros_h for h in shown))

    def submit(self, spec: JobSpec, secrets: dict[str, str], wait: bool) -> str:
        up = sum(h.state is HostState.UP for h in self.ledger.state().hosts)
        if up < spec.min_workers and not wait:
            raise NoCapacity(f"the job needs {spec.min_workers} workers and {up} are up", hint="add --wait")
        job = FakeJob(name_for(spec, self.jobs, 0, self.boot["fleet"]), spec, secrets)
        self.jobs[job.job] = job
        self.ledger.append(JobSubmitted(time.time(), job.job, spec.name, " ".join(spec.argv), spec.min_workers,
                                        spec.max_workers, job_kind=spec.kind_of))
        threading.Thread(target=self._train, args=(job,), daemon=True).start()
        return job.job

    def _train(self, job: FakeJob) -> None:
        try:
            self._run(job)
        except BaseException as error:
            job.state, job.why, job.error = JobState.FAILED, "this fake is broken", repr(error)
            raise
        finally:
            job.done.set()  # else whoever follows its log waits for ever

    def _run(self, job: FakeJob) -> None:
        with tempfile.TemporaryDirectory() as source:
            if job.spec.bundle:
                bundle.unpack(self.home / job.spec.bundle, lambda digest: self.home / digest, Path(source))
            command = [sys.executable, "-u", *job.spec.argv] if job.spec.argv else ["sh", "-c", job.spec.run]
            job.process = subprocess.Popen(command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                           env={**os.environ, **job.spec.envs, **job.secrets})
            assert job.process.stdout
            while data := job.process.stdout.read1():
                job.log += data
            code = job.process.wait()
        if job.state is not JobState.CANCELLED:
            job.state = JobState.FAILED if code else JobState.SUCCEEDED
            job.why = "the script failed on every worker" if code else "done"
            job.error = job.log.decode() if code else ""
        self.ledger.append(JobChanged(time.time(), job.job, job.state, job.why, 7))
        if job.spec.down:
            self.going_down = f"job {job.job} has ended"

    def write_archive(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger.copy_to(folder / "ledger.db")
        if lost := self.ledger.state().lost:
            (folder / NOT_COLLECTED).write_text(json.dumps({"lost": to_json(lost), "partial_files": []}))
        for job in self.jobs.values():
            logs = folder / "jobs" / job.job / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            (logs / "rank-0.log").write_bytes(job.log)

    def end_itself(self) -> None:
        """What an autostop does, with the laptop closed."""
        self.going_down = "idle (autostop)"
        while self.ledger.state().hosts:
            self.tick()
        self.write_archive(Path(self.boot["archive"]))
        self.cloud.terminate(self.boot["host"])


class FakeServer(ThreadingHTTPServer):
    def handle_error(self, request, client_address) -> None:
        """A client that hangs up or does not trust us is no news; anything else is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # no answer waits 40 ms for the other side's acknowledgement
    dispatcher: FakeDispatcher

    def log_message(self, *_args) -> None:
        pass

    def _serve(self) -> None:
        self.url = urlsplit(self.path)
        self.parts = self.url.path.strip("/").split("/")
        self.query = {k: v[0] for k, v in parse_qs(self.url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.parts == ["healthz"]:
                return self._answer({})
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given, self.dispatcher.boot["admin_token"]):
                return self._answer({"error": "the token is wrong"}, 401)
            with self.dispatcher.lock:
                self._route()
        except SpotfleetError as error:
            self._answer({"error": str(error), "hint": error.hint, "kind": type(error).__name__}, 409)

    do_GET = do_PUT = do_POST = do_HEAD = _serve

    def _route(self) -> None:
        d = self.dispatcher
        match [self.command, *self.parts[1:]]:
            case ["GET", "status"]:
                self._answer(to_json(d.status()))
            case ["GET", "events"]:
                found = d.ledger.events(int(self.query["after"]))
                self._answer({"events": [{"seq": s, **event_to_json(e)} for s, e in found]})
            case ["PUT", "policy"]:
                d.policy = from_json(PolicySpec, json.loads(self.body))
                self._answer({})
            case ["PUT", "notify"]:
                d.notify = json.loads(self.body)
                self._answer({})
            case ["PUT", "nodes"]:
                d.nodes = from_json(Nodes, json.loads(self.body))
                d.ledger.append(NodesChanged(time.time(), d.nodes, "asked"))
                self._answer({})
            case ["HEAD", "bundles", sha256]:
                self._answer({}, 200 if (d.home / sha256).exists() else 404)
            case ["POST", "bundles", "missing"]:
                self._answer({"missing": [n for n in json.loads(self.body)["digests"] if not (d.home / n).exists()]})
            case ["PUT", "bundles", sha256]:
                if hashlib.sha256(self.body).hexdigest() != sha256:  # the sender has hung up half way
                    return self._answer({"error": f"what came is not {sha256}"}, 400)
                (d.home / sha256).write_bytes(self.body)
                d.uploads += 1
                self._answer({})
            case ["POST", "hosts", host, "drain"]:
                self._answer({"drained": host})
            case ["POST", "hosts", host, "revoke"]:
                d.revoked[host] = json.loads(self.body)["why"]
                self._answer({})
            case ["POST", "hosts", host, "interrupt"]:
                d.cloud.interrupt(host, json.loads(self.body)["notice_s"])
                self._answer({})
            case ["POST", "down"]:
                d.going_down = d.going_down or "asked"
                self._answer({})
            case ["GET", "archive"]:
                self._archive()
            case [_, "jobs", *rest]:
                self._jobs(rest)
            case _:
                self._answer({"error": f"no route {self.command} {self.path}"}, 404)

    def _jobs(self, rest: list[str]) -> None:
        d = self.dispatcher
        if rest and rest[0] not in d.jobs:
            raise SpotfleetError(f"no job '{rest[0]}'")
        match [self.command, *rest]:
            case ["POST"]:
                said = json.loads(self.body)
                self._answer({"job": d.submit(from_json(JobSpec, said["spec"]), said["secrets"], said["wait"])})
            case ["GET"]:
                self._answer({"jobs": [to_json(j.status()) for j in d.jobs.values()]})
            case ["GET", job]:
                self._answer(to_json(d.jobs[job].status()))
            case ["POST", job, "cancel"]:
                d.jobs[job].state, d.jobs[job].why = JobState.CANCELLED, "by its user"
                if d.jobs[job].process:
                    d.jobs[job].process.kill()
                self._answer({})
            case ["GET", job, "workers"]:
                self._answer({"workers": ["digits-0/0/1"] if d.jobs[job].log else []})
            case ["GET", job, "logs", "start"]:
                tail = b"".join(d.jobs[job].log.splitlines(keepends=True)[-int(self.query["tail"]):])
                self._answer({"offset": len(d.jobs[job].log) - len(tail)})
            case ["GET", job, "logs"]:
                self._log(d.jobs[job], int(self.query["offset"]))

    def _log(self, job: FakeJob, offset: int) -> None:
        ended = job.done.wait(0.05 if float(self.query["wait"]) else 0)
        data = job.log[offset:offset + 10]  # small pieces, so that resuming is seen
        headers = {"X-Offset": str(offset + len(data))}
        if ended and offset + len(data) == len(job.log):
            headers["X-End"] = "1"
        self._send(data, 200, headers)

    def _archive(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.dispatcher.write_archive(Path(folder, "a"))
            with tarfile.open(Path(folder, "a.tar.gz"), "w:gz") as tar:
                for path in sorted(Path(folder, "a").iterdir()):
                    tar.add(path, path.name)
            self._send(Path(folder, "a.tar.gz").read_bytes(), 200, {})

    def _answer(self, value: dict, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
