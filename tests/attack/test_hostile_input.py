"""Hostile requests, frames, names and neighbours, at one fleet of two hosts on which a job trains.

The cheaper test of requests is tests/dispatcher/http/test_api_fuzz.py; here are TLS, real daemons and real sockets, and
what they cost in memory. The last test ends the fleet.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import strategies as st

from spotfleet.api import Job
from tests.support.attack.attack_scripts import NOTING, ODD_OUTPUTS
from tests.support.attack.live import LIMIT_S, LiveFleet, eventually, live_stage
from tests.support.attack.neighbour import probes_of_another_user
from tests.support.attack.tally import ONCE, Tally, strokes
from tests.support.attack.wire import CLOSED, Wire, thrown
from tests.support.dispatcher import fuzzing
from tests.support.e2e.e2e_stage import COUNTING, output

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]
SECRET = "a-value-that-must-stay-secret"
REQUESTS = 300  # number for each role; ten times as many in the long form
TRAINS = "a host that trains"
MEMORY_BYTES = 40 << 20  # so much more the dispatcher may hold after each kind


class Target:
    """The fleet, its training job, and what must not change."""

    def __init__(self, live: LiveFleet) -> None:
        self.live = live
        self.job = live.fleet.train("counting.py", ["--epochs", "100000"], np=(1, 1), detach=True, wait=True,
                                    secrets={"KEY": SECRET})
        eventually("the job's first steps", lambda: self.job.status().version > 3)
        self.wire = Wire(live, self.job.id, self.job.status().workers[0].worker)
        self.pid = live.dispatcher_pid()

    def facts(self) -> Counter[tuple[str, str]]:
        """Events that somebody wanted."""
        return Counter((e["kind"], str(e.get("request_id") or e.get("job") or "")) for e in self.live.fleet.events()
                       if e["kind"] in fuzzing.MEANT and e["kind"] != "CheckpointKept")

    def memory(self) -> int:
        return psutil.Process(self.pid).memory_info().rss

    def trains(self) -> bool:
        before = self.job.status().version
        return eventually("another step", lambda: self.job.status().version > before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with live_stage(tmp_path_factory.mktemp("hostile")) as stage:
        (stage.work / "counting.py").write_text(COUNTING)
        (stage.work / "noting.py").write_text(NOTING)
        yield Target(LiveFleet(stage, stage.fleet("hostile", 2, 2)))


class Lives:
    """Checks around an attack: the same dispatcher process, bounded memory, a job that trains on."""

    def __init__(self, target: Target, tally: Tally) -> None:
        self.target, self.tally = target, tally
        self.memory, self.generation = target.memory(), target.job.status().generation

    def check(self, *, same_generation: bool = True) -> None:
        target, tally = self.target, self.tally
        tally.check("the dispatcher's process lives on", target.live.dispatcher_pid() == target.pid)
        grown = target.memory() - self.memory
        tally.check("memory is bounded", grown < MEMORY_BYTES, f"{grown / 1e6:.1f} MB more")
        tally.note(f"dispatcher {grown / 1e6:+.1f} MB")
        tally.check("the job trains on", target.trains())
        if same_generation:
            now = target.job.status().generation
            tally.check("the job keeps its generation", now == self.generation, f"{self.generation} -> {now}")


def throw(tally: Tally, wire: Wire, drawn: tuple[tuple[str, str, bytes], dict[str, str], str], role: str) -> int:
    """Send one request; return its status."""
    (method, path, body), headers, authorization = drawn
    status, answer = wire.ask(method, path, {**headers, "Authorization": authorization}, body)
    shown = f"{role}: {method} {path[:120]} {body[:120]!r} -> {status} {answer[:200]!r}"
    tally.check("no request gets a 5xx", status < 500, shown)
    theirs = role == TRAINS and f"/{wire.job}/launch" in path  # a host gets the secrets of the job that it runs
    tally.check("no answer holds a job's secret", theirs or SECRET.encode() not in answer, shown)
    return status


def test_no_request_of_a_stranger_or_a_host_without_job_has_an_effect(target: Target, attack, seed: int):
    with attack("K6 random requests over TLS without a right to them") as tally:
        wire, lives, before = target.wire, Lives(target, tally), target.facts()
        statuses: Counter[int] = Counter()
        roles = {"no token": fuzzing.strangers(wire.host, wire.token, wire.admin),
                 "a host without a job": st.just(f"Bearer {wire.token(wire.other)}")}
        for role, authorizations in roles.items():
            def one(drawn, role: str = role) -> None:
                status = throw(tally, wire, drawn, role)
                statuses[status] += 1
                if role == "no token":
                    tally.check("a stranger is refused", status == CLOSED or 400 <= status < 500
                                or drawn[0][1].startswith("/healthz"), f"{drawn[0]} -> {status}")

            thrown(seed, REQUESTS, st.tuples(fuzzing.requests(wire.names), fuzzing.HEADERS, authorizations), one)
        after = target.facts()
        tally.none("nothing changes", {str(fact): n for fact, n in (after - before).items()})
        tally.note(f"answers {dict(sorted(statuses.items()))}")
        lives.check()


def test_bytes_and_frames_at_the_agents_link_and_sockets_end_nothing(target: Target, attack, seed: int):
    with attack("K8 random frames at the agents' link, bytes at their sockets") as tally:
        wire, lives, dice = target.wire, Lives(target, tally), random.Random(seed)
        def report(frames: list[str | bytes]) -> None:
            wire.frames(wire.other, frames)
            tally.check("the dispatcher survives an agent's frames", psutil.pid_exists(target.pid), frames)

        beginnings = st.sampled_from([[], [json.dumps(fuzzing.REPORT)]])  # a good report is read to its end
        thrown(seed, 40, st.builds(list.__add__, beginnings, st.lists(fuzzing.FRAMES, min_size=1, max_size=3)), report)
        for _ in range(strokes(20, 200)):
            tally.check("the dispatcher survives raw bytes", psutil.pid_exists(target.pid))
            wire.socket_bytes(dice.choice([dice.randbytes(dice.randint(1, 2000)), b"\x88\x80",
                                           b"\x81\xff" + (2**63 - 1).to_bytes(8, "big") + b"abcd",
                                           b"\xc1\xfe\xff\xff" + dice.randbytes(70_000)]))
        tally.check("the other host comes back", eventually("two hosts", lambda: len(target.live.up()) == 2))
        agents = {m.request_id: m.processes[0] for m in target.live.machines()}
        sockets = [c.laddr for pid in agents.values() for c in psutil.Process(pid).net_connections("unix")
                   if c.status == "LISTEN" or str(c.laddr).endswith("/agent")]
        paths = sorted({str(path) for path in sockets if path})
        tally.check("the agents' sockets are found", paths)
        for path in paths:
            for _ in range(strokes(15, 200)):
                tally.check("an agent survives bytes at its socket", all(map(psutil.pid_exists, agents.values())))
                _to_unix(path, dice.choice([dice.randbytes(300) + b"\n", b"[" * 100_000 + b"\n", b"x" * 2_000_000,
                                            f'{{"worker": "{wire.worker}", "job": "{wire.job}"}}\n'.encode()]))
        now = {m.request_id: m.processes[0] for m in target.live.machines()}
        tally.check("the agents' processes live on", now == agents, f"{agents} -> {now}")
        lives.check()


def _to_unix(path: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer, suppress(OSError):
        peer.settimeout(0.5)
        peer.connect(path)
        peer.sendall(data)
        peer.recv(200)


@ONCE
def test_odd_names_and_odd_files_reach_nothing_outside(target: Target, attack):
    with attack("K11 odd names in working directories, arguments and outputs") as tally:
        work, outside = target.live.stage.work, target.live.stage.work.parent
        (outside / "private.txt").write_text("outside the working directory")
        odd = make_odd_files(work, outside / "private.txt")
        (work / "odd.py").write_text(ODD_OUTPUTS)
        hit = outside / "hit"
        job = target.live.fleet.train("odd.py", ["<script>", f"$(touch {hit})", f"; touch {hit}"], np=(1, 1),
                                      name="../../evil\x1b[31m", detach=True, wait=True)
        eventually("the job's end", lambda: job.state.ended)
        status, said = job.status(), output(job)
        tally.check("the job succeeds", status.state == "succeeded", f"{status.why} {status.error[-500:]}")
        tally.check("its name is plain", job.id.replace("-", "").isalnum(), job.id)
        tally.check("no argument reaches a shell", not hit.exists())
        tally.check("no link leads outside", "private" not in said and "outside the working" not in said, said[:500])
        tally.none("a regular file travels whatever its name", [n for n in odd if ascii(n) not in said], len(odd))
        check_outputs(tally, target, job, outside / "odd-results")


def make_odd_files(work: Path, private: Path) -> list[str]:
    """Return the names of those that must travel."""
    names = ["new\nline", "a b", "-rf", "é", "x" * 255, "esc\x1b[31m", "<b>"]
    for name in names:
        (work / name).write_text("x")
    (work / "private-link").symlink_to(private)
    (work / "loop").symlink_to("loop")
    (work / "up").symlink_to("..")
    return names


def check_outputs(tally: Tally, target: Target, job: Job, into: Path) -> None:
    target.live.fleet.outputs(job.id, into)
    found = [path for path in into.rglob("*") if not path.is_dir() or path.is_symlink()]
    files = {path.name for path in found if path.is_file() and not path.is_symlink()}
    wanted = {"plain.txt", "new\nline", "esc\x1b[31mred", "-rf", "..hidden", "x" * 255, "ledger.db"}
    tally.none("an output comes home whatever its name", sorted(map(ascii, wanted - files)), len(wanted))
    special = ("link-out", "link-up", "pipe", "socket")
    tally.none("links, pipes and sockets stay away, and what links lead to", [
        str(p) for p in found if p.is_symlink() or not p.is_file() or p.name in special])
    tally.none("no output lies outside its folder", [
        str(p) for p in found if not p.resolve().is_relative_to(into.resolve())], len(found))
    strays = [p for p in target.live.stage.home.rglob("evil*") if not p.name.startswith("evil-")]
    tally.none("a job's name is no path", [str(p) for p in strays])


@ONCE
def test_another_user_of_the_machine_reads_and_reaches_nothing(target: Target, attack):
    with attack("K12 another user of the machine") as tally:
        for what, problem in probes_of_another_user(target.live, target.wire.url).items():
            tally.check(what, not problem, problem)
        secrets = [SECRET, target.wire.admin, target.wire.token(target.wire.host)]
        named = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                named += [process.pid for secret in secrets if secret in line]
        tally.none("no command line holds a secret", named)
        pids = {pid for machine in target.live.stage.cloud.truth() for pid in machine.processes}
        wide = [c.laddr for pid in pids for c in listening(pid) if c.laddr.ip in ("0.0.0.0", "::")]
        tally.none("nothing listens on all addresses", wide, len(pids))


def listening(pid: int) -> list:
    try:
        return [c for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"]
    except psutil.Error:
        return []  # it has just ended


def test_no_request_of_the_owner_or_a_training_host_gets_a_5xx(target: Target, attack, seed: int):
    """The owner's random requests change the fleet and end jobs, so this test comes late, with a job of its own."""
    with attack("K6 random requests over TLS of the owner and of a host that trains") as tally:
        target.live.fleet.up(timeout_s=LIMIT_S)
        eventually("two hosts", lambda: len(target.live.up()) == 2)
        pid, wire = target.pid, Target(target.live).wire
        statuses: Counter[int] = Counter()
        for role, token in {TRAINS: wire.token(wire.host), "owner": wire.admin}.items():
            def one(drawn, role: str = role) -> None:
                statuses[throw(tally, wire, drawn, role)] += 1

            authorization = st.just(f"Bearer {token}")
            thrown(seed, REQUESTS, st.tuples(fuzzing.requests(wire.names), fuzzing.HEADERS, authorization), one)
        tally.note(f"answers {dict(sorted(statuses.items()))}")
        tally.check("the dispatcher's process lives on", target.live.dispatcher_pid() == pid)
        cancel_all(target.live)


def cancel_all(live: LiveFleet) -> None:
    """End also the jobs of random requests, which may wait for hosts for ever."""
    for job in live.fleet.client.jobs():
        live.fleet.client.cancel(job.job)
    eventually("the end of all jobs", live.ended)


@ONCE
def test_the_fleet_runs_jobs_and_ends_after_all_of_it(target: Target, attack):
    with attack("K6 the end of a fleet that met hostile input") as tally:
        target.live.fleet.up(timeout_s=LIMIT_S)
        cancel_all(target.live)
        later = target.live.run("noting.py", "later", 0.1, target.live.stage.work.parent / "notes")
        eventually("a job of afterwards", lambda: later.status().state == "succeeded")
        tally.check("the fleet still runs jobs", True)
        target.live.fleet.down(discard=True)
        tally.none("nothing is left", [m.request_id for m in target.live.stage.cloud.truth()])
