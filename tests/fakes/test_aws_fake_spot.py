"""The life of spot instances and their requests: the table in the facts about persistent requests, row by row."""

from __future__ import annotations

import pytest

from tests.support.aws.aws_asks import (
    ONE_TIME,
    PERSISTENT,
    ZONE,
    one,
    refused,
    request_of,
    requests,
    run,
    state,
    tagged,
    template,
)

KIND = "g5.xlarge"


@pytest.fixture
def ec2(cloud):
    return cloud.client("ec2")


def test_launched_is_active_and_fulfilled(ec2):
    (id,) = run(ec2, PERSISTENT, TagSpecifications=tagged("spot-instances-request", spotfleet="f"))
    assert requests(ec2) == [("active", "fulfilled", id)]
    assert [r["Tags"] for r in ec2.describe_spot_instance_requests()["SpotInstanceRequests"]] == [
        [{"Key": "spotfleet", "Value": "f"}]
    ]
    assert one(ec2, id)["InstanceLifecycle"] == "spot"


def test_a_stop_by_ec2_is_announced_disables_the_request_and_ends_when_room_returns(cloud, ec2, pass_s):
    cloud.set_room(ZONE, KIND, 1)
    (id,) = run(ec2, PERSISTENT)
    address, public = one(ec2, id)["PrivateIpAddress"], one(ec2, id)["PublicIpAddress"]
    cloud.interrupt(id)
    assert requests(ec2) == [("active", "marked-for-stop", id)]
    pass_s(119)
    assert state(ec2, id) == "running"
    pass_s(1)
    assert requests(ec2) == [("disabled", "instance-stopped-no-capacity", id)]
    assert one(ec2, id)["State"]["Name"] == "stopped"
    assert one(ec2, id)["StateReason"]["Code"] == "Server.SpotInstanceShutdown"
    assert "PublicIpAddress" not in one(ec2, id)
    with refused("IncorrectSpotRequestState"):
        ec2.start_instances(InstanceIds=[id])
    cloud.set_room(ZONE, KIND, 1)
    assert requests(ec2) == [("active", "fulfilled", id)]
    assert state(ec2, id) == "running"
    assert one(ec2, id)["PrivateIpAddress"] == address
    assert one(ec2, id)["PublicIpAddress"] != public
    assert cloud.instance(id).run == 2
    assert cloud.room(ZONE, KIND) == 0


def test_a_one_time_request_is_closed_at_the_notice_and_its_instance_ends_after_it(cloud, ec2, pass_s):
    (id,) = run(ec2, ONE_TIME)
    cloud.interrupt(id)
    assert requests(ec2) == [("closed", "instance-terminated-no-capacity", id)]
    assert state(ec2, id) == "running"
    pass_s(120)
    assert state(ec2, id) == "terminated"
    assert one(ec2, id)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert [t.kind for t in cloud.everything()] == []


def test_a_stop_by_us_is_ours_to_end(ec2):
    (id,) = run(ec2, PERSISTENT)
    ec2.stop_instances(InstanceIds=[id])
    assert requests(ec2) == [("disabled", "instance-stopped-by-user", id)]
    assert one(ec2, id)["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    ec2.start_instances(InstanceIds=[id])
    assert requests(ec2) == [("active", "fulfilled", id)]


@pytest.mark.parametrize("behavior,becomes", [("stop", ["stopped"]), ("terminate", ["terminated", "running"])])
def test_a_guest_that_powers_off_does_what_its_shutdown_behavior_says(cloud, ec2, behavior, becomes):
    """Terminating reopens the persistent request, and EC2 launches again."""
    (id,) = run(ec2, PERSISTENT, InstanceInitiatedShutdownBehavior=behavior)
    cloud.guest_shutdown(id)
    found = [i["State"]["Name"] for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
    assert found == becomes
    assert one(ec2, id)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_terminating_without_cancelling_launches_anew_and_without_tags(cloud, ec2):
    (id,) = run(ec2, PERSISTENT, TagSpecifications=tagged("instance", "spot-instances-request", spotfleet="f"))
    ec2.terminate_instances(InstanceIds=[id])
    ((said, code, new),) = requests(ec2)
    assert (said, code, new != id) == ("active", "fulfilled", True)
    assert (cloud.instance(new).tags, cloud.requests()[0].now.code) == ({}, "fulfilled")
    assert "instance" in [t.kind for t in cloud.everything()]


def test_an_open_request_waits_while_there_is_no_room(cloud, ec2):
    (id,) = run(ec2, PERSISTENT)
    cloud.retry_s = 1.0
    ec2.terminate_instances(InstanceIds=[id])
    assert requests(ec2) == [("open", "pending-evaluation", "")]
    cloud.set_room(ZONE, KIND, 0)
    cloud.clock.now += 1
    assert requests(ec2) == [("open", "capacity-not-available", "")]
    cloud.set_room(ZONE, KIND, 1)
    cloud.clock.now += 1
    ((said, code, new),) = requests(ec2)
    assert (said, code) == ("active", "fulfilled") and new != id
    assert cloud.instance(new).tags == {}


def test_cancelling_leaves_a_running_instance_running(ec2, pass_s):
    (id,) = run(ec2, PERSISTENT)
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request_of(ec2, id)])
    assert requests(ec2) == [("cancelled", "request-canceled-and-instance-running", id)]
    assert state(ec2, id) == "running"
    ec2.terminate_instances(InstanceIds=[id])
    pass_s(10)
    assert [s for s, _, _ in requests(ec2)] == ["cancelled"]  # and no new instance


def test_cancelling_ends_a_stopped_instance(cloud, ec2):
    (id,) = run(ec2, PERSISTENT)
    cloud.take(id)
    assert state(ec2, id) == "stopped"
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request_of(ec2, id)])
    assert state(ec2, id) == "terminated"
    assert cloud.everything() == []


def test_cancelling_an_open_request_is_the_end_of_it(cloud, ec2):
    (id,) = run(ec2, PERSISTENT)
    cloud.retry_s = 60
    ec2.terminate_instances(InstanceIds=[id])
    (sir,) = [r.id for r in cloud.requests()]
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[sir])
    assert requests(ec2) == [("cancelled", "canceled-before-fulfillment", "")]
    assert cloud.everything() == []
    with refused("InvalidSpotInstanceRequestID.NotFound"):
        ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=["sir-00000000"])


def test_an_interruption_after_cancelling_ends_the_instance(cloud, ec2, pass_s):
    (id,) = run(ec2, PERSISTENT)
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request_of(ec2, id)])
    cloud.interrupt(id)
    pass_s(120)
    assert state(ec2, id) == "terminated"


def test_a_one_time_instance_cannot_be_stopped(ec2):
    (id,) = run(ec2, ONE_TIME)
    with refused("UnsupportedOperation"):
        ec2.stop_instances(InstanceIds=[id])


def test_a_one_time_guest_that_powers_off_is_billed_on_unless_it_terminates(cloud, ec2):
    stops, ends = run(ec2, ONE_TIME), run(ec2, ONE_TIME, InstanceInitiatedShutdownBehavior="terminate")
    cloud.guest_shutdown(stops[0])
    cloud.guest_shutdown(ends[0])
    assert (state(ec2, stops[0]), state(ec2, ends[0])) == ("running", "terminated")


def test_a_request_past_its_end_is_cancelled_and_its_stopped_instance_stays(cloud, ec2, pass_s):
    from datetime import UTC, datetime

    until = datetime.fromtimestamp(cloud.now() + 600, UTC)
    market = {**PERSISTENT, "SpotOptions": {**PERSISTENT["SpotOptions"], "ValidUntil": until}}
    (id,) = run(ec2, market)
    cloud.take(id)
    pass_s(600)
    assert requests(ec2)[0][:2] == ("cancelled", "schedule-expired")
    assert state(ec2, id) == "stopped"


def test_a_persistent_request_by_a_template_ends_after_a_week_unless_it_says_when(cloud, ec2, pass_s):
    cloud.template_ends_s = 7 * 86400.0
    template(ec2, InstanceType="g5.xlarge", InstanceMarketOptions=PERSISTENT)
    ec2.run_instances(LaunchTemplate={"LaunchTemplateName": "spotfleet-x"}, MinCount=1, MaxCount=1)
    run(ec2, PERSISTENT)
    pass_s(8 * 86400)
    assert [r.now.code for r in cloud.requests()] == ["schedule-expired", "fulfilled"]


def test_persistent_means_stop_and_no_placement_group(ec2):
    wrong = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "persistent"}}
    with refused("InvalidParameterCombination"):
        run(ec2, wrong)
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    with refused("InvalidParameterCombination"):
        run(ec2, PERSISTENT, Placement={"GroupName": "pg", "AvailabilityZone": ZONE})


def test_open_requests_and_instances_use_the_quota_until_they_are_gone(cloud, ec2):
    cloud.set_quota("us-east-1", "G", "spot", 8)
    first, second = run(ec2, PERSISTENT, 2)
    with refused("MaxSpotInstanceCountExceeded"):
        run(ec2, ONE_TIME)
    cloud.retry_s = 60
    ec2.terminate_instances(InstanceIds=[first])
    assert cloud.usage("us-east-1", "G", "spot") == 8  # the request is open
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[r.id for r in cloud.requests() if r.state == "open"])
    assert cloud.usage("us-east-1", "G", "spot") == 4
    assert run(ec2, ONE_TIME)
    assert state(ec2, second) == "running"


def test_ended_things_stay_listed_for_a_while(ec2, pass_s):
    (id,) = run(ec2, ONE_TIME)
    ec2.terminate_instances(InstanceIds=[id])
    pass_s(3599)
    assert (state(ec2, id), len(requests(ec2))) == ("terminated", 1)
    pass_s(3)
    with refused("InvalidInstanceID.NotFound"):
        state(ec2, id)
    assert requests(ec2) == []


def test_the_metadata_tell_of_the_notice_the_hint_and_the_maintenance(cloud, ec2):
    import json

    (id,) = run(ec2, PERSISTENT)

    def ask(path):
        return cloud.metadata(id, f"/latest/meta-data/{path}")

    assert ask("spot/instance-action")[0] == ask("events/recommendations/rebalance")[0] == 404
    assert ask("events/maintenance/scheduled") == (200, b"[]")
    cloud.rebalance(id)
    cloud.schedule(id, "instance-stop", 3600)
    cloud.interrupt(id)
    assert json.loads(ask("spot/instance-action")[1]) == {"action": "stop", "time": "2026-09-21T14:15:20Z"}
    assert json.loads(ask("events/recommendations/rebalance")[1]) == {"noticeTime": "2026-09-21T14:13:20Z"}
    (event,) = json.loads(ask("events/maintenance/scheduled")[1])
    said = (event["Code"], event["State"], event["NotBefore"])
    assert said == ("instance-stop", "active", "21 Sep 2026 15:13:20 GMT")
