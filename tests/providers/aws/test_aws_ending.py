"""Ends, listings and tags of hosts on AWS, by the real boto3, against the fake EC2."""

from __future__ import annotations

import gzip
import json

import pytest

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import CloudState
from spotfleet.providers import Boot
from tests.support.aws.aws_hosts import A, B, asked, dispatcher, hosts_things, line, pool, prepared, request, requests

CANCEL, TERMINATE = "ec2:CancelSpotInstanceRequests", "ec2:TerminateInstances"


@pytest.fixture
def provider(aws, cloud):
    return prepared(aws)


@pytest.fixture
def lasting(provider, cloud):
    """A host that EC2 stops and starts, as EC2 sees it."""
    provider.launch(request(A, interruption_behavior="stop"))
    (made,) = cloud.instances()
    return made


def states(provider) -> dict[str, CloudState]:
    return {h.request_id: h.state for h in provider.hosts("f")}


# the end


def test_a_request_is_cancelled_before_its_host_is_terminated_and_nothing_is_launched_again(provider, cloud, lasting):
    cloud.forget_calls()
    provider.terminate("f-1")
    changes = [c.action for c in cloud.calls if c.action in (CANCEL, TERMINATE)]
    assert changes == [CANCEL, TERMINATE]
    cloud.tick()
    assert requests(cloud) == [] and hosts_things(cloud) == []


def test_an_end_that_dies_between_the_two_calls_is_completed_by_the_next(provider, cloud, lasting):
    cloud.deny("owner", {TERMINATE})
    with pytest.raises(SpotfleetError):
        provider.terminate("f-1")
    assert requests(cloud) == [] and [i.state for i in cloud.instances()] == ["running"]
    assert states(provider) == {"f-1": CloudState.RUNNING}
    cloud.deny("owner", set())
    provider.terminate("f-1")
    assert hosts_things(cloud) == []


def test_a_host_that_has_stopped_itself_is_listed_and_ended_also_after_its_request_has_expired(provider, cloud,
                                                                                               monkeypatch):
    boot = Boot("a.b", {"boot.json": json.dumps({"lifetime_s": 7200.0})})
    provider.launch(request(A, interruption_behavior="stop", boot=boot))
    (made,) = cloud.instances()
    cloud.guest_shutdown(made.id)
    cloud.settle()
    later = cloud.clock() + 3 * 3600.0 + 60.0
    monkeypatch.setattr(cloud, "clock", lambda: later)
    cloud.tick()
    assert requests(cloud) == [] and states(provider) == {"f-1": CloudState.STOPPED}
    provider.terminate("f-1")
    assert hosts_things(cloud) == []


def test_a_host_that_ec2_has_stopped_is_ended_with_its_request_and_its_disk(provider, cloud, lasting):
    cloud.take(lasting.id)
    assert states(provider) == {"f-1": CloudState.STOPPED}
    assert [r["Status"]["Code"] for r in requests(cloud)] == ["instance-stopped-no-capacity"]
    provider.terminate("f-1")
    cloud.set_room("us-east-1a", "g5.xlarge", 5)
    cloud.tick()
    assert requests(cloud) == [] and hosts_things(cloud) == [] and states(provider) == {"f-1": CloudState.TERMINATED}


def test_a_host_that_powered_itself_off_is_gone_or_stopped_as_it_was_asked_to_be(provider, cloud, lasting):
    provider.launch(request(B, "f-2"))
    provider.launch(dispatcher())
    for made in cloud.instances():
        cloud.guest_shutdown(made.id)
    cloud.settle()
    assert states(provider) == {"f-1": CloudState.STOPPED, "f-2": CloudState.TERMINATED, "f-d-0": CloudState.TERMINATED}
    assert not any(run.taken for host in provider.hosts("f") for run in host.runs)
    provider.terminate("f-1")
    assert [k for k in hosts_things(cloud) if k != "fleet"] == []


def test_an_end_takes_the_fleet_of_the_host_with_it(provider, cloud):
    provider.launch(request(A))
    assert "fleet" in hosts_things(cloud)
    provider.terminate("f-1")
    assert hosts_things(cloud) == []


def test_an_end_takes_the_template_of_a_launch_that_nobody_heard_of(provider, cloud):
    cloud.fault("ec2:CreateFleet", lost="before")
    with pytest.raises(SpotfleetError):
        provider.launch(request(A))
    provider.terminate("f-1")
    assert hosts_things(cloud) == []


def test_an_unknown_host_ends_without_a_change(provider, cloud):
    cloud.forget_calls()
    provider.terminate("f-77")
    assert asked(cloud, CANCEL) == asked(cloud, TERMINATE) == asked(cloud, "ec2:DeleteFleets") == 0


def test_what_is_gone_by_the_time_it_is_ended_is_no_error(provider, cloud):
    provider.launch(request(A))
    cloud.fault(TERMINATE, code="InvalidInstanceID.NotFound", times=1)
    cloud.fault(CANCEL, code="InvalidSpotInstanceRequestID.NotFound", times=1)
    provider.terminate("f-1")
    assert cloud.instances() == []  # with its fleet


def test_throttled_ends_are_asked_for_again_on_the_way(provider, cloud):
    provider.launch(request(A))
    cloud.fault("ec2:*", code="RequestLimitExceeded", times=2)
    provider.terminate("f-1")
    assert cloud.instances() == []


def test_hosts_end_in_whichever_region_they_are(aws, cloud):
    provider = prepared(aws, regions=("us-east-1", "us-west-2"), joined=True)
    provider.launch(request(A))
    provider.launch(request(pool("us-west-2a"), "f-2"))
    assert {h.request_id: h.offer.region for h in provider.hosts("f")} == {"f-1": "us-east-1", "f-2": "us-west-2"}
    provider.terminate("f-2")
    assert [i.region for i in cloud.instances()] == ["us-east-1"]


# what EC2 does by itself


def test_a_host_that_ec2_starts_again_is_the_same_one_with_a_run_of_its_own(provider, cloud, lasting):
    before = line(provider)
    cloud.take(lasting.id)
    stopped = line(provider)
    assert stopped.state is CloudState.STOPPED and stopped.runs[-1].taken and "no-capacity" in stopped.why
    assert not cloud.instances()[0].public_ip
    cloud.set_room("us-east-1a", "g5.xlarge", 1)
    cloud.tick()
    after = line(provider)
    assert (after.state, after.provider_id, after.address) == (CloudState.RUNNING, before.provider_id, before.address)
    assert after.runs[-1].ended_at is None and after.runs[-1].started_at >= stopped.runs[-1].started_at


@pytest.mark.parametrize("tagged", [False, True], ids=["untagged", "tagged"])
def test_a_host_that_somebody_ended_without_its_request_comes_back_as_itself(provider, cloud, lasting, tagged):
    """Whether the machine that EC2 then launches bears the tags, nobody says."""
    cloud.relaunched_tagged = tagged
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[lasting.id])
    cloud.tick()
    (new,) = cloud.instances()
    found = line(provider)
    assert (found.provider_id, found.state) == (new.id, CloudState.RUNNING) and new.id != lasting.id
    assert [run.ended_at is None for run in found.runs] == [False, True]
    provider.tag("f-1", {"more": "x"})
    assert cloud.instance(new.id).tags["more"] == "x"
    provider.terminate("f-1")
    cloud.tick()
    assert hosts_things(cloud) == [] and requests(cloud) == []


def test_a_host_that_somebody_ended_and_that_ec2_will_launch_again_is_not_forgotten(provider, cloud, lasting):
    cloud.retry_s = 3600.0
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[lasting.id])
    found = line(provider)
    assert found.state is CloudState.STOPPED and f"its spot request {lasting.request_id} is open" in found.why
    provider.terminate("f-1")
    assert requests(cloud) == [] and states(provider) == {"f-1": CloudState.TERMINATED}


def test_a_second_machine_of_a_host_is_an_intruder_that_can_be_ended_by_itself(provider, cloud):
    provider.launch(request(A))
    (first,) = cloud.instances()
    cloud.client("ec2", "us-east-1").run_instances(
        ImageId=cloud.UBUNTU, InstanceType="t3.small", MinCount=1, MaxCount=1, TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in first.tags.items()
                                                  if not k.startswith("aws:")]}])
    names = {h.request_id for h in provider.hosts("f")}
    (intruder,) = names - {"f-1"}
    assert intruder.startswith("f-1~i-") and len(names) == 2
    living = line(provider)
    provider.terminate(intruder)
    assert [i.id for i in cloud.instances()] == [living.provider_id]
    assert line(provider).state is CloudState.RUNNING


def test_a_host_that_ec2_takes_says_so_during_its_notice_and_after(provider, cloud):
    provider.launch(request(A))
    (made,) = cloud.instances()
    cloud.interrupt(made.id, notice_s=120.0)
    assert line(provider).state is CloudState.RUNNING
    cloud.take(made.id)
    found = line(provider)
    assert found.state is CloudState.TERMINATED and found.runs[-1].taken
    assert "Server.SpotInstanceTermination" in found.why or "instance-terminated" in found.why
    provider.terminate("f-1")
    assert hosts_things(cloud) == [] and asked(cloud, "ec2:DeleteFleets") == 1


# listings


def test_a_listing_is_two_questions_per_region(aws, cloud):
    provider = prepared(aws, regions=("us-east-1", "us-west-2"), joined=True)
    provider.launch(request(A))
    provider.hosts("f")
    cloud.forget_calls()
    provider.hosts("f")
    assert sorted((c.region, c.action) for c in cloud.calls) == sorted(
        (region, action) for region in ("us-east-1", "us-west-2")
        for action in ("ec2:DescribeInstances", "ec2:DescribeSpotInstanceRequests"))


def test_machines_of_others_are_never_listed_nor_ended(provider, cloud):
    cloud.client("ec2", "us-east-1").run_instances(ImageId=cloud.UBUNTU, InstanceType="t3.small", MinCount=1,
                                                    MaxCount=1)
    provider.launch(request(A))
    assert [h.request_id for h in provider.hosts("")] == ["f-1"]
    provider.terminate("f-1")
    assert [i.type for i in cloud.instances()] == ["t3.small"]


def test_a_machine_that_bears_a_hosts_name_and_no_fleets_is_nobodys(provider, cloud):
    cloud.client("ec2", "us-east-1").run_instances(
        ImageId=cloud.UBUNTU, InstanceType="t3.small", MinCount=1, MaxCount=1, TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "spotfleet-host", "Value": "f-1"}]}])
    provider.terminate("f-1")
    assert len(cloud.instances()) == 1 and provider.hosts("") == []


def test_a_dispatcher_is_entered_at_its_public_address_with_the_key_that_it_was_given(provider, cloud):
    provider.launch(dispatcher())
    (made,) = cloud.instances()
    found = line(provider, "f-d-0")
    assert (found.address, found.port, found.ssh.address) == (made.private_ip, 7443, made.public_ip)
    assert found.ssh.user == "ubuntu" and not found.ssh.jump and found.ssh.host_keys[0].startswith("ssh-ed25519 ")
    assert found.ssh.host_keys[0] in gzip.decompress(made.user_data).decode()


def test_user_data_that_is_not_ours_is_said_to_be_so(provider, cloud):
    provider.launch(request(A, boot=Boot("a.b", {"boot.json": "x"})))
    ec2 = cloud.client("ec2", "us-east-1")
    ec2.run_instances(ImageId=cloud.UBUNTU, InstanceType="t3.small", MinCount=1, MaxCount=1, UserData="#!/bin/sh",
                      TagSpecifications=[{"ResourceType": "instance", "Tags": [
                          {"Key": "spotfleet", "Value": "f"}, {"Key": "spotfleet-host", "Value": "f-9"}]}])
    with pytest.raises(UsageError, match="its user data is none of ours"):
        provider.boot_files("f-9")


# chaos


def test_ec2_sends_no_notice_because_we_ask(provider, cloud):
    provider.launch(request(A))
    with pytest.raises(UsageError, match="Fault Injection Service") as caught:
        provider.interrupt("f-1", 120.0)
    assert "scripts/smoke-aws" in caught.value.hint and len(cloud.instances()) == 1


def test_a_host_taken_by_chaos_counts_as_taken_and_a_lasting_one_is_stopped(provider, cloud, lasting):
    provider.launch(request(B, "f-2"))
    for name in ("f-1", "f-2"):
        provider.interrupt(name, None)
    assert states(provider) == {"f-1": CloudState.STOPPED, "f-2": CloudState.TERMINATED}
    assert all(host.runs[-1].taken for host in provider.hosts("f"))
