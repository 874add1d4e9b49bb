"""Where AWS machines stand: networks are found or named, groups are made closed, and nothing foreign is touched."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, UsageError
from spotfleet.model import Role
from spotfleet.providers.aws.account import network, ssh_ingress
from spotfleet.providers.aws.section.spec import AwsNetwork
from spotfleet.providers.kit import laptop

OFFICE = ("198.51.100.0/24",)


def prepare(provider, fleet: str = "f", **tags: str) -> list[str]:
    said: list[str] = []
    network.prepare(provider.account, fleet, tags, said.append)
    ssh_ingress.refresh(provider.account, fleet, said.append, tags)
    return said


def group(cloud, name: str, region: str = "us-east-1") -> dict[str, Any]:
    (found,) = cloud.client("ec2", region).describe_security_groups(
        Filters=[{"Name": "group-name", "Values": [name]}])["SecurityGroups"]
    return found


def rules(permissions: list[dict[str, Any]]) -> set[tuple]:
    """(protocol, first port, last port, from or to where)"""
    return {(p["IpProtocol"], p.get("FromPort"), p.get("ToPort"), where) for p in permissions for where in [
        *(r["CidrIp"] for r in p.get("IpRanges", ())), *(r["CidrIpv6"] for r in p.get("Ipv6Ranges", ())),
        *(u["GroupId"] for u in p.get("UserIdGroupPairs", ()))]}


def tags_of(thing: dict[str, Any]) -> dict[str, str]:
    return {t["Key"]: t["Value"] for t in thing["Tags"]}


# ---- finding


def test_without_names_a_fleet_stands_in_the_default_vpc_in_every_zone(cloud, aws):
    account = aws().account
    assert network.zones(account, "us-east-1") == {"us-east-1a", "us-east-1b", "us-east-1c"}
    (subnet,) = network.subnets(account, "us-east-1", "us-east-1b")
    found = cloud.client("ec2", "us-east-1").describe_subnets(SubnetIds=[subnet])["Subnets"][0]
    assert found["AvailabilityZone"] == "us-east-1b" and found["DefaultForAz"]


def drop_default_vpc(cloud, region: str) -> None:
    ec2 = cloud.client("ec2", region)
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    for subnet in ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc["VpcId"]]}])["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    ec2.delete_vpc(VpcId=vpc["VpcId"])


def test_a_region_without_a_default_vpc_says_how_to_make_one_and_offers_no_zone(cloud, aws):
    drop_default_vpc(cloud, "us-west-2")
    account = aws(regions=("us-west-2",)).account
    assert network.zones(account, "us-west-2") == frozenset()
    with pytest.raises(NeedsPerson, match="us-west-2: the account has no default VPC there") as told:
        network.site(account, "us-west-2")
    assert "aws ec2 create-default-vpc --region us-west-2" in told.value.hint and "aws.networks" in told.value.hint


@pytest.fixture
def vpc(cloud) -> dict[str, Any]:
    """A VPC of the user's as Terraform's module makes it: a small public subnet, roomier private ones with a NAT, one
    of them in another zone, and one without a way out. No subnet gives public addresses by itself. What has no route
    table of its own goes by the VPC's main one."""
    ec2 = cloud.client("ec2", "us-east-1")
    made = {"vpc": ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]}
    for name, cidr, zone in (("public", "10.9.1.0/24", "a"), ("private", "10.9.16.0/20", "a"),
                             ("far", "10.9.32.0/20", "b"), ("cellar", "10.9.48.0/20", "a")):
        made[name] = ec2.create_subnet(VpcId=made["vpc"], CidrBlock=cidr,
                                       AvailabilityZone=f"us-east-1{zone}")["Subnet"]["SubnetId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=made["vpc"])
    nat = ec2.create_nat_gateway(SubnetId=made["public"], ConnectivityType="private")["NatGateway"]["NatGatewayId"]
    (main,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [made["vpc"]]}])["RouteTables"]
    ec2.create_route(RouteTableId=main["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    for name, way in (("public", {"GatewayId": gateway}), ("cellar", {})):
        table = ec2.create_route_table(VpcId=made["vpc"])["RouteTable"]["RouteTableId"]
        ec2.associate_route_table(RouteTableId=table, SubnetId=made[name])
        if way:
            ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **way)
    return made


def test_in_a_named_vpc_machines_stand_where_the_route_leads_out_that_they_need(aws, vpc):
    networks = (AwsNetwork("us-east-1", vpc["vpc"]),)
    public = aws(networks=networks).account
    assert network.zones(public, "us-east-1") == {"us-east-1a"}  # elsewhere nothing reaches a dispatcher from outside
    assert network.subnets(public, "us-east-1", "us-east-1a") == (vpc["public"],)
    private = aws(networks=networks, public_addresses=False).account
    assert network.subnets(private, "us-east-1", "us-east-1a") == (vpc["private"],)
    assert network.subnets(private, "us-east-1", "us-east-1b") == (vpc["far"],)


def test_a_vpc_that_nothing_reaches_from_outside_is_refused_before_a_machine_is_paid_for(cloud, aws, vpc):
    ec2 = cloud.client("ec2", "us-east-1")
    ec2.delete_subnet(SubnetId=vpc["public"])
    account = aws(networks=(AwsNetwork("us-east-1", vpc["vpc"]),)).account
    with pytest.raises(NeedsPerson, match=r"no subnet of vpc-[0-9a-f]+ has a route") as told:
        network.site(account, "us-east-1")
    assert "public_addresses: false" in told.value.hint


def test_a_route_to_a_gateway_that_is_gone_is_no_way_out():
    gone = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1", "State": "blackhole"}
    assert network.way_out([gone]) == ""
    assert network.way_out([{**gone, "State": "active"}]) == network.PUBLIC
    assert network.way_out([{**gone, "State": "active", "GatewayId": "vgw-1"}]) == network.OTHER
    assert network.way_out([{"DestinationCidrBlock": "10.0.0.0/8", "GatewayId": "igw-1", "State": "active"}]) == ""


def test_named_subnets_are_used_as_they_are_and_zones_without_one_refuse_as_a_full_pool_does(aws, vpc):
    account = aws(networks=(AwsNetwork("us-east-1", subnets=(vpc["private"], vpc["public"])),)).account
    assert network.zones(account, "us-east-1") == {"us-east-1a"}
    assert set(network.subnets(account, "us-east-1", "us-east-1a")) == {vpc["private"], vpc["public"]}
    with pytest.raises(NoCapacity, match="us-east-1c") as told:
        network.subnets(account, "us-east-1", "us-east-1c")
    assert told.value.scope == "pool"


def test_the_roomiest_subnet_of_a_zone_comes_first(cloud, aws, vpc):
    ec2 = cloud.client("ec2", "us-east-1")
    roomy = ec2.create_subnet(VpcId=vpc["vpc"], CidrBlock="10.9.64.0/20", AvailabilityZone="us-east-1a")["Subnet"]
    account = aws(networks=(AwsNetwork("us-east-1", subnets=(vpc["public"], roomy["SubnetId"])),)).account
    assert network.subnets(account, "us-east-1", "us-east-1a") == (roomy["SubnetId"], vpc["public"])


def test_named_subnets_of_two_vpcs_are_refused(cloud, aws, vpc):
    other = cloud.client("ec2", "us-east-1").describe_subnets(
        Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"][0]
    account = aws(networks=(AwsNetwork("us-east-1", subnets=(vpc["public"], other["SubnetId"])),)).account
    with pytest.raises(NeedsPerson, match=f"{vpc['vpc']}"):
        network.site(account, "us-east-1")


def test_ten_thousand_questions_are_one(cloud, aws):
    provider = aws(ssh_from=OFFICE)
    prepare(provider)
    network.groups(provider.account, "us-east-1", "f", Role.WORKER)
    network.zones(provider.account, "us-east-1")
    cloud.forget_calls()
    for _ in range(10_000):
        network.groups(provider.account, "us-east-1", "f", Role.WORKER)
        network.zones(provider.account, "us-east-1")
        network.subnets(provider.account, "us-east-1", "us-east-1a")
    assert cloud.calls == []


# ---- groups


def test_machines_of_a_fleet_reach_each_other_and_nobody_else_reaches_them(cloud, aws):
    prepare(aws(ssh_from=OFFICE), team="blue")
    own = group(cloud, "spotfleet-f")
    assert rules(own["IpPermissions"]) == {("-1", None, None, own["GroupId"])}
    assert rules(own["IpPermissionsEgress"]) == {("-1", None, None, own["GroupId"]), ("-1", None, None, "0.0.0.0/0")}
    entry = group(cloud, "spotfleet-f-door")
    assert rules(entry["IpPermissions"]) == {("tcp", 22, 22, "198.51.100.0/24")}
    for one in (own, entry):
        tags = tags_of(one)
        assert float(tags.pop("spotfleet-since")) > 0
        assert tags == {"spotfleet": "f", "team": "blue"}


def test_only_the_dispatcher_stands_behind_the_door(cloud, aws):
    provider = aws(ssh_from=OFFICE)
    prepare(provider)
    own, entry = group(cloud, "spotfleet-f")["GroupId"], group(cloud, "spotfleet-f-door")["GroupId"]
    assert network.groups(provider.account, "us-east-1", "f", Role.WORKER) == (own,)
    assert network.groups(provider.account, "us-east-1", "f", Role.DISPATCHER) == (own, entry)


def test_preparing_again_makes_nothing_and_says_nothing(cloud, aws):
    first = prepare(aws(ssh_from=OFFICE, placement="cluster"))
    assert len(first) == 6  # two groups, three placement groups, the way in
    before = cloud.everything()
    cloud.forget_calls()
    assert prepare(aws(ssh_from=OFFICE, placement="cluster")) == []
    assert cloud.everything() == before
    assert {c.action for c in cloud.calls} <= {
        "ec2:DescribeVpcs", "ec2:DescribeSubnets", "ec2:DescribeRouteTables", "ec2:DescribeSecurityGroups",
        "ec2:DescribePlacementGroups"}


def test_two_laptops_that_prepare_at_once_make_everything_once(cloud, aws):
    cloud.new_lag_s = 0.3  # what is new is not listed at first
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(prepare, aws(ssh_from=OFFICE, placement="cluster")) for _ in range(4)]:
            done.result()
    names = sorted(t.name for t in cloud.everything())
    assert names == sorted(["spotfleet-f", "spotfleet-f-door", *(f"spotfleet-f-us-east-1{z}" for z in "abc")])
    assert len(group(cloud, "spotfleet-f-door")["IpPermissions"]) == 1


@pytest.mark.parametrize("name", ["spotfleet-f", "spotfleet-f-door"])
def test_a_group_of_that_name_that_is_not_ours_is_neither_used_nor_touched(cloud, aws, name):
    ec2 = cloud.client("ec2", "us-east-1")
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    ec2.create_security_group(GroupName=name, Description="somebody's", VpcId=vpc["VpcId"])
    before = group(cloud, name)
    provider = aws(ssh_from=OFFICE)
    with pytest.raises(NeedsPerson, match=f"there is a security group {name} that does not have the tag spotfleet=f"):
        prepare(provider)
    assert group(cloud, name) == before
    with pytest.raises(NeedsPerson, match="is not there"):
        network.groups(provider.account, "us-east-1", "f", Role.DISPATCHER)


def test_a_placement_group_of_that_name_that_is_not_ours_is_refused(cloud, aws):
    cloud.client("ec2", "us-east-1").create_placement_group(GroupName="spotfleet-f-us-east-1b", Strategy="spread")
    with pytest.raises(NeedsPerson, match="placement group spotfleet-f-us-east-1b"):
        prepare(aws(ssh_from=OFFICE, placement="cluster"))


def test_named_groups_are_used_and_nothing_is_made(cloud, aws, vpc):
    named = cloud.client("ec2", "us-east-1").create_security_group(
        GroupName="mine", Description="mine", VpcId=vpc["vpc"])["GroupId"]
    provider = aws(networks=(AwsNetwork("us-east-1", vpc["vpc"], security_groups=(named,)),))
    before = cloud.everything()
    assert prepare(provider) == []  # nor is anybody asked for the laptop's address
    assert network.groups(provider.account, "us-east-1", "f", Role.DISPATCHER) == (named,)
    assert cloud.everything() == before


def test_groups_that_are_gone_say_what_makes_them_again(aws):
    with pytest.raises(NeedsPerson, match="security group spotfleet-f is not there") as told:
        network.groups(aws().account, "us-east-1", "f", Role.WORKER)
    assert "spotfleet up" in told.value.hint


@pytest.mark.parametrize("action", ["CreateSecurityGroup", "AuthorizeSecurityGroupIngress",
                                    "AuthorizeSecurityGroupEgress", "CreatePlacementGroup"])
def test_an_answer_that_is_lost_does_not_matter(cloud, aws, action):
    cloud.fault(f"ec2:{action}", lost="after")
    prepare(aws(ssh_from=OFFICE, placement="cluster"))
    cloud.faults_off()
    own = group(cloud, "spotfleet-f")
    assert ("-1", None, None, own["GroupId"]) in rules(own["IpPermissions"]) & rules(own["IpPermissionsEgress"])
    assert rules(group(cloud, "spotfleet-f-door")["IpPermissions"]) == {("tcp", 22, 22, "198.51.100.0/24")}
    assert sum(t.kind == "placement-group" for t in cloud.everything()) == 3


# ---- the door


@pytest.fixture
def seen_as(monkeypatch) -> Iterator[list[str]]:
    """Who is asked for the laptop's own address answers with the last of these."""
    answers = ["203.0.113.5\n"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers[-1].encode()
            self.send_response(200 if body else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setattr(laptop, "CHECKIP_URL", f"http://127.0.0.1:{server.server_port}/")
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ways_in(cloud) -> set[str]:
    return {where for *_, where in rules(group(cloud, "spotfleet-f-door")["IpPermissions"])}


def test_the_laptop_is_let_in_from_where_it_is_and_no_more_from_where_it_was(cloud, aws, seen_as):
    provider = aws()
    assert "SSH to the dispatcher is let in from 203.0.113.5/32" in prepare(provider)
    seen_as.append("203.0.113.77\n")
    said: list[str] = []
    provider.allow_ssh_from_here("f", said.append)
    assert ways_in(cloud) == {"203.0.113.77/32"}
    assert said == ["SSH to the dispatcher is let in from 203.0.113.77/32",
                    "SSH to the dispatcher is no longer let in from 203.0.113.5/32"]
    said.clear()
    provider.allow_ssh_from_here("f", said.append)
    assert said == []


def test_the_way_in_of_another_laptop_stays(cloud, aws, seen_as, monkeypatch):
    prepare(aws())
    monkeypatch.setattr(laptop.socket, "gethostname", lambda: "another")
    seen_as.append("2001:db8::7\n")
    aws().allow_ssh_from_here("f", lambda _line: None)
    assert ways_in(cloud) == {"203.0.113.5/32", "2001:db8::7/128"}


def test_networks_of_the_fleet_file_are_let_in_instead_and_change_with_it(cloud, aws, seen_as):
    seen_as.append("")  # nobody is asked
    prepare(aws(ssh_from=("198.51.100.0/24", "2001:db8::/48")))
    assert ways_in(cloud) == {"198.51.100.0/24", "2001:db8::/48"}
    prepare(aws(ssh_from=("192.0.2.0/24",)))
    assert ways_in(cloud) == {"192.0.2.0/24"}


def test_who_names_networks_later_is_no_more_let_in_from_elsewhere(cloud, aws, seen_as):
    prepare(aws())
    aws(ssh_from=("192.0.2.0/24",)).allow_ssh_from_here("f", lambda _line: None)
    assert ways_in(cloud) == {"192.0.2.0/24"}


@pytest.mark.parametrize("world", ["0.0.0.0/0", "::/0"])
def test_a_door_is_never_open_to_the_world(cloud, aws, world):
    with pytest.raises(UsageError, match="is the whole world"):
        prepare(aws(ssh_from=("198.51.100.0/24", world)))
    assert ways_in(cloud) == set()


@pytest.mark.parametrize("answer", ["", "<html>log in to the hotel</html>"])
def test_a_laptop_that_does_not_learn_its_address_is_told_what_to_name(aws, seen_as, answer):
    seen_as.append(answer)
    with pytest.raises(NeedsPerson, match="does not return your address") as told:
        prepare(aws())
    assert "aws.ssh_from" in told.value.hint


def test_with_private_addresses_alone_nobody_guesses_from_where_the_laptop_comes(aws, seen_as):
    with pytest.raises(NeedsPerson, match="your address at the dispatcher is unknown") as told:
        prepare(aws(public_addresses=False))
    assert "aws.ssh_from" in told.value.hint


def test_a_door_that_is_gone_is_told_and_not_waited_for(aws):
    said: list[str] = []
    aws(ssh_from=OFFICE).allow_ssh_from_here("f", said.append)
    assert said == ["security group spotfleet-f-door is not there; `spotfleet up FILE` makes it anew"]
