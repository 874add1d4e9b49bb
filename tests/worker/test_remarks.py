"""What the dispatcher has a worker write into its log, and where a worker listens as its host's address changes."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from spotfleet.protocol.messages import Assignment, WorkerOrders, WorkerReport
from spotfleet.worker.member import Member
from spotfleet.worker.store import StoreClient


class Report:
    """What `control.Control` is to a member that only reports."""

    def __init__(self) -> None:
        self.report = WorkerReport("h/0/1", "job")
        self.said: list[dict[str, Any]] = []

    def update(self, **fields: Any) -> None:
        self.said.append(fields)


class Group:
    generation = 4
    change_waits = aborted = False

    def abort(self) -> None:
        self.aborted = True


def no_world(assignment: Assignment, address: str) -> Group:
    raise AssertionError("nobody enters a generation here")


@pytest.fixture
def member() -> Member:
    made = Member(no_world, {"SPOTFLEET_JOB_KEY": "key", "SPOTFLEET_ADDRESS": "127.0.0.5"})
    made.control = Report()  # type: ignore[assignment]
    made._listen("127.0.0.5")
    return made


def test_a_remark_is_written_once_and_another_one_too(member: Member, capsys: pytest.CaptureFixture[str]):
    for remark in ("slow", "slow", "", "slow", "slower"):
        member._on_orders(WorkerOrders(remark=remark))
    assert capsys.readouterr().err == "spotfleet: slow\nspotfleet: slower\n"


def test_a_worker_listens_where_its_host_is_by_now_and_a_group_at_an_address_that_is_left_stands(member: Member):
    member.group = group = Group()  # type: ignore[assignment]
    for _ in range(2):
        member._on_orders(WorkerOrders(address="127.0.0.6"))
    (said,) = member.control.said  # type: ignore[union-attr]
    address, _, port = said["store"].rpartition(":")
    assert address == member.address == "127.0.0.6"
    StoreClient(address, int(port), "a", 10.0, "key").close()
    StoreClient("127.0.0.5", member._stores[0].port, "a", 10.0, "key").close()  # for who stands in an older generation
    assert not group.aborted


def test_a_group_at_an_address_that_the_host_has_lost_is_over(member: Member, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.worker.member.holds", lambda address: address != "127.0.0.5")
    member.group = group = Group()  # type: ignore[assignment]
    member._on_orders(WorkerOrders(address="127.0.0.6"))
    assert group.aborted
    assert member.control.said[1:] == [{"failed": 4, "generation": 0}]  # type: ignore[union-attr]


def test_an_address_that_the_host_does_not_have_yet_is_tried_again_and_told_once(
        member: Member, capsys: pytest.CaptureFixture[str]):
    for _ in range(3):
        member._on_orders(WorkerOrders(address="192.0.2.1"))
    assert member.address == "127.0.0.5"
    assert capsys.readouterr().err.count("cannot listen on 192.0.2.1") == 1


def test_a_worker_that_could_not_listen_at_its_start_does_when_its_host_has_an_address():
    late = Member(no_world, {"SPOTFLEET_JOB_KEY": "key", "SPOTFLEET_ADDRESS": "192.0.2.1"})
    late.control = Report()  # type: ignore[assignment]
    assert late._listen(late.address) == ""
    late._on_orders(WorkerOrders(address="::1"))
    (said,) = late.control.said  # type: ignore[union-attr]
    assert said["store"].startswith("[::1]:")
    with socket.create_connection(("::1", int(said["store"].rpartition(":")[2])), timeout=10):
        pass
