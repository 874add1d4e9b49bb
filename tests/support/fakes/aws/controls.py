"""How a test steers the cloud: market, instances, rights and faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws import catalog, imds
from tests.support.fakes.aws.birth import new_id, user_data
from tests.support.fakes.aws.catalog import ACCOUNT, Image, region_of
from tests.support.fakes.aws.inventory import Thing, everything
from tests.support.fakes.aws.market import CapacityReservation
from tests.support.fakes.aws.state import Machine, Seen, SpotRequest
from tests.support.fakes.kit.requests import Call, Fault


@dataclass(frozen=True)
class InstanceView:
    """An instance at one moment."""

    id: str
    region: str
    zone: str
    type: str
    market: str
    state: str
    image: str
    user_data: bytes = field(repr=False)
    private_ip: str
    public_ip: str
    mac: str
    subnet: str
    groups: tuple[str, ...]
    tags: dict[str, str]
    launch_index: int
    profile: str
    key_name: str
    shutdown_behavior: str
    request_id: str  # id of its spot request
    request_state: str
    request_code: str
    run: int
    state_reason: str
    root_gib: int


class Controls:
    """Of an `AwsCloud`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def user(self, name: str) -> tuple[str, str]:
        """(access key, secret key) of another principal."""
        return self.rights.user(name)

    def allow(self, principal: str, actions: Iterable[str] | None) -> None:
        self.rights.allow(principal, actions)

    def deny(self, principal: str, actions: Iterable[str]) -> None:
        self.rights.deny(principal, actions)

    def attach(self, principal: str, document: dict[str, Any] | None) -> None:
        self.rights.attach(principal, document)

    def guardrail(self, *statements: dict[str, Any]) -> None:
        self.rights.guardrails = list(statements)

    def expire(self, principal: str, expired: bool = True) -> None:
        (self.rights.expired.add if expired else self.rights.expired.discard)(principal)

    # ---- faults and what was asked

    @property
    def calls(self) -> list[Call]:
        return self.gate.calls

    def actions(self, principal: str = "") -> set[str]:
        return {c.action for c in self.calls if not principal or c.principal == principal}

    def forget_calls(self) -> None:
        self._services = frozenset(self._services | {c.service for c in self.gate.calls})
        self.gate.calls = []

    def fault(
        self,
        action: str,
        code: str = "",
        message: str = "",
        lost: str = "",
        delay_s: float = 0.0,
        times: int | None = 1,
    ) -> None:
        self.gate.faults.append(Fault(action, code, message, lost, delay_s, times))

    def faults_off(self) -> None:
        self.gate.faults.clear()

    # ---- the market

    def set_room(self, zone: str, type: str, free: int | None, market: str = "spot") -> None:
        with self.lock:
            self.market.set_room((zone, type, market), free)
        self.noise()
        self.tick()

    def room(self, zone: str, type: str, market: str = "spot") -> int | None:
        return self.market.room((zone, type, market))

    def reserve(self, id: str, zone: str, type: str, total: int, **more: Any) -> None:
        """A capacity reservation; `more` are fields of `CapacityReservation`."""
        with self.lock:
            made = self.reservations[id] = CapacityReservation(id, zone, type, total, **more)
            self.market.set_room(made.pool, total)

    def set_price(self, zone: str, type: str, usd: float) -> None:
        with self.lock:
            self.market.set_price(zone, type, usd, self.now())

    def price(self, zone: str, type: str) -> float:
        return self.market.price(zone, type, self.now())

    @staticmethod
    def on_demand_usd(type: str, region: str) -> float:
        return catalog.on_demand_usd(type, region)

    def set_quota(self, region: str, family: str, market: str, vcpus: int) -> None:
        assert family in catalog.FAMILIES, family
        self.market.quotas[region, family, market] = vcpus
        self.tick()

    def set_default_key(self, region: str, arn: str) -> None:
        self.regions[region].default_key = arn

    def usage(self, region: str, family: str, market: str) -> int:
        return self.market.usage(self.regions[region], family, market)

    def invoice(self) -> dict[str, float]:
        """Instance -> dollars so far, by EC2's rules: by the second, a minute at least, and nothing for a run that EC2
        itself interrupts within an hour. The price is today's: tests that move it have to know."""
        self.tick()
        with self.lock:
            return {m.id: self._bill(m) for s in self.regions.values() for m in s.machines.values()}

    def _bill(self, machine: Machine) -> float:
        order, total, begun = machine.order, 0.0, None
        usd_h = (self.price(order.zone, order.type) if order.market == "spot"
                 else self.on_demand_usd(order.type, region_of(order.zone)))
        for seen in (*machine.history, Seen(self.now(), "now")):
            if seen.name == "running":
                begun = seen.at
            elif begun is not None:
                length = seen.at - begun
                if not (seen.code.startswith("Server.Spot") and length <= 3600):
                    total += max(60.0, length) * usd_h / 3600
                begun = None
        return total

    # ---- instances

    def find(self, id: str) -> Machine | None:
        return next((s.machines[id] for s in self.regions.values() if id in s.machines), None)

    def machine(self, id: str) -> Machine:
        found = self.find(id)
        if found is None:
            raise KeyError(id)
        return found

    def requests(self, region: str = "") -> list[SpotRequest]:
        return [r for n, s in self.regions.items() if region in ("", n) for r in s.requests.values()]

    def view(self, machine: Machine) -> InstanceView:
        order, request = machine.order, machine.request
        main = machine.nics.get(0)
        roots = [v for v in order.volumes if v["DeviceName"] == self.images[order.image].root]
        return InstanceView(
            machine.id,
            region_of(order.zone),
            order.zone,
            order.type,
            order.market,
            machine.state,
            order.image,
            user_data(order),
            main.private_ip_address if main else "",
            machine.public_ip(),
            main.mac_address if main else "",
            order.subnet.id,
            tuple(g.id for g in order.groups),
            machine.tags,
            machine.launch_index,
            order.profile.name if order.profile else "",
            order.key_name,
            order.shutdown,
            request.id if request else "",
            request.state if request else "",
            request.now.code if request else "",
            machine.run,
            next((s.code for s in reversed(machine.history) if s.code), ""),
            int(roots[0]["VolumeSize"]) if roots else 0,
        )

    def instances(self, region: str = "", **tags: str) -> list[InstanceView]:
        self.tick()
        with self.lock:
            found = [m for n, s in self.regions.items() if region in ("", n) for m in s.machines.values() if m.living]
            return [self.view(m) for m in found if tags.items() <= m.tags.items()]

    def instance(self, id: str) -> InstanceView:
        self.tick()
        with self.lock:
            return self.view(self.machine(id))

    def interrupt(self, id: str, notice_s: float | None = None, room: int | None = 0) -> None:
        with self.lock:
            self.life.interrupt(self.machine(id), self.notice_s if notice_s is None else notice_s, room)

    def take(self, id: str, room: int | None = 0) -> None:
        with self.lock:
            self.life.interrupt(self.machine(id), None, room)

    def rebalance(self, id: str) -> None:
        with self.lock:
            machine = self.machine(id)
            machine.rebalance_at = self.now()
            self.bus.recommended(machine)

    def schedule(self, id: str, code: str, after_s: float, state: str = "active") -> None:
        with self.lock:
            self.machine(id).events.append(
                {
                    "Code": code,
                    "at": self.now() + after_s,
                    "EventId": new_id("instance-event"),
                    "State": state,
                    "Description": f"scheduled {code.replace('system-', '')}",
                }
            )

    def guest_shutdown(self, id: str) -> None:
        with self.lock:
            self.life.guest_shutdown(self.machine(id))

    def metadata(
        self, id: str, path: str, method: str = "GET", headers: dict[str, str] | None = None, hops: int = 1
    ) -> tuple[int, bytes]:
        self.tick()
        with self.lock:
            return imds.answer(self, self.machine(id), path, method, headers or {}, hops)

    def metadata_down(self, id: str, down: bool = True) -> None:
        self.machine(id).deaf = down

    def add_image(self, id: str, name: str = "", architecture: str = "x86_64", size_gib: int = 8,
                  made: str = "2026-11-01T00:00:00.000Z", tags: dict[str, str] | None = None) -> None:
        """An image of the account's own."""
        self.images[id] = Image(id, name or id, ACCOUNT, architecture, size_gib=size_gib, made=made,
                                tags=tuple((tags or {}).items()))

    def everything(self, owned: bool = True) -> list[Thing]:
        """All that exists; without what every account has, unless not `owned`."""
        self.tick()
        with self.lock:
            return everything(self, usual=not owned)
