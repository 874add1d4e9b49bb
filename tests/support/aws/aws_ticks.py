"""A fleet that the real reconciler keeps on the AWS fake. Agents join as soon as EC2 lists their hosts as running."""

from __future__ import annotations

import time
from typing import Any

from spotfleet.dispatcher.cloud.events import CloudEventListener
from spotfleet.fleet.domain.events import Event
from spotfleet.fleet.domain.state import HostState
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.planner.plan import Wait
from spotfleet.fleet.reconcile import Action, Calls, Observed, Wanted, create, tick
from spotfleet.model import CloudState, Market, Need, Nodes, Offer, Role
from spotfleet.providers import Boot
from spotfleet.providers.aws import AwsProvider
from tests.support.aws.aws_hosts import FLEET, USERS

G5 = Need(accelerator="A10G", accelerator_count=1, instance_type="g5.xlarge")


class Fleet:
    """`wait(seconds)` moves the reconciler's clock, not EC2's."""

    def __init__(self, cloud: Any, provider: AwsProvider, ledger: Ledger, hosts: int, **wanted: Any) -> None:
        self.cloud, self.provider, self.ledger = cloud, provider, ledger
        self.wanted = Wanted(FLEET, Role.WORKER, hosts, (G5,), tags=USERS, **wanted)
        self.ear = CloudEventListener(provider, FLEET, lambda: ledger.state().hosts, lambda: None)
        self.ahead_s = 0.0
        self.done: list[Action] = []
        create(ledger, provider, FLEET, Nodes(1, hosts, 9), self.now)

    @property
    def now(self) -> float:
        return time.time() + self.ahead_s

    @property
    def rows(self) -> list[Event]:
        return [event for _, event in self.ledger.events()]

    def wait(self, seconds: float) -> None:
        self.ahead_s += seconds

    def tick(self, after_s: float = 1.0) -> list[Action]:
        self.wait(after_s)
        self.ear.receive(self.provider.poll_events(FLEET, 0.0), time.monotonic())
        hosts = self.ledger.state().hosts
        living = {i.id for i in self.cloud.instances() if i.state == "running"}
        running = {h.request_id: f"{h.provider_id}/{len(h.runs)}" for h in hosts
                   if h.cloud is CloudState.RUNNING and h.provider_id in living}
        released = frozenset(h.request_id for h in hosts if h.state is HostState.DRAINING)
        observed = Observed(running, self.ear.notices(time.monotonic()), released)
        self.done = tick(self.wanted, self.ledger, self.provider, boot, observed, self.now, Calls(scout=True))
        return self.done

    def run(self, ticks: int = 6, every_s: float = 1.0) -> list[Action]:
        for _ in range(ticks):
            self.tick(every_s)
        return self.done

    def let_a_second_pass(self) -> None:
        """EC2's times are of whole seconds: a run that ends in the one in which it began is none."""
        until = int(time.time()) + 1
        while time.time() < until:
            time.sleep(0.02)

    def up(self) -> list[str]:
        return sorted(h.request_id for h in self.ledger.state().hosts if h.state is HostState.UP)

    def zones(self) -> list[str]:
        """Of the instances that live, workers' as EC2 has them."""
        return sorted(i.zone for i in self.cloud.instances())

    def instance(self, host: str) -> Any:
        known = self.ledger.state().host(host)
        assert known is not None
        return self.cloud.instance(known.provider_id)

    @property
    def waits(self) -> str:
        return "; ".join(a.why for a in self.done if isinstance(a, Wait))


def boot(host: str, offer: Offer) -> Boot:
    assert offer.market is Market.SPOT
    return Boot("a.b", {"boot.json": host})
