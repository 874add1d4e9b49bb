"""Machines of a fake cloud, from boot to end. Under the cloud's lock.

    pending --> running --> stopping --> stopped --> pending ...
                   |                        |
                   '--> shutting-down --> terminated

A dialect shows these states under its cloud's names. Listings may show those of some time ago: `seen`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.fakes.kit.market import Pool, Pools

GOING = ("shutting-down", "terminated")
NOTHING = ("", "")


@dataclass(frozen=True)
class Seen:
    """A machine's state from some time on."""

    at: float
    name: str
    code: str = ""  # code of the reason
    message: str = ""
    transition: str = ""  # who caused it, and when
    public_ip: str = ""


class Machine:
    """One machine. `pool` decides its room and price."""

    def __init__(self, id: str, at: float) -> None:
        self.id, self.born = id, at
        self.launched = at  # anew at each start
        self.run = 0  # boots so far
        self.history: list[Seen] = [Seen(at, "pending")]
        self.notice: tuple[str, float] | None = None  # what the cloud will do, and when
        self.ended_at: float | None = None
        self.room_held = False

    @property
    def pool(self) -> Pool:
        raise AssertionError("a dialect's machine knows its pool")

    @property
    def state(self) -> str:
        return self.history[-1].name

    @property
    def living(self) -> bool:
        return self.state != "terminated"

    @property
    def runs(self) -> bool:
        return self.state in ("pending", "running")

    def seen(self, at: float) -> Seen:
        """Its state then."""
        return next((s for s in reversed(self.history) if s.at <= at), self.history[0])

    def public_ip(self) -> str:
        return ""


class MachineLife:
    """`pending_s` and `ending_s` of the cloud: how long a machine boots, stops and ends."""

    cloud: Any

    # ---- for the dialect

    def changed(self, machine: Any, name: str) -> None:
        """Tell others of the new state, such as an event bus."""

    def has_stopped(self, machine: Any) -> None:
        """Free what a stopped machine does not keep."""

    def has_ended(self, machine: Any) -> None:
        """Remove what goes with a machine."""

    def said(self, by: str, now: float) -> str:
        """Return `Seen.transition`."""
        return by

    # ---- states

    def boot(self, machine: Any) -> None:
        """From pending to running."""
        def running() -> None:
            if machine.state != "pending" or machine.run != run:
                return
            self.become(machine, "running")
            self.cloud.order_runner("run", machine)

        machine.run += 1
        run = machine.run
        machine.launched = self.cloud.now()
        self.cloud.later(self.cloud.now() + self.cloud.pending_s, running)

    def become(self, machine: Any, name: str, reason: tuple[str, str] = NOTHING, by: str = "") -> None:
        now = self.cloud.now()
        transition = self.said(by, now) if by else ""
        last = machine.history[-1]
        code, message = reason
        if name in ("stopped", "terminated") and not code:
            code, message, transition = last.code, last.message, last.transition
        machine.history.append(Seen(now, name, code, message, transition, machine.public_ip()))
        self.changed(machine, name)

    def stop(self, machine: Any, reason: tuple[str, str], by: str, then: Callable[[], None] | None = None) -> None:
        if machine.state in ("stopping", "stopped", *GOING):
            return
        self.become(machine, "stopping", reason, by)
        self.cloud.order_runner("stop", machine)

        def stopped() -> None:
            if machine.state != "stopping":
                return
            self.has_stopped(machine)
            self.cloud.market.give_back(machine)
            machine.notice = None
            self.become(machine, "stopped")
            if then:
                then()

        self.cloud.later(self.cloud.now() + self.cloud.ending_s, stopped)

    def terminate(self, machine: Any, reason: tuple[str, str], by: str) -> None:
        if machine.state in GOING:
            return
        was_stopped = machine.state == "stopped"
        self.become(machine, "shutting-down", reason, by)
        self.cloud.order_runner("terminate", machine)
        self.terminating(machine, by)

        def terminated() -> None:
            self.has_ended(machine)
            if not was_stopped:
                self.cloud.market.give_back(machine)
            machine.ended_at = self.cloud.now()
            self.become(machine, "terminated")

        self.cloud.later(self.cloud.now() + self.cloud.ending_s, terminated)

    def terminating(self, machine: Any, by: str) -> None:
        """Act at the beginning of a machine's end."""

    def reclaim(self, machine: Any, notice_s: float | None, room: int | None, action: str,
                taken: Callable[[], None], warned: Callable[[], None] = lambda: None) -> None:
        """Take a machine's place back `notice_s` after a notice; None: now. The place is not free again: `room` is."""
        market: Pools = self.cloud.market
        market.set_room(machine.pool, room)
        machine.room_held = False
        if notice_s is None:
            taken()
            return
        ends = self.cloud.now() + notice_s
        machine.notice = (action, ends)
        warned()
        run = machine.run

        def due() -> None:
            if machine.run == run and machine.runs:
                taken()

        self.cloud.later(ends, due)


