"""A fleet on machines with a network of their own: real dispatcher and agent processes in namespaces.

    with NetworkFleet(folder, hosts=3) as fleet:
        job = fleet.submit({"train.py": SCRIPT}, np=(2, 3))
        fleet.wait("training", lambda: fleet.job(job).version > 10)
        fleet.cut(host_of(fleet.members(job)[1]))     # nothing comes in or goes out: no FIN, no RST
        ...
        fleet.restore(host)

`kill` ends a machine with all that runs on it, `notice` and `withdraw` are the cloud's warnings, `kill_dispatcher` and
`start_dispatcher` do what they say. The cloud is `plugin/spotfleet_network.py`: files in `folder/machines`. A machine
that ends is replaced by another, as the dispatcher asks for it. Everything is gone after `stop`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import spotfleet
from spotfleet.addresses import url
from spotfleet.codec import from_json, to_json
from spotfleet.model import CheckpointSpec, CloudHost, CloudState, FleetSpec, JobSpec, Nodes, Run
from spotfleet.protocol.messages import FleetStatus, JobStatus
from spotfleet.transport import certs
from spotfleet.transport.boot import DispatcherBoot
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.network.namespaces import Namespaces

DISPATCHER, PORT = "dispatcher", 7000
LIMIT_S = 90.0  # generous: for any one thing to happen on a busy machine
PLUGIN = str(Path(__file__).parent / "plugin")
INTERFACES = ("ens5", "eth0", "enp0s3", "wan7", "bond1")  # no two machines agree on a name
ADMIN, SECRET = "admin-token", "fleet-secret"


class NetworkFleet:
    def __init__(self, folder: Path, hosts: int, patch: str = "", agent_patch: str = "",
                 families: Sequence[int] = (4,)) -> None:
        """`patch` and `agent_patch` are Python that the dispatcher and each agent run first, to shorten a wait."""
        self.net = Namespaces()
        self.folder, self._hosts = folder, hosts
        self._patch, self._agent_patch = patch, agent_patch
        self._families = families
        self._machines = folder / "machines"
        self._listed: dict[str, CloudHost] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._dispatcher: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._cloud = threading.Thread(target=self._play, name="network-cloud", daemon=True)
        self._made = certs.make("net", time.time())
        self.url = ""

    def __enter__(self) -> NetworkFleet:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when all hosts are up."""
        self._machines.mkdir(parents=True)
        home = self.folder / DISPATCHER
        home.mkdir()
        self.url = url(self.net.add(DISPATCHER, "mgmt0", self._families), PORT)
        spec = FleetSpec("net", provider="network", nodes=Nodes(1, self._hosts, self._hosts + 4),
                         checkpoint=CheckpointSpec(interval_s=60.0))
        boot = DispatcherBoot("net", "net-d-0", spec, SECRET, ADMIN, self._made.ca, self._made.cert, self._made.key,
                              provider_config={"home": str(self._machines)})
        (home / "boot.json").write_text(json.dumps(to_json(boot)))
        self._cloud.start()
        self.start_dispatcher()
        self.wait(f"{self._hosts} hosts", lambda: len(self.up()) == self._hosts)

    def stop(self) -> None:
        self._closing.set()
        if self._cloud.is_alive():
            self._cloud.join(LIMIT_S)
        self.net.close()
        for process in [*self._agents.values(), *([self._dispatcher] if self._dispatcher else [])]:
            process.wait(LIMIT_S)

    # ---- what a user does

    def client(self) -> DispatcherClient:
        return DispatcherClient(Endpoint(self.url, ADMIN, self._made.ca), patience_s=LIMIT_S)

    def submit(self, files: dict[str, str], np: tuple[int, int], args: tuple[str, ...] = (), spares: int = 0,
               checkpoint_s: float = 60.0, envs: dict[str, str] | None = None) -> str:
        """Run the first of `files` on the fleet; the job's id."""
        data = _archive(files)
        digest = hashlib.sha256(data).hexdigest()
        spec = JobSpec("job", argv=(next(iter(files)), *args), bundle=digest, min_workers=np[0], max_workers=np[1],
                       envs=envs or {}, checkpoint=CheckpointSpec(interval_s=checkpoint_s), spares=spares)
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self.ask(lambda client: client.put_bundle(digest, Path(file.name)))
        return self.ask(lambda client: client.submit(spec, {}, wait=True))

    def ask(self, work: Callable[[DispatcherClient], Any]) -> Any:
        """`work(client)` where the dispatcher can be reached."""
        return self.net.call(DISPATCHER, lambda: work(self.client()))

    def status(self) -> FleetStatus:
        return self.ask(lambda client: client.status())

    def job(self, job: str) -> JobStatus:
        return self.ask(lambda client: client.job(job))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.ask(lambda client: client.events()) if e["kind"] in kinds or not kinds]

    def log(self, job: str, worker: str) -> str:
        return self.ask(lambda client: client.logs(job, worker=worker)).data.decode()

    def up(self) -> list[str]:
        return [h.host for h in self.status().hosts
                if h.role == "worker" and h.state == "up" and not h.why]

    def members(self, job: str) -> list[str]:
        """The workers that train the job, by rank."""
        return [w.worker for w in sorted(self.job(job).workers, key=lambda w: w.rank) if w.rank >= 0]

    # ---- what happens to machines

    def cut(self, host: str) -> None:
        self.net.cut(host)

    def restore(self, host: str) -> None:
        self.net.restore(host)

    def kill(self, host: str) -> None:
        """The machine loses power; the cloud lists it as ended."""
        self.net.kill(host)
        self._list(replace(self._listed[host], state=CloudState.TERMINATED,
                           runs=(replace(self._listed[host].runs[0], ended_at=time.time(), taken=True),)))

    def notice(self, host: str, seconds: float) -> None:
        (self._machines / host / "notice.json").write_text(json.dumps({"ends_at": time.time() + seconds}))

    def withdraw(self, host: str) -> None:
        (self._machines / host / "notice.json").unlink()

    def kill_dispatcher(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.kill()
        self._dispatcher.wait(LIMIT_S)

    def start_dispatcher(self) -> None:
        self._dispatcher = self._start(DISPATCHER, _main("dispatcher", self._patch), self.folder / DISPATCHER,
                                       {"SPOTFLEET_HOST_ADDRESS": self.net.address(DISPATCHER, self._families[0]),
                                        "SPOTFLEET_HOST_PORT": str(PORT)})

    def wait(self, what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s\n{self.story()}"
            time.sleep(0.02)

    def story(self) -> str:
        consoles = [self.folder / DISPATCHER / "console", *self._machines.glob("*/console")]
        return "\n".join(f"--- {p.parent.name}\n{p.read_text()[-3000:]}" for p in consoles if p.exists())

    # ---- the cloud

    def _play(self) -> None:
        """Start the machines that are asked for, end those that are not wanted."""
        while not self._closing.wait(0.02):
            for path in sorted(self._machines.glob("*/request.json")):
                name = path.parent.name
                if name not in self._listed:
                    self._launch(from_json(CloudHost, json.loads(path.read_text())))
                elif (path.parent / "unwanted").exists() and self._listed[name].state is CloudState.RUNNING:
                    self.kill(name)

    def prepare(self, name: str) -> None:
        """For a test: what else the machine has, before anything runs on it."""

    def _launch(self, asked: CloudHost) -> None:
        name, folder = asked.request_id, self._machines / asked.request_id
        address = self.net.add(name, INTERFACES[len(self._listed) % len(INTERFACES)], self._families)
        self.prepare(name)
        self._agents[name] = self._start(name, _main("agent", self._agent_patch), folder,
                                         {"SPOTFLEET_METADATA_URL": str(folder)})
        self._list(replace(asked, state=CloudState.RUNNING, address=address, runs=(Run(time.time()),)))

    def _list(self, host: CloudHost) -> None:
        path = self._machines / host.request_id / "host.json"
        path.with_suffix(".part").write_text(json.dumps(to_json(host)))
        path.with_suffix(".part").replace(path)
        self._listed[host.request_id] = host

    def _start(self, name: str, command: list[str], home: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
        ours = str(Path(spotfleet.__file__).parent.parent)
        path = os.pathsep.join(p for p in (PLUGIN, ours, os.environ.get("PYTHONPATH", "")) if p)
        with (home / "console").open("ab") as console:
            return self.net.start(name, [sys.executable, *command, "--home", str(home)], stdout=console, stderr=console,
                                  stdin=subprocess.DEVNULL, cwd=home, env={**os.environ, **more, "PYTHONPATH": path})


def _main(module: str, patch: str) -> list[str]:
    return ["-c", f"{patch}\nimport sys\nfrom spotfleet.{module}.__main__ import main\nsys.exit(main())"]


def host_of(worker: str) -> str:
    return worker.partition("/")[0]


def tuned(**waits_s: float) -> str:
    """Python that shortens waits of Membership: for `NetworkFleet(patch=...)`."""
    return (f"import dataclasses\nfrom spotfleet.membership.views import Tuning\nnew, at = {waits_s!r}, "
            "Tuning.__init__\nat.__defaults__ = tuple(new.get(f.name, old) for f, old in "
            "zip(dataclasses.fields(Tuning), at.__defaults__, strict=True))")


def _archive(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()
