"""Launches on AWS whose answers are lost or late, that are asked for twice, or whose remains cannot be removed."""

from __future__ import annotations

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.providers import Boot
from spotfleet.providers.aws import launch
from spotfleet.providers.aws.account import network
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.aws.section.spec import AwsNetwork
from spotfleet.providers.kit import launching
from tests.support.aws.aws_hosts import WORKER_THINGS, A, B, asked, dispatcher, hosts_things, prepared, request


@pytest.fixture
def provider(aws, cloud):
    return prepared(aws)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["fleet", "persistent", "on demand", "gang"])
def test_a_lost_answer_is_asked_for_again_and_makes_one_host(provider, cloud, way, when):
    wanted = {"fleet": [request(A)], "persistent": [request(A, interruption_behavior="stop")],
              "on demand": [dispatcher("f-1")], "gang": [request(A), request(A, "f-2")]}[way]
    cloud.fault("ec2:CreateFleet" if way == "fleet" else "ec2:RunInstances", lost=when)
    cloud.new_lag_s = 0.4  # what was made a moment ago is not listed yet
    with pytest.raises(SpotfleetError, match="AWS does not answer"):
        provider.launch_together(wanted)
    assert "launch-template" in hosts_things(cloud)
    provider.launch_together(wanted)
    cloud.new_lag_s = 0.0
    assert len(cloud.instances()) == len(wanted)
    assert "launch-template" not in hosts_things(cloud)
    assert {h.request_id for h in provider.hosts("f")} == {r.request_id for r in wanted}


def another_subnet(cloud, block: str = "172.31.128.0/18") -> str:
    """In zone a, as open as the default one."""
    ec2 = cloud.client("ec2", "us-east-1")
    vpc = ec2.describe_subnets()["Subnets"][0]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    ec2.modify_subnet_attribute(SubnetId=made, MapPublicIpOnLaunch={"Value": True})
    return made


def test_a_host_that_was_asked_for_with_other_words_is_waited_for(aws, cloud):
    """By then another subnet of the zone has the most room: the same token, and not the same request."""
    provider = prepared(aws, secret="the fleet's")
    cloud.fault("ec2:RunInstances", lost="after")
    cloud.new_lag_s = 3600.0
    with pytest.raises(SpotfleetError):
        provider.launch(dispatcher())
    another_subnet(cloud)

    def listed_once_refused(call):
        if any(c.code == "IdempotentParameterMismatch" for c in cloud.calls):
            cloud.new_lag_s = 0.0

    cloud.before = listed_once_refused
    aws(secret="the fleet's").launch(dispatcher())
    assert [c.code for c in cloud.calls if c.action == "ec2:RunInstances"][-1] == "IdempotentParameterMismatch"
    assert len(cloud.instances()) == 1 and "launch-template" not in hosts_things(cloud)


def full(cloud, subnet: str) -> None:
    """Somebody else takes all its addresses."""
    cloud.client("ec2", "us-east-1").run_instances(
        ImageId=cloud.UBUNTU, InstanceType="t3.small", MinCount=11, MaxCount=11, SubnetId=subnet)


def test_a_subnet_without_addresses_gives_way_to_the_next_which_another_host_is_asked_for_in(aws, cloud):
    """EC2 knows the words of a token also when it refused them: the same host cannot be had in another subnet. And it
    tells late how many addresses are free."""
    small, other = (another_subnet(cloud, f"172.31.128.{n}/28") for n in (0, 16))
    provider = prepared(aws, networks=(AwsNetwork("us-east-1", subnets=(small, other)),))
    first, second = network.subnets(provider.account, "us-east-1", "us-east-1a")
    full(cloud, first)
    with pytest.raises(NoCapacity, match="its subnet has no free address"):
        provider.launch(dispatcher())
    assert asked(cloud, "ec2:RunInstances") == 2
    provider.launch(dispatcher("f-d-1"))
    provider.launch(request(A))
    assert [i.subnet for i in cloud.instances(spotfleet="f")] == [second, second]


def test_a_fleet_without_addresses_is_asked_for_in_the_next_subnet(aws, cloud):
    small, other = (another_subnet(cloud, f"172.31.128.{n}/28") for n in (0, 16))
    provider = prepared(aws, networks=(AwsNetwork("us-east-1", subnets=(small, other)),))
    first, second = network.subnets(provider.account, "us-east-1", "us-east-1a")
    full(cloud, first)
    with pytest.raises(NoCapacity, match="its subnet has no free address") as caught:
        provider.launch(request(A))
    assert caught.value.pools == (A.pool,)
    provider.launch(request(A, "f-2"))
    assert [i.subnet for i in cloud.instances(spotfleet="f")] == [second]


@pytest.mark.parametrize("ask", [request, lambda offer, host: dispatcher(host)], ids=["fleet", "on demand"])
def test_a_fleet_that_comes_up_again_under_its_name_is_not_taken_for_the_earlier_one(aws, cloud, ask):
    """EC2 remembers tokens for a day, and lists what has ended for an hour."""
    earlier = prepared(aws)
    earlier.launch(ask(A, "f-1"))
    earlier.terminate("f-1")
    cloud.gone_s = 0.0
    cloud.settle()
    assert earlier.hosts("f") == []
    prepared(aws).launch(ask(A, "f-1"))
    assert [i.state for i in cloud.instances()] == ["running"]


def test_a_host_that_ended_and_is_listed_no_more_is_neither_taken_for_launched_nor_waited_for(aws, cloud, monkeypatch):
    provider = prepared(aws)
    provider.launch(dispatcher())
    provider.terminate("f-d-0")
    cloud.gone_s = 0.0
    cloud.settle()
    for module in (launch, launching):
        monkeypatch.setattr(module, "PAUSE_S", None)  # no pause can be made
    with pytest.raises(NoCapacity, match="asked for before, and EC2 has made no host of it"):
        provider.launch(dispatcher())
    assert hosts_things(cloud) == []


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "InternalError", "InvalidFleetId.NotFound"])
def test_a_fleet_that_was_answered_without_an_instance_is_another_hosts_matter_though_it_may_pass(
        provider, cloud, monkeypatch, code):
    """EC2 would say the same under this token for a day."""
    from tests.support.fakes.aws import fleets
    from tests.support.fakes.aws.errors import AwsError

    def busy(*_told, **_named):
        raise AwsError(code, "try again")

    monkeypatch.setattr(launch, "PROFILE_PAUSE_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(fleets, "order", busy)
        with pytest.raises(NoCapacity, match=r"us-east-1/us-east-1b g5.xlarge spot") as caught:
            provider.launch(request(A, alternatives=(B,)))
    assert (caught.value.scope, caught.value.pools) == ("pool", (A.pool, B.pool))
    times = 1 if code == "InvalidFleetId.NotFound" else 3
    assert errors.code(caught.value) == code and asked(cloud, "ec2:CreateFleet") == times
    assert hosts_things(cloud) == []
    provider.launch(request(A, "f-2"))
    assert hosts_things(cloud) == WORKER_THINGS


def test_a_template_of_an_earlier_call_is_used_as_it_is(provider, cloud):
    """The machine that may exist by then was told the earlier words."""
    cloud.fault("ec2:CreateFleet", lost="before")
    with pytest.raises(SpotfleetError):
        provider.launch(request(A, boot=Boot("a.b", {"boot.json": "first"})))
    provider.launch(request(A, boot=Boot("a.b", {"boot.json": "second"})))
    assert provider.boot_files("f-1") == {"boot.json": "first"}


def test_what_was_made_a_moment_ago_is_waited_for(aws, cloud, monkeypatch):
    monkeypatch.setattr(launch, "PROFILE_PAUSE_S", 0.05)
    cloud.profile_lag_s = 3600.0
    provider = prepared(aws)

    def known_once_refused(call):
        if any(c.code == "InvalidParameterValue" for c in cloud.calls):
            cloud.profile_ready.clear()

    cloud.before = known_once_refused
    provider.launch(dispatcher())
    codes = [c.code for c in cloud.calls if c.action == "ec2:RunInstances"]
    assert codes == ["InvalidParameterValue", ""] and len(cloud.instances()) == 1


@pytest.mark.parametrize("lag_s", [45.0, 110.0])
def test_a_profile_that_iam_passes_on_late_is_waited_for_at_a_slow_pace_and_reported_once(
        aws, cloud, clock, caplog, lag_s: float):
    cloud.profile_lag_s = lag_s
    provider = prepared(aws)
    provider.launch(dispatcher())
    assert len(cloud.instances()) == 1 and lag_s <= clock.slept_s < lag_s + 3
    assert asked(cloud, "ec2:RunInstances") <= lag_s / 2 + 2
    assert [r.getMessage() for r in caplog.records if "instance profile" in r.getMessage()] == [
        "EC2 does not know the new instance profile yet; it is asked again for 120 s"]


def test_a_profile_that_ec2_never_learns_of_is_given_up_after_two_minutes(aws, cloud, clock):
    cloud.profile_lag_s = 3600.0
    provider = prepared(aws)
    with pytest.raises(SpotfleetError, match=r"(?i)instance profile"):
        provider.launch(dispatcher())
    assert 120 <= clock.slept_s < 125


@pytest.mark.parametrize("code", ["InvalidGroup.NotFound", "InvalidSecurityGroupID.NotFound",
                                  "InvalidLaunchTemplateId.VersionNotFound"])
def test_a_group_or_a_template_s_version_that_ec2_does_not_know_yet_is_waited_for(provider, cloud, clock, code: str):
    cloud.fault("ec2:RunInstances", code=code, times=2)
    provider.launch(dispatcher())
    assert (asked(cloud, "ec2:RunInstances"), len(cloud.instances())) == (3, 1)


@pytest.mark.parametrize("code", ["InvalidGroup.NotFound", "InvalidSecurityGroupID.NotFound"])
def test_a_new_group_that_ec2_does_not_know_yet_gets_its_rules_all_the_same(aws, cloud, clock, code: str):
    cloud.fault("ec2:AuthorizeSecurityGroup*", code=code, times=2)
    prepared(aws)
    assert asked(cloud, "ec2:AuthorizeSecurityGroupIngress") > 2


def test_a_fleet_that_came_to_nothing_for_want_of_a_moment_is_asked_for_again_under_the_next_token(
        aws, cloud, monkeypatch):
    monkeypatch.setattr(launch, "PROFILE_PAUSE_S", 0.05)
    cloud.profile_lag_s = 3600.0
    cloud.client("iam").create_instance_profile(InstanceProfileName="late")
    provider = prepared(aws, host_profile="late")

    def known_once_refused(call):
        if asked(cloud, "ec2:CreateFleet") > 1:
            cloud.profile_ready.clear()

    cloud.before = known_once_refused
    provider.launch(request(A))
    tokens = [c.params["ClientToken"] for c in cloud.calls if c.action == "ec2:CreateFleet"]
    assert tokens == [names.token(provider.account.settings.secret, "f-1", attempt) for attempt in (0, 1)]
    assert hosts_things(cloud) == WORKER_THINGS and asked(cloud, "ec2:DeleteFleets") == 1


def test_a_pool_that_is_throttled_within_a_fleets_answer_is_not_taken_for_full(aws, cloud, monkeypatch):
    """EC2 answers CreateFleet with 200, and with RequestLimitExceeded in its Errors."""
    monkeypatch.setattr(launch, "PROFILE_PAUSE_S", 0.01)
    provider = prepared(aws)
    cloud.fleet_throttles = 2
    provider.launch(request(A))
    assert hosts_things(cloud) == WORKER_THINGS
    assert (asked(cloud, "ec2:CreateFleet"), asked(cloud, "ec2:DeleteFleets")) == (3, 2)


def test_a_named_profile_that_is_not_there_is_not_waited_for(aws, cloud):
    provider = prepared(aws, dispatcher_profile="nobodys")
    with pytest.raises(SpotfleetError, match=r"(?i)instance profile"):
        provider.launch(dispatcher())
    assert asked(cloud, "ec2:RunInstances") == 1


def test_throttling_ends_a_launch_without_harm(provider, cloud):
    cloud.fault("ec2:CreateFleet", code="RequestLimitExceeded", times=1)
    with pytest.raises(SpotfleetError, match="AWS slows us down") as caught:
        provider.launch(request(A))
    assert not isinstance(caught.value, (NoCapacity, NeedsPerson)) and asked(cloud, "ec2:CreateFleet") == 1
    provider.launch(request(A))
    assert len(cloud.instances()) == 1 and hosts_things(cloud) == WORKER_THINGS


def test_a_refusal_for_want_of_capacity_is_asked_once(provider, cloud):
    """botocore would ask three times, as it is HTTP 500."""
    cloud.set_room("us-east-1a", "t3.small", 0, "on-demand")
    with pytest.raises(NoCapacity, match=r"us-east-1/us-east-1a t3.small on-demand: no capacity there now"):
        provider.launch(dispatcher())
    assert asked(cloud, "ec2:RunInstances") == 1 and hosts_things(cloud) == []


def test_a_template_that_may_not_be_removed_does_not_make_a_host_a_refusal(provider, cloud):
    cloud.deny("owner", {"ec2:DeleteLaunchTemplate"})
    provider.launch(request(A))
    assert [h.state.value for h in provider.hosts("f")] == ["running"]
    cloud.deny("owner", set())
    provider.terminate("f-1")
    assert hosts_things(cloud) == []


def test_a_refusal_whose_remains_may_not_be_removed_is_asked_for_again(provider, cloud):
    """NoCapacity would say that nothing is left."""
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    cloud.deny("owner", {"ec2:DeleteLaunchTemplate"})
    with pytest.raises(SpotfleetError, match=r"no capacity there now.*what is left of it cannot be removed") as caught:
        provider.launch(request(A))
    assert not isinstance(caught.value, (NoCapacity, NeedsPerson))
    cloud.deny("owner", set())
    with pytest.raises(NoCapacity):
        provider.launch(request(A))
    assert hosts_things(cloud) == []
