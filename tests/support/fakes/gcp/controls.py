"""How a test steers the cloud: market, instances, rights, faults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.support.fakes.gcp import catalog, metadata, resources
from tests.support.fakes.gcp.state import Instance, InstanceView, Thing, last, relative
from tests.support.fakes.kit.machines import Seen
from tests.support.fakes.kit.requests import Call, Fault


class Controls:
    """Of a `GcpCloud`."""

    NUMBER = catalog.NUMBER
    preemption_rate = 0.05
    usual: frozenset[str] = frozenset()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    # ---- rights, faults, calls

    def allow(self, principal: str, permissions: Iterable[str] | None) -> None:
        """Only these from now on; None: everything."""
        if permissions is None:
            self.rights.allowed.pop(principal, None)
        else:
            self.rights.allowed[principal] = set(permissions)

    def deny(self, principal: str, permissions: Iterable[str]) -> None:
        self.rights.denied[principal] = set(permissions)

    def expire(self, principal: str, expired: bool = True) -> None:
        (self.rights.expired.add if expired else self.rights.expired.discard)(principal)

    @property
    def calls(self) -> list[Call]:
        return self.gate.calls

    def actions(self, principal: str = "") -> set[str]:
        return {c.action for c in self.calls if not principal or c.principal == principal}

    def forget_calls(self) -> None:
        self.gate.calls = []

    def fault(self, action: str, code: str = "", message: str = "", lost: str = "", delay_s: float = 0.0,
              times: int | None = 1) -> None:
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

    def set_price(self, zone: str, type: str, usd: float) -> None:
        with self.lock:
            self.market.set_price(zone, type, usd, self.now())

    def price(self, zone: str, type: str) -> float:
        return self.market.price(zone, type, self.now())

    @staticmethod
    def on_demand_usd(type: str, region: str) -> float:
        return catalog.usd_h(type, False, region=region)

    def set_quota(self, region: str, metric: str, limit: float) -> None:
        """`region`: "" for a quota of the project."""
        self.quotas[region, metric] = float(limit)

    def invoice(self) -> dict[str, float]:
        """Instance's name -> dollars so far, by the second, a minute at least; a Spot VM preempted in its first minute
        is free. The price is today's, and disks are left out."""
        self.tick()
        with self.lock:
            return {i.name: self._bill(i) for i in (*self.ended, *self.instances_by_path.values())}

    def _bill(self, instance: Instance) -> float:
        card, count = instance.gpus
        attached = (card, count) if not instance.kind.optimized else ("", 0)
        usd_h = catalog.usd_h(instance.kind.name, instance.market == "spot", *attached, region=instance.region)
        if instance.market == "spot" and not attached[1]:
            usd_h = self.price(instance.zone, instance.kind.name)
        total, begun = 0.0, None
        for seen in (*instance.history, Seen(self.now(), "now")):
            if seen.name == "running":
                begun = seen.at
            elif begun is not None:
                length = seen.at - begun
                if not (seen.transition == "system" and length < 60):
                    total += max(60.0, length) * usd_h / 3600
                begun = None
        return total

    # ---- instances

    def find(self, name: str) -> Instance | None:
        """By name or number; a living one first."""
        known = [*self.instances_by_path.values(), *reversed(self.ended)]
        return next((i for i in known if name in (i.name, i.id)), None)

    def machine(self, name: str) -> Instance:
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def view(self, instance: Instance) -> InstanceView:
        body = instance.body
        account = next(iter(body.get("serviceAccounts", ())), {"email": "", "scopes": []})
        nic = body["networkInterfaces"][0]
        return InstanceView(
            name=instance.name, id=instance.id, zone=instance.zone, type=instance.kind.name, market=instance.market,
            status=instance.status(self.now(), self.pending_s), state=instance.state, labels=dict(instance.labels),
            metadata=instance.metadata, private_ip=instance.network_ip(), public_ip=instance.public_ip(),
            mac=metadata.mac(instance.network_ip()),
            network=relative(nic["network"]), tags=tuple(body["tags"].get("items", ())),
            image=metadata.image_of(instance, self), disk_gb=int(body["disks"][0]["diskSizeGb"]),
            service_account=account["email"], scopes=tuple(account["scopes"]), accelerator=instance.gpus,
            run=instance.run, preempted=instance.preempted)

    def instances(self, **labels: str) -> list[InstanceView]:
        """Those that exist, TERMINATED ones, too."""
        self.tick()
        with self.lock:
            return [self.view(i) for i in self.instances_by_path.values()
                    if all(i.labels.get(k) == v for k, v in labels.items())]

    def instance(self, name: str) -> InstanceView:
        self.tick()
        with self.lock:
            return self.view(self.machine(name))

    def preempt(self, name: str, notice_s: float | None = -1.0, room: int | None = 0) -> None:
        """Compute Engine wants it back, after the notice that it asked for; `notice_s`: after this one, None: now.

        Its pool has `room` from now on. Status is STOPPING for `ending_s`, in which the guest may shut down.
        """
        with self.lock:
            found = self.machine(name)
            wait = (found.notice_s or None) if notice_s == -1.0 else notice_s
            self.life.preempt(found, wait, room)
        self.tick()

    def host_error(self, name: str) -> None:
        with self.lock:
            self.life.host_error(self.machine(name))

    def maintain(self, name: str, after_s: float = 60.0) -> None:
        with self.lock:
            self.life.maintain(self.machine(name), after_s)

    def guest_shutdown(self, name: str) -> None:
        with self.lock:
            self.life.guest_shutdown(self.machine(name))

    def metadata(self, name: str, target: str, method: str = "GET", headers: dict[str, str] | None = None,
                 body: bytes = b"") -> metadata.Answer:
        """Status (0: no answer), headers and body, of the metadata server of an instance."""
        self.tick()
        return metadata.answer(self, self.machine(name), target, method, headers or {}, body)

    def metadata_down(self, name: str, down: bool = True) -> None:
        self.machine(name).deaf = down
        self.noise_of(None)

    def admits(self, name: str, address: str, port: int) -> bool:
        """Do the firewall rules let TCP from this address to a port of the instance?"""
        with self.lock:
            return resources.admits(self, self.machine(name), address, port)  # type: ignore[arg-type]

    # ---- what there is

    def add_network(self, name: str, **more: Any) -> None:
        resources.add_network(self, name, **more)  # type: ignore[arg-type]
        self.usual = self.usual | {p for p in self.things if last(p) in (name, f"{name}-router")}

    def add_image(self, name: str, family: str = "", project: str = "", size_gb: int = 10,
                  driver: bool = False, labels: dict[str, str] | None = None, made: str = "") -> None:
        """An image of the project's own."""
        about = {"labels": tuple((labels or {}).items()), **({"made": made} if made else {})}
        self.images.append(catalog.Image(project or self.project, name, family, size_gb, driver, **about))

    def other_projects(self) -> set[str]:
        """Projects of images and shared networks, which are not the caller's."""
        return {i.project for i in self.images} | {p.split("/")[1] for p in self.things}

    def everything(self, owned: bool = True) -> list[Thing]:
        """All that exists; without what every project has, unless not `owned`."""
        self.tick()
        with self.lock:
            found = [Thing("instance", i.zone, i.name, dict(i.labels)) for i in self.instances_by_path.values()]
            for path, thing in self.things.items():
                place = "global" if "/global/" in path else path.split("/")[3]
                kind = path.split("/")[-2].removesuffix("s").replace("addresse", "address")
                if not owned or path not in self.usual:
                    found.append(Thing(kind, place, last(path), dict(thing.get("labels", {}))))
            found += [Thing("serviceAccount", "global", email, {}) for email in self.accounts
                      if not owned or email != self.default_account]
            found += [Thing("binding", "global", f"{b['role']} {m}", {}) for b in self.policy["bindings"]
                      for m in b["members"] if not owned or not m.endswith(f":{self.default_account}")]
            return found
