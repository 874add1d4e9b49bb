"""Which address a host is reached at: that of its route to the dispatcher, whatever its interfaces are called, whatever
other networks it is in, IPv4 or IPv6, and also after it has changed.

Every machine here has another name for its interface, and besides a `docker0` that bears the same addresses on each of
them, as Docker makes it: a program that picks an interface by its name, or the first address that it finds, talks to
itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.namespaces import why_not
from tests.support.network.network_fleet import NetworkFleet, host_of
from tests.support.network.network_scripts import TRACING, Trace

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
long = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="SPOTFLEET_LONG=1 runs it")
STEPS = 40
REPORTING = TRACING + """
print("reached at", runtime.current().address, flush=True)
"""


class Fleet(NetworkFleet):
    def prepare(self, name: str) -> None:
        self.net.ip(name, "link", "add", "docker0", "type", "bridge")
        self.net.ip(name, "link", "set", "docker0", "up")
        for address in ("172.17.0.1/16", "fd00:172:17::1/64"):
            self.net.ip(name, "address", "add", address, "dev", "docker0", *(["nodad"] if ":" in address else []))


@pytest.fixture(scope="module", params=[pytest.param(4, marks=long), 6], ids=["IPv4", "IPv6"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("addresses"), 3, families=(request.param,)) as made:
        yield made


def family(fleet: Fleet) -> int:
    return fleet._families[0]


def trained(fleet: Fleet, folder: Path, workers: int, steps: int = 10_000_000) -> tuple[str, Trace]:
    """A job that trains, and the truth about its steps."""
    trace = Trace(folder / "trace")
    job = fleet.submit({"train.py": REPORTING}, np=(workers, workers),
                       envs={"TRACE": str(trace.folder), "STEPS": str(steps)})
    return job, trace


def test_hosts_whose_interfaces_bear_other_names_meet_at_the_address_of_their_route_to_the_dispatcher(
        fleet: Fleet, tmp_path: Path):
    job, trace = trained(fleet, tmp_path, 3, STEPS)
    fleet.wait("the end", lambda: fleet.job(job).state == "succeeded")
    said = {worker: fleet.log(job, worker) for worker in trace.all()}
    assert len(said) == 3
    for worker, text in said.items():
        assert f"counted {-STEPS}.0" in text
        assert f"reached at {fleet.net.address(host_of(worker), family(fleet))}\n" in text


def test_a_host_whose_address_changes_trains_on_at_its_new_one(fleet: Fleet, tmp_path: Path):
    job, trace = trained(fleet, tmp_path, 2)
    fleet.wait("training", lambda: fleet.job(job).version > 3)
    worker = fleet.members(job)[0]  # rank 0, in whose store the others meet
    host, generation = host_of(worker), fleet.job(job).generation
    before = fleet.net.address(host, family(fleet))
    line = next(x for x in fleet.net.ip(host, "-o", "address").splitlines() if f" {before}/" in x).split()
    interface, bits = line[1], line[3].partition("/")[2]
    after = "10.213.7.77" if family(fleet) == 4 else "fd00:213:7::77"
    fleet.net.ip(host, "address", "del", f"{before}/{bits}", "dev", interface)
    fleet.net.ip(host, "address", "add", f"{after}/{bits}", "dev", interface, *(["nodad"] if ":" in after else []))

    def goes_on() -> bool:
        now = fleet.job(job)
        steps = trace.steps(worker)
        return now.generation > generation and worker in fleet.members(job) and steps[-1].generation == now.generation

    fleet.wait(f"{worker} trains in another generation", goes_on)
    trace.enough()
    fleet.wait("the end", lambda: fleet.job(job).state == "succeeded")
    assert f"reached at {after}\n" in fleet.log(job, worker)
