"""What `spotfleet ray` refuses before anything starts, and what it then submits."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spotfleet.api.home import FleetRecord, Home
from spotfleet.api.ray_cluster import RayOnFleet, RayStart
from spotfleet.errors import UsageError
from spotfleet.model import ContainerSpec, FleetSpec, JobSpec, Need, RaySpec
from spotfleet.protocol.messages import FleetStatus, HostStatus
from spotfleet.protocol.ray_cluster import RayStatus

RAY = FleetSpec("f", ray=RaySpec())
FLEET = FleetStatus("f", "up", "", 1, 2, 4, (HostStatus("f-1", "worker", "up", "p", 2, 0, 0),))
NO_CLUSTER = RayStatus()


@dataclass
class Client:
    """A dispatcher that takes every job."""

    fleet: FleetStatus = FLEET
    cluster: RayStatus = NO_CLUSTER
    given: list[tuple[JobSpec, dict[str, str], bool]] = field(default_factory=list)

    def status(self) -> FleetStatus:
        return self.fleet

    def ray(self) -> RayStatus:
        return self.cluster

    def submit(self, spec: JobSpec, secrets: dict[str, str], *, wait: bool) -> str:
        self.given.append((spec, secrets, wait))
        return "ray-1"


def cluster(tmp_path: Path, spec: FleetSpec = RAY, client: Any = None) -> RayOnFleet:
    return RayOnFleet(Home(tmp_path), FleetRecord(spec, "f", 0.0), {}, client or Client())


@pytest.mark.parametrize(("spec", "request_", "said"), [
    (FleetSpec("f"), RayStart(), "fleet f has no Ray: its file has no `ray`"),
    (replace(RAY, container=ContainerSpec("a")), RayStart(), "`container` and `ray` exclude each other"),
    (RAY, RayStart(gpus=1), "--gpus 1: the hosts of this fleet have no GPUs"),
    (replace(RAY, any_of=(Need(accelerator="A10G"),)), RayStart(gpus=4), "--gpus 4: the hosts of this fleet have 2"),
    (RAY, RayStart(hosts=(3, 2)), "--hosts: expected 1 <= MIN <= MAX, got 3:2"),
])
def test_an_impossible_cluster_is_refused_by_name(tmp_path: Path, spec, request_, said):
    client = Client()
    with pytest.raises(UsageError) as refused:
        cluster(tmp_path, spec, client).start(request_)
    assert said in str(refused.value) and refused.value.hint and not client.given


def test_without_ray_here_a_local_fleet_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    with pytest.raises(UsageError, match="Ray is not installed here") as refused:
        cluster(tmp_path).start()
    assert "[ray]" in refused.value.hint


def test_the_cluster_is_a_job_on_whole_hosts_with_a_token_of_its_own(tmp_path: Path):
    client = Client()
    made = cluster(tmp_path, client=client)
    assert made.start(RayStart(priority=3)) == made.start(RayStart(hosts=(2, 2))) == "ray-1"
    (spec, secrets, wait), (other, more, _) = client.given
    assert (spec.kind, spec.per_host, spec.gang, spec.priority, wait) == ("ray", True, False, 3, False)
    assert (spec.min_workers, spec.max_workers, other.min_workers, other.max_workers) == (1, 4, 2, 2)
    assert len(secrets["RAY_AUTH_TOKEN"]) == 64 and secrets["RAY_AUTH_TOKEN"] != more["RAY_AUTH_TOKEN"]
    assert secrets["RAY_AUTH_TOKEN"] not in str(spec)


def test_a_fleet_that_may_have_no_host_takes_a_cluster_without_one(tmp_path: Path):
    client = Client(replace(FLEET, min=0, target=0, hosts=()))
    cluster(tmp_path, client=client).start()
    assert client.given[0][2]


def test_a_script_needs_a_cluster(tmp_path: Path):
    with pytest.raises(UsageError, match="no Ray cluster runs on this fleet"):
        cluster(tmp_path).submit(["x.py"])
    with pytest.raises(UsageError, match="nothing to run"):
        cluster(tmp_path).submit([])
    assert cluster(tmp_path).stop() == ""
