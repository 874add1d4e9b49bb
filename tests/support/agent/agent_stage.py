"""A stage for one real agent: its dispatcher is a fake, its workers are real processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from spotfleet import bundle
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import AgentOrders, SlotOrder, WorkerLaunch, WorkerOrders, WorkerState
from tests.support.agent.agent_dispatcher import TOKEN, FakeDispatcher

HOST = "fleet-1"
ADDRESS = "127.0.3.7"


@dataclass
class Stage:
    """A fake dispatcher and one real agent process."""

    home: Path
    dispatcher: FakeDispatcher
    env: dict[str, str] = field(default_factory=dict)
    token: str = TOKEN
    provider: str = "local"
    told: dict[str, object] = field(default_factory=dict)  # more for boot.json
    patch: str = ""  # Python that the agent's process runs first, to shorten a wait
    agent: subprocess.Popen | None = None
    agent_log: Path = Path()

    def boot(self, wait: bool = True) -> None:
        boot = {"fleet": "fleet", "host": HOST, "provider": self.provider, "slots": 2,
                "dispatcher": self.dispatcher.url, "ca": self.dispatcher.ca, "token": self.token, **self.told}
        self.home.mkdir(exist_ok=True)
        (self.home / "boot.json").write_text(json.dumps(boot))
        self.agent_log = self.home / "agent.log"
        code = f"{self.patch}\nimport sys\nfrom spotfleet.agent.__main__ import main\nsys.exit(main())"
        with self.agent_log.open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-c", code, "--home", str(self.home)], stdout=log, stderr=log,
                env={**os.environ, "SPOTFLEET_HOST_ADDRESS": ADDRESS, **self.env})
        if wait:
            self.dispatcher.wait(lambda report: report.host == HOST)

    def job(self, script: str = "", *, job: str = "job", secrets: dict[str, str] | None = None, args: tuple = (),
            **spec) -> None:
        """A job whose bundle holds train.py with `script`; without one, the spec says what to run."""
        if script:
            spec |= {"argv": ("train.py", *args), "bundle": self._pack({"train.py": script})}
        self.dispatcher.launches[job] = WorkerLaunch(job, JobSpec(job, **spec), secrets or {})

    def _pack(self, files: dict[str, str]) -> str:
        """The digest of a manifest that the dispatcher has, as it has its pieces."""
        def hold(blob: bytes) -> str:
            digest = hashlib.sha256(blob).hexdigest()
            self.dispatcher.bundles[digest] = blob
            return digest

        with tempfile.TemporaryDirectory() as work:
            for name, text in files.items():
                Path(work, name).write_text(text)
            packed = bundle.pack(bundle.scan(Path(work)), lambda made: hold(made.blob))
        return hold(bundle.dump(packed.manifest))

    def order(self, *names: str, job: str = "job", orders: WorkerOrders | None = None) -> None:
        """List exactly these workers; the number in the middle of a name is its slot."""
        self.dispatcher.order(AgentOrders(HOST, tuple(
            SlotOrder(n, job, int(n.split("/")[1]), int(n.split("/")[1]), orders or WorkerOrders()) for n in names)))

    def run(self, script: str = "", name: str = f"{HOST}/0/1", **more) -> WorkerState:
        """Run one worker to its reported end."""
        self.job(script, **more)
        self.order(name)
        return self.dispatcher.wait_worker(name, lambda w: w.exit)

    def log(self, name: str = f"{HOST}/0/1") -> str:
        return self.dispatcher.logs.get(name, b"").decode()

    def processes(self) -> list[psutil.Process]:
        assert self.agent is not None
        me = psutil.Process(self.agent.pid)
        return [me, *me.children(recursive=True)]

    def processes_with(self, words: str) -> list[psutil.Process]:
        """Those whose command line holds `words`."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended meanwhile
                found += [process] if words in " ".join(process.cmdline()) else []
        return found

    def end(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)
            try:
                self.agent.wait(60)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait()
                raise


def eventually(what: Callable[[], object], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "never came"
        time.sleep(0.01)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=0.01)[1]
