"""A launch by the kit's steps, at a cloud that makes an interface, then a machine, as Azure does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.providers.kit import launching
from spotfleet.providers.kit.launching import LaunchSteps, launch


class Killed(BaseException):
    """The end of the process, in the middle."""


@dataclass
class Account:
    """Interfaces are used up by machines; a machine without an interface is refused, as one that is not known yet."""

    interfaces: set[str] = field(default_factory=set)
    machines: list[str] = field(default_factory=list)
    late: int = 0  # requests until an interface is known
    full: bool = False
    calls: Iterator[bool] = field(default_factory=lambda: iter(()))

    def call(self) -> None:
        """Begin or end a call: the process may end here."""
        if next(self.calls, False):
            raise Killed


class Steps(LaunchSteps):
    def __init__(self, account: Account) -> None:
        self.account = account

    def exists(self) -> bool:
        return "f-1" in self.account.machines

    def prepare(self) -> None:
        self.account.call()
        self.account.interfaces.add("f-1")
        self.account.call()

    def ask(self) -> None:
        self.account.call()
        if self.account.late:
            self.account.late -= 1
            raise SpotfleetError("no such interface")
        if self.account.full:
            raise NoCapacity("full")
        self.account.machines.append("f-1")
        self.account.call()

    def not_known_yet(self, error: SpotfleetError) -> bool:
        return str(error) == "no such interface"

    def clean_up(self, refusal: SpotfleetError) -> None:
        self.account.call()
        self.account.interfaces.discard("f-1")

    def served(self) -> None:
        self.account.call()
        self.account.interfaces.discard("f-1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PAUSE_S", 0.0)


@pytest.mark.parametrize("full", [False, True])
def test_a_process_that_ends_at_any_call_doubles_and_leaves_nothing_once_another_repeats_the_launch(full: bool):
    for at in range(6):
        account = Account(full=full, calls=iter([False] * at + [True]))
        for _ in range(3):
            try:
                launch(Steps(account))
            except (Killed, NoCapacity):
                pass
        assert (account.machines, account.interfaces) == ([] if full else ["f-1"], set()), at


def test_what_was_just_made_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    account = Account(late=3)
    launch(Steps(account))
    assert account.machines == ["f-1"]
    monkeypatch.setattr(launching, "VISIBLE_S", -1.0)
    with pytest.raises(SpotfleetError, match="no such interface"):
        launch(Steps(Account(late=1)))


def test_an_answer_that_was_lost_keeps_what_the_retry_needs():
    class Lost(Steps):
        def ask(self) -> None:
            raise SpotfleetError("no answer")

    account = Account()
    with pytest.raises(SpotfleetError, match="no answer"):
        launch(Lost(account))
    assert account.interfaces == {"f-1"}
