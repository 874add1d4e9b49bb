"""Everything that exists, straight from the state and not through the API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws.catalog import ACCOUNT, REGIONS

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud


@dataclass(frozen=True)
class Thing:
    kind: str  # as tag specifications call it, where they do
    region: str  # "" of the account
    id: str
    name: str = ""
    tags: dict[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.id}"
            + (f" ({self.name})" if self.name else "")
            + (f" in {self.region}" if self.region else "")
        )


def everything(cloud: AwsCloud, usual: bool) -> list[Thing]:
    """`usual`: also what every account has."""
    found = []
    for region in REGIONS:
        if region in cloud.furnished:
            found += list(_of_ec2(cloud, region))
            if not usual:
                found = [t for t in found if t.region != region or t.id not in cloud.regions[region].usual]
        found += list(_of_messages(cloud, region))
    found += [t for t in _of_account(cloud) if usual or not t.name.startswith("AWSServiceRoleFor")]
    return found


def _of_ec2(cloud: AwsCloud, region: str) -> Iterator[Thing]:
    state, backend = cloud.regions[region], cloud.backend(region)

    def thing(kind: str, id: str, name: str = "") -> Thing:
        return Thing(kind, region, id, name, dict(backend.tags.get(id, {})))

    for machine in state.machines.values():
        if machine.living:
            yield thing("instance", machine.id, machine.state)
    for request in state.requests.values():
        if request.live:
            yield thing("spot-instances-request", request.id, request.now.code)
    for fleet in state.fleets.values():  # an instant fleet without instances is a mere record
        if any(i in state.machines and state.machines[i].living for i in fleet.ids):
            yield thing("fleet", fleet.id)
    for group in state.placement_groups.values():
        yield thing("placement-group", group.id, group.name)
    for made in backend.launch_templates.values():
        yield thing("launch-template", made.id, made.name)
    for volume in backend.volumes.values():
        yield thing("volume", volume.id, volume.status)
    for eni in backend.enis.values():
        yield thing("network-interface", eni.id, eni.status)
    for by_vpc in backend.groups.values():
        for group in by_vpc.values():
            yield thing("security-group", group.id, group.name)
    for key in backend.key_pairs.values():
        yield thing("key-pair", key.id, key.key_name)
    for address in backend.addresses:
        yield thing("elastic-ip", address.allocation_id or address.public_ip, address.public_ip)
    for kind, things in (
        ("vpc", backend.vpcs),
        ("internet-gateway", backend.internet_gateways),
        ("route-table", backend.route_tables),
        ("nat-gateway", [id for id, gateway in backend.nat_gateways.items() if gateway.state != "deleted"]),
        ("vpc-endpoint", [id for id, point in backend.vpc_end_points.items() if point.state != "deleted"]),
        ("snapshot", backend.snapshots),
    ):
        for id in things:
            yield thing(kind, id)
    for by_zone in backend.subnets.values():
        for id in by_zone:
            yield thing("subnet", id)


def _of_messages(cloud: AwsCloud, region: str) -> Iterator[Thing]:
    if cloud.used("sqs"):
        from moto.sqs.models import sqs_backends

        for queue in sqs_backends[ACCOUNT][region].queues.values():
            yield Thing("queue", region, queue.queue_arn, queue.name, dict(queue.tags or {}))
    if cloud.used("events"):
        from moto.events.models import events_backends

        backend = events_backends[ACCOUNT][region]
        for bus in backend.event_buses.values():
            for rule in bus.rules.values():
                yield Thing(
                    "rule", region, rule.arn, rule.name, _pairs(backend.tagger.list_tags_for_resource(rule.arn))
                )


def _of_account(cloud: AwsCloud) -> Iterator[Thing]:
    from moto.iam.models import iam_backends

    backend = iam_backends[ACCOUNT]["aws"]
    for role in backend.roles.values():
        yield Thing("role", "", role.name, role.name, _plain(role.tags))
    for profile in backend.instance_profiles.values():
        yield Thing("instance-profile", "", profile.name, profile.name, _plain(profile.tags))
    if cloud.used("s3"):
        from moto.s3.models import s3_backends

        for name, bucket in s3_backends[ACCOUNT]["aws"].buckets.items():
            yield Thing("bucket", "", name, f"{len(bucket.keys)} objects")


def _plain(tags: Any) -> dict[str, str]:
    if isinstance(tags, list):
        return {t["Key"]: t["Value"] for t in tags}
    return {k: v["Value"] if isinstance(v, dict) else v for k, v in (tags or {}).items()}


def _pairs(told: dict[str, Any]) -> dict[str, str]:
    return {t["Key"]: t["Value"] for t in told.get("Tags", [])}
