"""A fleet that meets AWS's refusals: the reconciler, provider aws and the real boto3 against the fake. What is done
then, and what the user reads."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.reconcile import Action, Calls, Observed, Wanted, create, tick
from spotfleet.model import CloudState, HostState, Need, Nodes, Offer, Role
from spotfleet.providers import Boot
from spotfleet.providers.aws import AwsProvider
from tests.support.aws.aws_hosts import FLEET, prepared

EAST, WEST = "us-east-1", "us-west-2"
LAUNCHES = ("ec2:CreateFleet", "ec2:RunInstances")


class Fleet:
    """Reconciled in this thread; its clock is moved by `tick(after_s=...)`."""

    def __init__(self, provider: AwsProvider, folder, hosts: int, need: Need) -> None:
        self.provider, self.now = provider, time.time()
        self.ledger = Ledger(folder / "ledger.db")
        self.wanted = Wanted(FLEET, Role.WORKER, hosts, (need,))
        create(self.ledger, provider, FLEET, Nodes(1, hosts, hosts), self.now)

    def tick(self, after_s: float = 1.0) -> list[Action]:
        self.now += after_s
        return tick(self.wanted, self.ledger, self.provider, self.boot, Observed(), self.now, Calls(scout=True))

    @staticmethod
    def boot(request_id: str, offer: Offer) -> Boot:
        return Boot("a.b", {"boot.json": request_id})

    def living(self) -> list[str]:
        return sorted(h.request_id for h in self.provider.hosts(FLEET) if h.state is not CloudState.TERMINATED)

    def pools(self) -> set[str]:
        return {h.offer.pool for h in self.provider.hosts(FLEET) if h.state is not CloudState.TERMINATED}

    def whys(self, actions: list[Action]) -> str:
        return "\n".join(a.why for a in actions)


@pytest.fixture
def fleet(cloud, aws, tmp_path):
    def make(hosts: int = 2, need: Need = Need(instance_type="g5.xlarge"), regions: tuple[str, ...] = (EAST,)) -> Fleet:
        provider = prepared(aws, regions=regions, joined=len(regions) > 1)
        cloud.forget_calls()
        return Fleet(provider, tmp_path, hosts, need)

    return make


def launches(cloud) -> Counter:
    """Launches by region, refused ones too."""
    return Counter(c.region for c in cloud.calls if c.action in LAUNCHES)


def test_a_spot_quota_that_is_used_up_is_met_once_in_its_region_and_the_others_are_taken(cloud, fleet):
    for zone in "abc":
        cloud.set_price(f"{WEST}{zone}", "g5.xlarge", 0.9)
    cloud.set_quota(EAST, "G", "spot", 0)
    mine = fleet(hosts=3, regions=(EAST, WEST))
    said = mine.whys([a for _ in range(4) for a in mine.tick()])
    assert {p.split("/")[1][:-1] for p in mine.pools()} == {WEST}
    assert len(mine.living()) == 3
    assert launches(cloud)[EAST] == 1
    assert "aws us-east-1" in said and "the spot quota is used up" in said and "MaxSpotInstanceCountExceeded" in said
    assert "raise 'All G and VT Spot Instance Requests' in us-east-1: https://us-east-1.console.aws.amazon.com" in said
    assert len({t.id for t in cloud.everything() if t.kind in ("launch-template", "fleet") and t.region == EAST}) == 0


def test_throttled_launches_are_asked_again_and_make_each_host_once(cloud, fleet):
    cloud.fault("ec2:CreateFleet", code="RequestLimitExceeded", times=2)
    mine = fleet()
    said = mine.whys(mine.tick())
    assert "AWS slows us down" in said and "RequestLimitExceeded" in said
    for _ in range(6):
        mine.tick(after_s=10.0)
    assert mine.living() == sorted(h.request_id for h in mine.ledger.state().hosts)
    assert len(cloud.instances()) == len(mine.living()) == 2


def test_throttled_listings_stop_nothing_and_end_no_host(cloud, fleet, hurried):
    mine = fleet()
    mine.tick()
    before = mine.living()
    cloud.fault("ec2:DescribeInstances", code="RequestLimitExceeded", times=4)
    assert "AWS slows us down" in mine.whys(mine.tick())
    mine.tick(after_s=30.0)
    assert mine.living() == before
    assert {h.state for h in mine.ledger.state().hosts} == {HostState.LAUNCHING}


def test_a_lost_answer_of_a_launch_makes_one_host(cloud, fleet):
    mine = fleet(hosts=1)
    cloud.fault("ec2:CreateFleet", lost="after")
    assert "AWS does not answer" in mine.whys(mine.tick())
    for _ in range(3):
        mine.tick(after_s=10.0)
    assert len(cloud.instances()) == 1
    assert mine.living() == [h.request_id for h in mine.ledger.state().hosts]


def test_expired_credentials_stop_the_fleet_until_a_person_has_been_there(cloud, fleet):
    mine = fleet()
    mine.tick()
    before = mine.living()
    cloud.expire("owner")
    with pytest.raises(NeedsPerson, match="aws us-east-1: the credentials have expired") as told:
        mine.tick()
    assert "aws sso login" in told.value.hint
    cloud.expire("owner", False)
    mine.tick()
    assert mine.living() == before


@pytest.mark.parametrize("action", ["ec2:CreateFleet", "ec2:CreateLaunchTemplate", "ec2:DescribeInstances"])
def test_a_denied_action_leaves_nothing_behind_and_is_named(cloud, fleet, action):
    mine = fleet(hosts=1)
    cloud.deny("owner", {action})
    with pytest.raises(NeedsPerson, match=f"denied: {action}") as told:
        mine.tick()
    assert "check aws --policy" in told.value.hint
    assert [t for t in cloud.everything() if t.kind in ("instance", "launch-template", "fleet")] == []
    cloud.deny("owner", set())
    mine.now += 3600.0
    mine.tick()
    assert len(mine.living()) == 1


def test_where_one_pool_has_no_room_another_is_taken(cloud, fleet):
    cloud.set_room("us-east-1b", "g5.xlarge", 0)  # the cheapest
    mine = fleet(hosts=2)
    for _ in range(3):
        mine.tick()
    assert len(mine.living()) == 2
    assert "aws/us-east-1b/g5.xlarge/spot" not in mine.pools()


def test_where_no_pool_has_room_each_cools_down_and_the_fleet_waits(cloud, fleet):
    for zone in "abc":
        cloud.set_room(f"{EAST}{zone}", "g5.xlarge", 0)
    mine = fleet(hosts=1)
    said = mine.whys([a for _ in range(6) for a in mine.tick()])
    assert "no capacity there now" in said
    assert mine.living() == []
    assert launches(cloud)[EAST] == 1, "one call names all three, and what cools down is not asked"
    for zone in "abc":
        cloud.set_room(f"{EAST}{zone}", "g5.xlarge", None)
    mine.now += 3600.0
    mine.tick()
    assert len(mine.living()) == 1
