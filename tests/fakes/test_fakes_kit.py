"""The finite cloud under the fakes, by a cloud of forty lines on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.fakes.kit.cloud import FiniteCloud
from tests.support.fakes.kit.machines import Machine, MachineLife
from tests.support.fakes.kit.market import Pool, Pools
from tests.support.fakes.kit.requests import Fault, Lost, RequestScript

A: Pool = ("north-1", "gpu", "spot")


class Vm(Machine):
    pool = A


class Refused(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class Small(FiniteCloud, MachineLife):
    """A cloud with one pool, whose API is two methods."""

    pending_s, ending_s = 2.0, 1.0

    def __init__(self) -> None:
        self.at = 1000.0
        super().__init__(lambda: self.at)
        self.cloud, self.market = self, Pools(self.at, lambda zone, kind: 0.25, 100)
        self.script = RequestScript(Refused)
        self.vms: list[Vm] = []

    def insert(self) -> Vm:
        fault = self.script.before("insert")
        if not self.script.spend("insert", 3, 1.0, self.at):
            raise Refused("slow down")
        if not self.market.holds(A):
            raise Refused("full")
        vm = Vm(f"vm-{len(self.vms)}", self.at)
        self.vms.append(vm)
        self.market.take(vm)
        self.boot(vm)
        self.script.after(fault)
        return vm

    def pass_s(self, seconds: float) -> None:
        self.at += seconds
        self.tick()


@dataclass
class Runner:
    seen: list[str] = field(default_factory=list)

    def run(self, vm: Vm) -> None:
        self.seen.append(f"run {vm.id}")

    def terminate(self, vm: Vm) -> None:
        self.seen.append(f"terminate {vm.id}")


def test_a_place_is_taken_from_the_launch_to_the_end_and_states_take_their_time():
    cloud = Small()
    cloud.market.set_room(A, 1)
    vm = cloud.insert()
    with pytest.raises(Refused):
        cloud.insert()
    states = [vm.state]
    for act in (lambda: cloud.pass_s(2.0), lambda: cloud.terminate(vm, ("user", "said so"), "user"),
                lambda: cloud.pass_s(1.0)):
        act()
        states.append(vm.state)
    assert states == ["pending", "running", "shutting-down", "terminated"]
    assert (vm.seen(1001.0).name, vm.seen(1002.5).name, vm.ended_at, vm.seen(1003.0).code) == (
        "pending", "shutting-down", 1003.0, "user")
    assert cloud.market.room(A) == 1


def test_the_cloud_takes_a_machine_at_the_end_of_its_notice_and_keeps_the_place():
    cloud = Small()
    cloud.market.set_room(A, 1)
    vm = cloud.insert()
    cloud.pass_s(2.0)
    cloud.reclaim(vm, 30.0, 0, "terminate", lambda: cloud.terminate(vm, ("taken", ""), "cloud"))
    cloud.pass_s(29.0)
    assert (vm.state, vm.notice) == ("running", ("terminate", 1032.0))
    cloud.pass_s(2.0)
    cloud.pass_s(1.0)
    assert (vm.state, cloud.market.room(A)) == ("terminated", 0)


def test_a_lost_answer_leaves_the_machine_and_a_lost_request_none():
    cloud = Small()
    cloud.script.faults += [Fault("ins*", lost="before"), Fault("insert", lost="after"), Fault("insert", code="denied")]
    machines = []
    for kind in (Lost, Lost, Refused):
        with pytest.raises(kind):
            cloud.insert()
        machines.append(len(cloud.vms))
    assert machines == [0, 1, 1]


def test_requests_beyond_the_rate_are_refused_until_time_has_passed():
    cloud = Small()
    for _ in range(3):
        cloud.insert()
    with pytest.raises(Refused):
        cloud.insert()
    cloud.pass_s(1.0)
    assert cloud.insert().id == "vm-3"


def test_a_stopped_machine_gives_its_place_back_and_the_price_of_any_moment_is_known():
    cloud = Small()
    cloud.market.set_room(A, 1)
    vm = cloud.insert()
    cloud.pass_s(2.0)
    cloud.stop(vm, ("user", ""), "user")
    cloud.pass_s(1.0)
    assert (vm.state, cloud.market.room(A)) == ("stopped", 1)
    cloud.market.set_price("north-1", "gpu", 0.5, 1003.0)
    assert [cloud.market.price("north-1", "gpu", at) for at in (1002.0, 1003.0)] == [0.25, 0.5]
    assert (cloud.market.quota("north", "G", "spot"), cloud.market.history("north-1", "gpu")[0][1]) == (100, 0.25)


def test_the_runner_gets_each_order_in_turn():
    cloud = Small()
    cloud.runner = runner = Runner()
    cloud.begin()
    try:
        vm = cloud.insert()
        cloud.pass_s(2.0)
        cloud.terminate(vm, ("user", ""), "user")
        cloud.settle()
    finally:
        cloud.end()
    assert (runner.seen, cloud.runner_errors) == ([f"run {vm.id}", f"terminate {vm.id}"], [])
