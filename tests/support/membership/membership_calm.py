"""What must be true soon after the trouble has ended: every able host trains."""

from __future__ import annotations

from spotfleet.membership import Phase
from spotfleet.protocol.messages import Stage
from tests.support.membership.membership_sim import FleetSim


def calm(sim: FleetSim) -> None:
    sim.links.loss = sim.links.delay_s = 0.0
    sim.down_until, sim.paused_until = min(sim.down_until, sim.now), min(sim.paused_until, sim.now)
    for host in sim.hosts.values():
        host.away_until = host.stopped_until = min(sim.now, host.stopped_until)
    for job in sim.jobs.values():
        job.world.cut.clear()
    for job, worker in sim.workers():
        founder = worker.in_init and worker.forming is not None
        awaited = worker.group is not None and any(w.acts for w in worker.group.workers.values())
        for_membership = founder or (worker.stage is Stage.READY and (awaited or not worker.group))
        if worker.stopped:
            worker.frozen_s, worker.stopped = 0.0, False
        elif worker.frozen_s > 1.0 and not for_membership:
            job.world.kill(worker)  # by its user; who hangs while others wait for him does so for ever
        else:
            worker.frozen_s = 1e9 if worker.frozen_s > 1.0 else 0.0


def whole(sim: FleetSim) -> bool:
    """Does every job that has hosts enough train on all of them, and lies no host idle that a job could use?"""
    if sim.settle_until is not None or any(j.cancelled for j in sim.live_jobs()):
        return False
    held = {h for hosts in sim.held.values() for h in hosts}
    idle = [h for h in sim.living() if h.name not in held and not h.leaves and sim.connected(h)]
    for job in sim.live_jobs():
        if idle and sim.room(job) < job.most:
            return False
        room = min(job.most, sim.room(job))
        training = job.training()
        right = job.core.phase is Phase.RUNNING and len(training) == room and training == set(job.core.members)
        if room >= job.least and not right:
            return False
    return True


def check_alive(sim: FleetSim, limit_s: float = 900.0) -> None:
    """What lacks hosts gets them; all is whole within the limit, and trains on."""
    calm(sim)
    sim.run(1.0)
    for host in sim.hosts.values():
        host.returns_at = None
    while lacking := _lacking(sim):
        assert len(sim.hosts) < 200, "hosts come and the job does not start"
        for _ in range(lacking):
            sim.add_host()
        sim.run(1.0)
    assert sim.run_until(lambda: whole(sim), limit_s), f"not whole within {limit_s:.0f} s"
    before = {j: j.world.steps for j in sim.live_jobs()}
    moved = sim.run_until(lambda: all(j.ended or j.world.steps > n + 3 for j, n in before.items()), limit_s)
    assert moved, "a job makes no steps"


def _lacking(sim: FleetSim) -> int:
    """Hosts of one slot that would let every job start."""
    sim.run_until(lambda: sim.settle_until is None, 60.0)
    return sum(max(0, j.least - sim.room(j)) for j in sim.live_jobs() if not j.cancelled)
