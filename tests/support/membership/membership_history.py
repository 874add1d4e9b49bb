"""Random histories of jobs that share a fleet: troubles of every kind, then calm.

`python -m tests.support.membership.membership_history SEED [COUNT]` replays them; a failure prints its seed and story.
"""

from __future__ import annotations

import random
import sys

from spotfleet.membership import Pace
from tests.support.membership.membership_calm import check_alive
from tests.support.membership.membership_jobs import SimJob
from tests.support.membership.membership_sim import FleetSim, Host
from tests.support.membership.membership_workers import Worker


def history(seed: int) -> FleetSim:
    rng = random.Random(seed)
    sim = FleetSim(seed)
    sim.look_s = rng.choice([0.1, 0.3, 0.3, 0.5])
    try:
        _happen(sim, rng)
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}: {wrong}\n{sim.story()}") from wrong
    return sim


def submit(sim: FleetSim, rng: random.Random) -> SimJob:
    most = rng.randint(1, 5) if not sim.jobs else rng.randint(1, 2)
    job = sim.submit(rng.randint(1, min(3, most)), most, rng.choice([10**9, 10**9, 60, 150]))
    job.world.script_dies = rng.random() < 0.3
    job.world.reads = rng.choice(["", "", "rank", "size", "rank and size"])
    if rng.random() < 0.3:
        job.paced(Pace(rng.choice([0, 1, 2]), rng.choice([0, 1]), rng.choice([0.0, 3.0, 20.0])))
    return job


def _happen(sim: FleetSim, rng: random.Random) -> None:
    most = sum(submit(sim, rng).most for _ in range(rng.choice([1, 1, 1, 2, 3])))
    for _ in range(rng.randint(1, most + 1)):
        sim.add_host(slots=rng.choice([1, 1, 2]))
    sim.run(rng.choice([0.0, 2.0, 8.0, 20.0]))
    for _ in range(rng.randint(1, 14)):
        trouble(sim, rng)
        sim.run(rng.choice([0.0, 0.1, 0.3, 0.5, 1.0, 3.0, 10.0]))
    check_alive(sim)


def trouble(sim: FleetSim, rng: random.Random) -> None:
    hosts, workers = sim.living(), sim.workers()
    if not hosts or not workers or (len(hosts) < 6 and rng.random() < 0.15):
        sim.add_host(slots=rng.choice([1, 1, 2]))
        return
    TROUBLES[rng.choice(KINDS)](sim, rng, rng.choice(hosts), rng.choice(workers))


Victim = tuple[SimJob, Worker]


def _kill(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    victim[0].world.kill(victim[1])


def _vanish(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.kill_host(host, listed_after_s=rng.choice([0.5, 3.0, 12.0]))


def _agent(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.kill_agent(host)


def _notice(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    host.noticed_until = sim.now + rng.choice([2.0, 6.0, 15.0, 30.0, 60.0])
    host.returns_after_s = rng.choice([None, None, 3.0, 20.0])


def _withdraw(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    for noticed in sim.hosts.values():
        noticed.noticed_until = None


def _drain(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    host.draining_at = sim.mono if host.draining_at is None else host.draining_at


def _freeze(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    victim[1].frozen_s, victim[1].stopped = rng.choice([0.3, 2.0, 10.0, 50.0]), False


def _sigstop(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    """A worker is stopped, and continued later."""
    victim[1].frozen_s, victim[1].stopped = rng.choice([0.3, 0.9, 2.0, 10.0, 50.0]), True


def _stop(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    """The machine stands still and goes on later, with the workers it had, which may have been replaced."""
    seconds = rng.choice([0.5, 2.5, 4.0, 20.0])
    host.stopped_until = sim.now + seconds
    for _, worker in host.procs.values():
        worker.frozen_s, worker.stopped = seconds, False


def _away(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    host.away_until = sim.now + rng.choice([0.5, 2.0, 4.0, 15.0])


def _lossy(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.links.loss = rng.choice([0.0, 0.3, 0.8])


def _late(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.links.delay_s = rng.choice([0.0, 0.5, 2.0])


def _restart(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.restart_dispatcher(rng.choice([0.2, 2.0, 6.0]))


def _pause(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    """The dispatcher stands still; its monotonic clock counts that time, or stands still too."""
    seconds = rng.choice([0.5, 4.0, 20.0])
    sim.paused_until = sim.now + seconds
    if rng.random() < 0.5:
        sim.mono -= seconds  # it never reads the clock meanwhile, so it sees it stand still


def _wall(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    sim.wall += rng.choice([-3600.0, -5.0, 5.0, 3600.0])


def _cut(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    pair = frozenset({host.name, rng.choice(list(sim.hosts))})
    for job in sim.jobs.values():
        job.world.cut |= {pair} if len(pair) == 2 else set()


def _heal(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    for job in sim.jobs.values():
        job.world.cut.clear()


def _break(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    victim[1].breaks()


def _total(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    """Everything is noticed, or everything dies."""
    if rng.random() < 0.5:
        for one in sim.living():
            one.noticed_until = sim.now + rng.choice([2.0, 20.0])
    else:
        for job, worker in sim.workers():
            job.world.kill(worker)


def _submit(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    if len(sim.jobs) < 4:
        submit(sim, rng)


def _wish(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    """Its resize policy asks for another number of workers."""
    victim[0].wish(rng.randint(victim[0].least, victim[0].ceiling))


def _cancel(sim: FleetSim, rng: random.Random, host: Host, victim: Victim) -> None:
    if len(sim.live_jobs()) > 1:
        victim[0].cancelled = True


TROUBLES = {
    "agent": _agent,
    "away": _away,
    "break": _break,
    "cancel": _cancel,
    "cut": _cut,
    "drain": _drain,
    "freeze": _freeze,
    "heal": _heal,
    "kill": _kill,
    "late": _late,
    "lossy": _lossy,
    "notice": _notice,
    "pause": _pause,
    "restart": _restart,
    "sigstop": _sigstop,
    "stop": _stop,
    "submit": _submit,
    "total": _total,
    "wish": _wish,
    "vanish": _vanish,
    "wall": _wall,
    "withdraw": _withdraw,
}
OFTEN = ("kill", "notice", "away", "restart", "vanish")
KINDS = [*TROUBLES, *OFTEN]


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for seed in range(first, first + count):
        sim = history(seed)
        if count == 1:
            print(sim.story())
