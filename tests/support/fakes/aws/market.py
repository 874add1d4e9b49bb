"""Quotas as EC2 counts them, over the kit's room and prices."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.catalog import TYPES
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.state import RegionState
from tests.support.fakes.kit.market import Pools


class Market(Pools):
    def __init__(self, begin: float) -> None:
        super().__init__(begin, _first_usd, catalog.ENDLESS_QUOTA)
        self.unapplied: set[tuple[str, str]] = set()  # (family, market) of quotas for which AWS lists the default only

    @staticmethod
    def usage(state: RegionState, family: str, market: str) -> int:
        """vCPUs: of spot also those that open requests would take."""

        def counts(kind: str) -> bool:
            return TYPES[kind].family == family

        used = sum(
            m.vcpus
            for m in state.machines.values()
            if m.market == market
            and counts(m.order.type)
            and m.state in ("pending", "running", "stopping", "shutting-down")
        )
        if market == "spot":
            used += sum(
                TYPES[r.order.type].vcpus for r in state.requests.values() if r.state == "open" and counts(r.order.type)
            )
        return used

    def within_quota(self, state: RegionState, kind: str, market: str, count: int, without: Iterable[str] = ()) -> None:
        """AwsError if `count` more of `kind` are too many; requests `without` are not counted."""
        family = TYPES[kind].family
        left = self.quota(state.name, family, market) - self.usage(state, family, market)
        left += sum(
            TYPES[r.order.type].vcpus
            for r in state.requests.values()
            if r.id in without and r.state == "open" and TYPES[r.order.type].family == family
        )
        if TYPES[kind].vcpus * count <= left:
            return
        if market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise AwsError(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of "
            f"{self.quota(state.name, family, market)} allows for the instance bucket that the specified "
            "instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request "
            "an adjustment to this limit.",
        )


def _first_usd(zone: str, kind: str) -> float:
    return round(catalog.on_demand_usd(kind, catalog.region_of(zone)) * catalog.SPOT_SHARE[zone[-1]], 4)
