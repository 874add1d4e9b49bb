"""What a worker says of peers that it cannot reach: nothing that only its own standstill or an old generation shows."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from spotfleet.addresses import joined
from spotfleet.protocol.messages import Assignment, WorkerOrders, WorkerReport
from spotfleet.worker import connectivity
from spotfleet.worker.member import Member


class Control:
    """What `control.Control` is to a member that enters generations and reports."""

    def __init__(self) -> None:
        self.cv, self.orders = threading.Condition(), WorkerOrders()
        self.report = WorkerReport("h/0/1", "job", store="127.0.0.1:9")
        self.unreached: tuple[str, ...] = ()

    def update(self, **fields: Any) -> None:
        self.unreached = fields.get("unreached", self.unreached)


class Group:
    def __init__(self) -> None:
        self.on_unreached: Any = None


def test_who_stands_still_while_its_peers_answer_misses_none_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connectivity, "ANSWER_S", -1.0)  # as after a SIGSTOP: the time was over before the first look
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert connectivity.unreached([("h/0/2", joined("127.0.0.1", listener.getsockname()[1]))]) == ()


def test_what_a_look_of_an_older_generation_finds_late_is_not_said_of_the_one_that_forms():
    member = Member(lambda assignment, address: Group(), {"SPOTFLEET_JOB_KEY": "key", "SPOTFLEET_ADDRESS": "127.0.0.1"})
    member.control = control = Control()  # type: ignore[assignment]
    old, new = enter(member, 1), enter(member, 2)
    old.on_unreached(("h/0/2 at 10.0.0.2",))
    assert control.unreached == ()
    new.on_unreached(("h/0/2 at 10.0.0.2",))
    assert control.unreached == ("h/0/2 at 10.0.0.2",)
    enter(member, 3)
    assert control.unreached == ()


def test_once_a_generation_stands_nobody_is_said_to_be_missed(ranks):
    two = ranks(2, form=False)
    told: list[tuple[str, ...]] = []
    two.groups[0].on_unreached = told.append
    two.each(lambda group: group.form())
    assert told == [()]


def enter(member: Member, generation: int) -> Group:
    assignment = Assignment(generation, 0, ("h/0/1", "h/0/2"), "127.0.0.1:9")
    member.control.orders = WorkerOrders(assignment)  # type: ignore[union-attr]
    assert member.enter_generation()
    return member.group  # type: ignore[return-value]
