"""tests/e2e/chaos.py on machines with a network of their own, where a cut host is gone with neither FIN nor RST:
`python -m tests.network.chaos_network --events 200 --seed S`. Needs root and `ip`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spotfleet.model import CloudState, Nodes
from spotfleet.protocol.messages import JobStatus
from tests.e2e.chaos import FILES, KINDS, LEAST, MOST, RECOVER_S, TRAIN, asked, chaos, plan
from tests.support.e2e.troubles import Troubles
from tests.support.e2e.watch import Failure
from tests.support.network.network_fleet import NetworkFleet

HERE = {kind: weight for kind, weight in KINDS.items() if kind != "kill_agent"}  # nobody would start it again


class JobThere:
    """A job whose dispatcher only its own network reaches."""

    def __init__(self, fleet: NetworkFleet, job: str) -> None:
        self.id, self._fleet = job, fleet

    def status(self) -> JobStatus:
        return self._fleet.job(self.id)


class NetworkStrokes(Troubles):
    target = LEAST

    def __init__(self, fleet: NetworkFleet, say: Callable[[str], None]) -> None:
        super().__init__(None, None, random.Random(0), say)  # type: ignore[arg-type]  # neither local cloud nor API
        self.net_fleet = fleet

    def living(self) -> dict[str, Any]:
        found = {}
        for name, host in list(self.net_fleet._listed.items()):
            if host.state is CloudState.RUNNING:
                with suppress(RuntimeError):
                    found[name] = SimpleNamespace(request_id=name, processes=tuple(self.net_fleet.net.pids(name)))
        return found

    def kill(self) -> str:
        return self._end([self.host()])

    def two_hosts(self) -> str:
        there = sorted(self.living())
        return self._end(self.dice.sample(there, min(2, len(there))))

    def all_hosts(self) -> str:
        return self._end(sorted(self.living()))

    def _end(self, hosts: list[str]) -> str:
        for host in hosts:
            self.net_fleet.kill(host)
        return f"kill {hosts}"

    def cut(self) -> str:
        host, cut_s = self.host(), self.dice.uniform(1, 12)
        self.net_fleet.cut(host)
        self._later(cut_s, lambda: self.net_fleet.restore(host))
        return f"cut {host} for {cut_s:.1f} s"

    def notice(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(3, 15)
        self.net_fleet.notice(host, notice_s)
        self._later(notice_s, lambda: self.living().get(host) and self.net_fleet.kill(host))
        return f"notice of {notice_s:.1f} s to {host}"

    def withdraw(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(6, 15)
        self.net_fleet.notice(host, notice_s)
        after_s = self.dice.uniform(0.2, notice_s - 2)
        self._later(after_s, lambda: self.net_fleet.withdraw(host))
        return f"notice of {notice_s:.1f} s to {host}, withdrawn after {after_s:.1f} s"

    def drain(self) -> str:
        host = self.host()
        self.net_fleet.ask(lambda client: client.drain(host))
        return f"drain {host}"

    def resize(self) -> str:
        self.target = self.dice.choice([n for n in range(LEAST, MOST + 1) if n != self.target])
        self.net_fleet.ask(lambda client: client.set_nodes(Nodes(1, self.target, MOST)))
        return f"a target of {self.target} hosts"

    def kill_dispatcher(self) -> str:
        away_s = self.dice.uniform(0, 2)
        self.net_fleet.kill_dispatcher()
        time.sleep(away_s)
        self.net_fleet.start_dispatcher()
        return f"SIGKILL dispatcher, away for {away_s:.1f} s"


class NetworkWorld:
    """What chaos.LocalWorld is for the local cloud."""

    def __init__(self, fleet: NetworkFleet, work: Path) -> None:
        self.fleet, self.work = fleet, work

    def begin(self, say: Callable[[str], None]) -> None:
        self.strokes = NetworkStrokes(self.fleet, say)
        self.fleet.ask(lambda client: client.set_nodes(Nodes(1, LEAST, MOST)))

    def train(self, args: list[str]) -> JobThere:
        files = {name: (TRAIN / name).read_text() for name in FILES}
        return JobThere(self.fleet, self.fleet.submit(files, (1, MOST), tuple(args), checkpoint_s=2.0))

    def events(self) -> list[dict[str, Any]]:
        return self.fleet.events()

    def end(self) -> None:
        self.fleet.ask(lambda client: client.down())
        limit = time.monotonic() + RECOVER_S
        while left := self.strokes.living():
            if time.monotonic() > limit:
                raise Failure(f"machines are left: {left}")
            time.sleep(0.1)

    def dump(self, job: JobThere) -> None:
        print(job.status())
        for event in self.fleet.events()[-100:]:
            print({k: v for k, v in event.items() if k not in ("ledger", "seq", "offer")})
        print(self.fleet.story())


def main() -> None:
    seed, events = asked()
    top = Path(tempfile.mkdtemp(prefix="chaos-network-"))
    (top / "work").mkdir()
    with NetworkFleet(top / "fleet", LEAST) as fleet:
        chaos(NetworkWorld(fleet, top / "work"), plan(seed, events, HERE))  # type: ignore[arg-type]
    shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
