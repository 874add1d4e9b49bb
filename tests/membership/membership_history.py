"""Random histories of one job: troubles of every kind, then calm.

`python tests/membership/membership_history.py SEED [COUNT]` replays them; a failure prints its seed and story.
"""

from __future__ import annotations

import random
import sys

from membership_sim import Host, JobSim
from membership_workers import Worker


def history(seed: int) -> JobSim:
    rng = random.Random(seed)
    most = rng.randint(1, 5)
    sim = JobSim(
        min_workers=rng.randint(1, min(3, most)),
        max_workers=most,
        seed=seed,
        total_steps=rng.choice([10**9, 10**9, 60, 150]),
    )
    sim.world.script_dies = rng.random() < 0.3
    try:
        _happen(sim, rng, most)
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}: {wrong}\n{sim.story()}") from wrong
    return sim


def _happen(sim: JobSim, rng: random.Random, most: int) -> None:
    for _ in range(rng.randint(1, most + 1)):
        sim.add_host(slots=rng.choice([1, 1, 2]))
    sim.run(rng.choice([0.0, 2.0, 8.0, 20.0]))
    for _ in range(rng.randint(1, 14)):
        trouble(sim, rng)
        sim.run(rng.choice([0.0, 0.1, 0.3, 0.5, 1.0, 3.0, 10.0]))
    while sim.able() < sim.min and not sim.ended_well:
        sim.add_host()
    sim.check_alive()


def trouble(sim: JobSim, rng: random.Random) -> None:
    hosts = [h for h in sim.hosts.values() if not h.gone]
    workers = sim.world.alive()
    if not hosts or not workers or (len(hosts) < 6 and rng.random() < 0.15):
        sim.add_host(slots=rng.choice([1, 1, 2]))
        return
    kinds = [
        *("kill", "kill", "vanish", "notice", "notice", "withdraw", "drain", "freeze", "stop", "away", "away"),
        *("lossy", "late", "restart", "cut", "heal", "break", "total"),
    ]
    host, worker = rng.choice(hosts), rng.choice(workers)
    TROUBLES[rng.choice(kinds)](sim, rng, host, worker)


def _kill(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.world.kill(worker)


def _vanish(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.kill_host(host, listed_after_s=rng.choice([0.5, 3.0, 12.0]))


def _notice(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    host.noticed_until = sim.now + rng.choice([2.0, 6.0, 15.0, 30.0, 60.0])


def _withdraw(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    for noticed in sim.hosts.values():
        noticed.noticed_until = None


def _drain(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    host.draining_until = sim.now + 40.0


def _freeze(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    worker.frozen_s = rng.choice([0.3, 2.0, 10.0, 50.0])


def _stop(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    seconds = rng.choice([0.5, 2.5, 4.0, 20.0])
    host.stopped_until = sim.now + seconds
    for one in sim.on(host):
        one.frozen_s = seconds


def _away(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    host.away_until = sim.now + rng.choice([0.5, 2.0, 4.0, 15.0])


def _lossy(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.links.loss = rng.choice([0.0, 0.3, 0.8])


def _late(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.links.delay_s = rng.choice([0.0, 0.5, 2.0])


def _restart(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.restart_dispatcher(rng.choice([0.2, 2.0, 6.0]))


def _cut(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.world.cut.add(frozenset({host.name, rng.choice(list(sim.hosts))}))
    sim.world.cut -= {pair for pair in sim.world.cut if len(pair) == 1}


def _heal(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    sim.world.cut.clear()


def _break(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    worker.breaks()


def _total(sim: JobSim, rng: random.Random, host: Host, worker: Worker) -> None:
    """Everything is noticed, or everything dies."""
    if rng.random() < 0.5:
        for one in sim.hosts.values():
            if not one.gone:
                one.noticed_until = sim.now + rng.choice([2.0, 20.0])
    else:
        for one in sim.world.alive():
            sim.world.kill(one)


TROUBLES = {
    "kill": _kill,
    "vanish": _vanish,
    "notice": _notice,
    "withdraw": _withdraw,
    "drain": _drain,
    "freeze": _freeze,
    "stop": _stop,
    "away": _away,
    "lossy": _lossy,
    "late": _late,
    "restart": _restart,
    "cut": _cut,
    "heal": _heal,
    "break": _break,
    "total": _total,
}


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for seed in range(first, first + count):
        sim = history(seed)
        if count == 1:
            print(sim.story())
