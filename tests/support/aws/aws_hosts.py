"""Hosts of provider aws on the fake: how tests ask for them, and what EC2 then says by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from spotfleet.model import CloudHost, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.aws import AwsProvider

FLEET = "f"
LONG = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1")
WORKER_THINGS = ["fleet", "instance", "network-interface", "spot-instances-request", "volume"]
USERS = {"team": "vision", "cost-center": "42"}
G5 = Offer("aws", "us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT, 1, 352_100, 1_006_000, "A10G")


def pool(zone: str = "us-east-1a", kind: str = "g5.xlarge", market: Market = Market.SPOT, slots: int = 1,
         accelerator: str = "A10G") -> Offer:
    price = 352_100 if market is Market.SPOT else 1_006_000
    return Offer("aws", zone[:-1], zone, kind, market, slots, price, 1_006_000, accelerator)


A, B, C = (pool(f"us-east-1{z}") for z in "abc")
DISPATCHERS = pool(kind="t3.small", market=Market.ON_DEMAND, accelerator="")


def request(offer: Offer = A, request_id: str = "f-1", role: Role = Role.WORKER, **more: Any) -> LaunchRequest:
    return LaunchRequest(request_id, FLEET, role, offer, more.pop("boot", Boot("a.b", {"boot.json": request_id})),
                         tags=USERS, **more)


def dispatcher(request_id: str = "f-d-0", **more: Any) -> LaunchRequest:
    return request(DISPATCHERS, request_id, Role.DISPATCHER, **more)


def prepared(aws: Callable[..., AwsProvider], **spec: Any) -> AwsProvider:
    """Of a fleet that has what its hosts need; `aws` is the fixture."""
    provider = aws(ssh_from=("192.0.2.1/32",), **spec)
    provider.prepare(FLEET, USERS, lambda line: None)
    return provider


def line(provider: AwsProvider, request_id: str = "f-1", fleet: str = FLEET) -> CloudHost:
    (found,) = (h for h in provider.hosts(fleet) if h.request_id == request_id)
    return found


def raw(cloud: Any, region: str = "us-east-1", **filters: str) -> list[dict[str, Any]]:
    """Instances as EC2 describes them, ended ones apart."""
    asked = [{"Name": k.replace("__", ":").replace("_", "-"), "Values": [v]} for k, v in filters.items()]
    pages = cloud.client("ec2", region).get_paginator("describe_instances").paginate(Filters=asked)
    return [i for page in pages for r in page["Reservations"] for i in r["Instances"]
            if i["State"]["Name"] != "terminated"]


def requests(cloud: Any, region: str = "us-east-1") -> list[dict[str, Any]]:
    """Spot requests that may still launch something."""
    found = cloud.client("ec2", region).describe_spot_instance_requests()["SpotInstanceRequests"]
    return [r for r in found if r["State"] in ("open", "active", "disabled")]


def hosts_things(cloud: Any) -> list[str]:
    """What there is of hosts, by kind; what the fleet itself has is left out."""
    kinds = ("security-group", "role", "instance-profile", "placement-group")
    return sorted(t.kind for t in cloud.everything() if not t.kind.startswith(kinds))


def asked(cloud: Any, action: str) -> int:
    """How often, answered or not."""
    return sum(c.action == action for c in cloud.calls)
