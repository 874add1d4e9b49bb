"""From EC2's words to the lines of a listing: providers/aws/mapping/listing.py."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from spotfleet.model import CloudHost, CloudState, Market, Offer, Role, Run, SshAccess
from spotfleet.providers.aws.mapping import listing
from spotfleet.providers.kit.mapping.listing import ListingContext

SPOT = Offer("aws", "us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT, 1, 412_300, 1_006_000, "A10G",
             quota="All G and VT Spot Instance Requests")
POOL = "1 A10G us-east-1a/g5.xlarge=412300/1006000 us-east-1b/g5.xlarge=500000/1006000"
T = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
SIGHT = ListingContext("us-east-1", "ubuntu", lambda host: (f"ssh-ed25519 {host}",),
                       lambda bare: replace(bare, slots=8, price_micros_h=7, on_demand_micros_h=9),
                       lambda role: 30 if role is Role.DISPATCHER else 100)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(T + seconds, UTC)


def said(**tags: str) -> list[dict]:
    return [{"Key": k.replace("_", "-"), "Value": v} for k, v in tags.items()]


OURS = {"spotfleet": "f", "spotfleet_host": "f-3", "spotfleet_role": "worker", "spotfleet_pool": POOL}


def instance(state: str = "running", **more) -> dict:
    made = {"InstanceId": "i-1", "InstanceType": "g5.xlarge", "State": {"Name": state}, "LaunchTime": at(0),
            "Placement": {"AvailabilityZone": "us-east-1a"}, "PrivateIpAddress": "172.31.0.10",
            "PublicIpAddress": "3.3.3.3", "InstanceLifecycle": "spot", "SpotInstanceRequestId": "sir-1",
            "AmiLaunchIndex": 0, "Tags": said(**OURS)}
    return made | more


def asked(state: str = "active", code: str = "fulfilled", **more) -> dict:
    return {"SpotInstanceRequestId": "sir-1", "Type": "one-time", "State": state, "InstanceId": "i-1",
            "Status": {"Code": code, "Message": f"message of {code}", "UpdateTime": at(50)},
            "LaunchSpecification": {"InstanceType": "g5.xlarge"}, "LaunchedAvailabilityZone": "us-east-1a",
            "Tags": said(**OURS)} | more


def lasting(state: str, code: str, **more) -> dict:
    return asked(state, code, Type="persistent", **more)


def lines(instances: list[dict], requests: list[dict] = ()) -> list[CloudHost]:
    return listing.lines(instances, requests, SIGHT)


def the_line(instances: list[dict], requests: list[dict] = ()) -> CloudHost:
    (only,) = lines(instances, requests)
    return only


RUNNING = CloudHost("f-3", "i-1", "f", Role.WORKER, SPOT, CloudState.RUNNING, (Run(T),), "172.31.0.10",
                    ssh=SshAccess("172.31.0.10", "ubuntu", host_keys=("ssh-ed25519 f-3",), jump=True), disk_gib=100,
                    addresses=1)


def test_a_running_worker_is_entered_through_the_dispatcher_and_costs_what_it_did_at_its_launch():
    assert the_line([instance()], [asked()]) == RUNNING


def test_a_dispatcher_is_entered_at_its_public_address_and_listens_at_its_private_one():
    own = said(**OURS | {"spotfleet_host": "f-d-0", "spotfleet_role": "dispatcher"})
    line = the_line([instance(Tags=own, InstanceLifecycle=None, SpotInstanceRequestId=None)])
    assert (line.role, line.address, line.port, line.offer.market) == (
        Role.DISPATCHER, "172.31.0.10", 7443, Market.ON_DEMAND)
    assert line.ssh == SshAccess("3.3.3.3", "ubuntu", host_keys=("ssh-ed25519 f-d-0",))
    private = the_line([instance(Tags=own, PublicIpAddress=None)])
    assert private.ssh.address == "172.31.0.10"


def test_the_pool_is_the_one_that_was_taken_not_the_one_that_was_asked_for():
    line = the_line([instance(Placement={"AvailabilityZone": "us-east-1b"})])
    assert line.offer == replace(SPOT, zone="us-east-1b", price_micros_h=500_000)


def test_the_price_of_a_pool_that_the_tag_had_no_room_for_is_looked_up():
    line = the_line([instance(Placement={"AvailabilityZone": "us-east-1c"})])
    assert (line.offer.slots, line.offer.price_micros_h, line.offer.on_demand_micros_h) == (8, 7, 9)


def test_the_pools_tag_holds_as_many_pools_as_ec2_takes():
    pools = [replace(SPOT, zone=f"us-east-1{z}") for z in "abcdefghijkl"]
    text = listing.pools_tag(pools)
    assert text.startswith("1 A10G us-east-1a/g5.xlarge=412300/1006000 us-east-1b/g5") and 200 < len(text) <= 256
    assert listing.pools_tag([replace(SPOT, accelerator="")]) == "1 - us-east-1a/g5.xlarge=412300/1006000"


@pytest.mark.parametrize(("state", "listed"), [
    ("pending", CloudState.PENDING), ("running", CloudState.RUNNING), ("stopping", CloudState.RUNNING),
    ("shutting-down", CloudState.RUNNING), ("stopped", CloudState.STOPPED), ("terminated", CloudState.TERMINATED),
    ("something new", CloudState.RUNNING)])
def test_each_state_of_ec2_is_one_of_ours(state, listed):
    assert the_line([instance(state)]).state is listed


def test_a_pending_machine_is_not_billed_yet():
    assert the_line([instance("pending")]).runs == ()


ENDS = {  # (reason, code, is it taken, and paid all the same)
    "by us": ("User initiated (2023-11-14 22:15:00 GMT)", "Client.UserInitiatedShutdown", False, False),
    "by itself": ("Client.InstanceInitiatedShutdown (2023-11-14 22:15:00 GMT)", "Client.InstanceInitiatedShutdown",
                  False, False),
    "taken": ("Server.SpotInstanceTermination (2023-11-14 22:15:00 GMT)", "Server.SpotInstanceTermination", True,
              False),
    "failed": ("Server.ScheduledStop (2023-11-14 22:15:00 GMT)", "Server.ScheduledStop", True, True),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_when_ec2_says_and_is_taken_if_ec2_took_it(end):
    reason, code, taken, paid = ENDS[end]
    line = the_line([instance("terminated", StateTransitionReason=reason,
                              StateReason={"Code": code, "Message": f"{code}: words"})])
    assert line.runs == (Run(T, T + 100, taken, paid),)
    told, _, more = line.why.partition(": it switched itself off. ")
    assert told == f"{code}: words"
    assert more == ("" if end != "by itself" else "If it never joined, `aws ec2 get-console-output "
                    f"--instance-id {instance('terminated')['InstanceId']}` shows why, such as a broken GPU")


def test_the_end_of_a_run_that_the_instance_does_not_tell_is_that_of_its_spot_request():
    line = the_line([instance("terminated", StateReason={"Code": "Server.SpotInstanceTermination", "Message": "m"})],
                    [asked("closed", "instance-terminated-no-capacity")])
    assert line.runs == (Run(T, T + 50, taken=True),)
    assert line.why == "message of instance-terminated-no-capacity (instance-terminated-no-capacity)"


def test_a_run_that_ended_in_the_second_of_its_beginning_is_longer_than_nothing():
    line = the_line([instance("terminated", StateTransitionReason="User initiated (2023-11-14 22:13:20 GMT)")])
    (run,) = line.runs
    assert run.ended_at > run.started_at


def test_a_run_of_which_nobody_says_when_it_ended_is_left_to_whoever_saw_it_begin():
    """EC2's own stops and ends may say no more than "User initiated"."""
    line = the_line([instance("terminated", StateTransitionReason="User initiated")], [asked("closed", "fulfilled")])
    assert (line.state, line.runs) == (CloudState.TERMINATED, ())


@pytest.mark.parametrize("code", ["Server.InsufficientInstanceCapacity", "Server.InternalError",
                                  "Client.VolumeLimitExceeded", "Client.InternalError"])
def test_a_machine_that_never_came_to_run_is_not_billed(code):
    line = the_line([instance("terminated", StateTransitionReason=f"{code} (2023-11-14 22:13:21 GMT)",
                              StateReason={"Code": code, "Message": f"{code}: it failed"})])
    assert line.runs == () and f"{code}: it failed" in line.why
    assert ("see aws.kms_key" in line.why) == (code == "Client.InternalError")


def test_a_stopped_host_says_why_in_ec2s_words_and_costs_nothing():
    line = the_line([instance("stopped", StateTransitionReason="Server.SpotInstanceShutdown (2023-11-14 22:15:00 GMT)",
                              StateReason={"Code": "Server.SpotInstanceShutdown", "Message": "shutdown"})],
                    [lasting("disabled", "instance-stopped-no-capacity")])
    assert (line.state, line.runs) == (CloudState.STOPPED, (Run(T, T + 100, taken=True),))
    assert line.why == "message of instance-stopped-no-capacity (instance-stopped-no-capacity)"


def test_a_host_that_is_started_again_begins_a_new_run():
    line = the_line([instance(LaunchTime=at(500), StateTransitionReason="")], [lasting("active", "fulfilled")])
    assert line.runs == (Run(T + 500),) and line.why == ""


def test_a_host_under_notice_runs_and_says_so():
    line = the_line([instance()], [asked("active", "marked-for-termination")])
    assert (line.state, line.runs) == (CloudState.RUNNING, (Run(T),))
    assert line.why == "EC2 takes it: message of marked-for-termination (marked-for-termination)"


def test_a_machine_that_is_going_counts_as_there_until_it_is_gone():
    line = the_line([instance("shutting-down", StateReason={"Code": "Client.User", "Message": "by us"})])
    assert (line.state, line.runs, line.why) == (CloudState.RUNNING, (Run(T),), "shutting-down: by us")


def test_what_chaos_ended_counts_as_taken_and_is_paid():
    own = said(**OURS, spotfleet_taken="yes")
    line = the_line([instance("terminated", Tags=own, StateReason={"Code": "Client.UserInitiatedShutdown"},
                              StateTransitionReason="User initiated (2023-11-14 22:15:00 GMT)")])
    assert line.runs == (Run(T, T + 100, taken=True, paid=True),)


def test_a_page_that_is_repeated_changes_nothing():
    assert lines([instance(), instance()], [asked(), asked()]) == [RUNNING]


def test_what_bears_no_tag_of_ours_is_no_host():
    assert lines([instance(Tags=[])], []) == []
    assert lines([instance(Tags=said(spotfleet="f"))], []) == []


# hosts of a persistent request


def test_a_host_that_ec2_has_launched_anew_is_the_same_host_with_the_runs_of_both_machines():
    old = instance("terminated", StateTransitionReason="User initiated (2023-11-14 22:15:00 GMT)")
    new = instance(InstanceId="i-2", LaunchTime=at(200), PrivateIpAddress="172.31.0.11", Tags=[])  # EC2 gives none
    line = the_line([new, old], [lasting("active", "fulfilled", InstanceId="i-2")])
    assert (line.request_id, line.provider_id, line.address) == ("f-3", "i-2", "172.31.0.11")
    assert (line.state, line.runs) == (CloudState.RUNNING, (Run(T, T + 100), Run(T + 200)))


def test_machines_that_requests_have_and_the_listing_by_tag_lacks_are_asked_for():
    requests = [lasting("active", "fulfilled", InstanceId="i-2"), asked("closed", "x", InstanceId="i-9",
                                                                        SpotInstanceRequestId="sir-9")]
    assert listing.unseen([instance()], requests) == ["i-2"]


def test_of_two_machines_of_one_host_the_newest_is_the_host_and_the_other_stands_by_itself():
    found = lines([instance(InstanceId="i-2", LaunchTime=at(9)), instance()])
    assert [(h.request_id, h.provider_id, h.runs) for h in found] == [
        ("f-3", "i-2", (Run(T + 9),)), ("f-3~i-1", "i-1", (Run(T),))]
    assert found[1].why == "a second machine of f-3, which is i-2 now" and found[1].ssh is None


def test_an_ended_host_whose_request_is_open_is_not_over():
    """Whoever ended the machine forgot the request: EC2 will launch it again, and a quota counts it."""
    old = instance("terminated", StateTransitionReason="User initiated (2023-11-14 22:15:00 GMT)")
    line = the_line([old], [lasting("open", "capacity-not-available", InstanceId=None)])
    assert (line.state, line.runs) == (CloudState.STOPPED, (Run(T, T + 100),))
    assert line.why == "its spot request sir-1 is open, EC2 may launch it: message of capacity-not-available"
    assert the_line([old], [lasting("cancelled", "canceled-before-fulfillment")]).state is CloudState.TERMINATED


def test_an_open_request_that_never_had_a_machine_is_a_host_to_come():
    line = the_line([], [lasting("open", "pending-evaluation", InstanceId=None)])
    assert (line.request_id, line.provider_id, line.state, line.runs) == ("f-3", "sir-1", CloudState.PENDING, ())
    assert line.offer == SPOT and "sir-1 is open" in line.why


def test_a_request_for_one_launch_that_is_still_open_is_no_host():
    assert lines([], [asked("open", "pending-evaluation", InstanceId=None)]) == []


# gangs


def test_members_of_a_gang_are_told_apart_by_their_launch_index():
    own = said(**OURS | {"spotfleet_host": "f- 3 4 5"})
    found = lines([instance(InstanceId=f"i-{n}", SpotInstanceRequestId=f"sir-{n}", AmiLaunchIndex=2 - n, Tags=own)
                   for n in (2, 0, 1)])
    assert [(h.request_id, h.provider_id) for h in found] == [("f-3", "i-2"), ("f-4", "i-1"), ("f-5", "i-0")]


@pytest.mark.parametrize(("places", "order"), [(["2", "0", "1"], ["f-5", "f-3", "f-4"]),
                                               ([None] * 3, ["f-3", "f-4", "f-5"])], ids=["tagged", "untagged"])
def test_members_of_a_gang_with_one_launch_index_are_told_apart_by_their_tag_or_else_their_ids(places, order):
    own = OURS | {"spotfleet_host": "f- 3 4 5"}
    found = lines([instance(InstanceId=f"i-{n}", SpotInstanceRequestId=f"sir-{n}", AmiLaunchIndex=0,
                            Tags=said(**own, **({"spotfleet_member": place} if place else {})))
                   for n, place in enumerate(places)])
    assert {h.provider_id: h.request_id for h in found} == {f"i-{n}": host for n, host in enumerate(order)}


def test_missing_places_are_those_of_living_members_of_gangs_that_are_listed_whole():
    own = OURS | {"spotfleet_host": "f- 3 4 5"}

    def gang(*states: str, tagged: int = 0) -> list[dict]:
        return [instance(state, InstanceId=f"i-{n}", AmiLaunchIndex=0,
                         Tags=said(**own, **({"spotfleet_member": str(n)} if n < tagged else {})))
                for n, state in enumerate(states)]

    missing = listing.missing_member_tags
    assert missing(gang("running", "pending", "running")) == {"0": ["i-0"], "1": ["i-1"], "2": ["i-2"]}
    assert missing(gang("running", "running", "terminated", tagged=1)) == {"1": ["i-1"]}
    assert missing(gang("running", "running")) == {}  # another is not listed yet, and the order may be another
    assert missing(gang("running", "running", "running", tagged=3)) == {}
    assert missing([instance(Tags=said(**OURS))]) == {}  # launched alone


def test_a_relaunch_without_tags_is_the_member_whose_machine_its_request_had():
    own = said(**OURS | {"spotfleet_host": "f- 3 4"})
    others = said(**OURS | {"spotfleet_host": "f- 3 4", "spotfleet_member": "0"})
    mine = said(**OURS | {"spotfleet_host": "f- 3 4", "spotfleet_member": "1"})
    found = lines([instance(InstanceId="i-0", SpotInstanceRequestId="sir-0", Tags=others),
                   instance("terminated", InstanceId="i-1", Tags=mine),
                   instance(InstanceId="i-2", Tags=[], LaunchTime=at(200))],
                  [lasting("active", "fulfilled", InstanceId="i-2", Tags=own)])
    assert [(h.request_id, h.provider_id) for h in found] == [("f-3", "i-0"), ("f-4", "i-2")]


def test_an_index_that_no_member_has_is_no_host_of_ours():
    assert lines([instance(AmiLaunchIndex=1)]) == []


def test_an_open_request_of_a_gang_is_told_of_the_member_whose_machine_it_had():
    own = said(**OURS | {"spotfleet_host": "f- 3 4"})
    ended = instance("terminated", AmiLaunchIndex=1, Tags=own)
    request = lasting("open", "pending-evaluation", Tags=own, InstanceId=None)
    assert [(h.request_id, h.state) for h in lines([ended], [request])] == [("f-4", CloudState.STOPPED)]
    assert [h.request_id for h in lines([], [request])] == ["f-3~sir-1"]


def test_what_is_billed_beside_a_machine_is_in_its_line():
    own = said(**OURS | {"spotfleet_host": "f-d-0", "spotfleet_role": "dispatcher"})
    private = the_line([instance(Tags=own, PublicIpAddress=None)])
    assert (private.disk_gib, private.addresses, private.ended_at) == (30, 0, None)
    reason = "User initiated (2023-11-14 22:15:00 GMT)"
    ended = the_line([instance("terminated", StateTransitionReason=reason, PublicIpAddress=None)])
    assert (ended.disk_gib, ended.addresses, ended.ended_at) == (100, 0, T + 100)
    assert the_line([instance("stopped", StateTransitionReason=reason, PublicIpAddress=None)]).ended_at is None


def test_a_request_that_waits_for_another_machine_has_no_disk():
    ended = instance("terminated", StateTransitionReason="Server.SpotInstanceTermination (2023-11-14 22:15:00 GMT)",
                     PublicIpAddress=None)
    line = the_line([ended], [lasting("open", "capacity-not-available")])
    assert (line.provider_id, line.disk_gib, line.addresses, line.ended_at) == ("sir-1", 0, 0, None)
