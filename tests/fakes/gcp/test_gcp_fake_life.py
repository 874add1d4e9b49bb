"""What becomes of instances of the fake of Google Cloud: preemption with and without notice, stop, start, the end."""

from __future__ import annotations

import pytest

from tests.support.gcp.gcp_asks import (
    DELETED,
    KIND,
    STANDARD,
    UNNOTICED,
    ZONE,
    act,
    boot_disk,
    errors,
    get,
    instance,
    local_ssd,
    made,
    operations,
    refused,
    status,
)

PREEMPTED = ("compute.instances.preempted", "system")


def preempted(cloud, name="f-1"):
    answer = cloud.metadata(name, "/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
    return answer[2].decode()


def test_who_asked_for_a_notice_gets_120_seconds_before_the_power_off(cloud, pass_s):
    made(cloud)
    cloud.ending_s = 30.0
    cloud.preempt("f-1")
    assert (preempted(cloud), status(cloud)) == ("TRUE", "RUNNING")
    pass_s(119)
    assert status(cloud) == "RUNNING" and PREEMPTED not in operations(cloud)
    pass_s(1)
    assert status(cloud) == "STOPPING" and PREEMPTED in operations(cloud)
    pass_s(30)
    assert status(cloud) == "TERMINATED"


def test_who_did_not_ask_has_the_30_seconds_of_the_power_off_alone(cloud, pass_s):
    made(cloud, instance(scheduling=UNNOTICED))
    cloud.ending_s = 30.0
    cloud.preempt("f-1")
    assert (preempted(cloud), status(cloud)) == ("TRUE", "STOPPING")
    pass_s(30)
    assert status(cloud) == "TERMINATED"


def test_a_preempted_vm_keeps_its_disk_and_address_and_may_find_no_room_to_start(cloud):
    found = made(cloud)
    nic = found.network_interfaces[0]
    cloud.preempt("f-1", notice_s=None)
    assert status(cloud) == "TERMINATED"
    assert not get(cloud).network_interfaces[0].access_configs[0].nat_i_p  # an ephemeral address is gone
    done = act(cloud, "start")
    assert errors(done) == ["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"] and status(cloud) == "TERMINATED"
    cloud.set_room(ZONE, KIND, 1)
    assert not errors(act(cloud, "start")) and status(cloud) == "RUNNING"
    again = get(cloud)
    assert again.id == found.id and again.disks[0].source == found.disks[0].source
    assert again.network_interfaces[0].network_i_p == nic.network_i_p
    assert again.network_interfaces[0].access_configs[0].nat_i_p != nic.access_configs[0].nat_i_p
    assert cloud.instance("f-1").run == 2 and preempted(cloud) == "FALSE"


def test_a_start_while_there_is_no_room_shows_the_vm_as_coming_and_then_as_terminated(cloud, pass_s):
    made(cloud)
    cloud.pending_s = 10.0
    cloud.preempt("f-1", notice_s=None)
    act(cloud, "start")
    assert status(cloud) == "PROVISIONING"
    pass_s(10)
    assert status(cloud) == "TERMINATED"


def test_with_the_action_delete_it_is_gone_with_its_disk(cloud):
    made(cloud, instance(scheduling=DELETED))
    cloud.preempt("f-1", notice_s=None)
    with refused("notFound"):
        get(cloud)
    assert cloud.everything() == [] and PREEMPTED in operations(cloud)


def test_a_disk_that_is_not_deleted_with_its_vm_stays_and_holds_its_name(cloud):
    made(cloud, instance() | {"disks": [boot_disk() | {"auto_delete": False}]})
    act(cloud, "delete")
    assert [(t.kind, t.name) for t in cloud.everything()] == [("disk", "f-1")]
    with refused("alreadyExists", "/disks/f-1' already exists"):
        made(cloud)
    cloud.client("DisksClient").delete(project=cloud.project, zone=ZONE, disk="f-1")
    assert cloud.everything() == []


def test_a_vm_that_is_stopping_cannot_be_started(cloud, pass_s):
    made(cloud)
    cloud.ending_s = 10.0
    act(cloud, "stop")
    with refused("resourceNotReady", "is not ready"):
        act(cloud, "start")
    pass_s(10)
    act(cloud, "start")
    assert status(cloud) == "RUNNING"


def test_a_plain_stop_does_not_look_like_a_preemption(cloud):
    made(cloud)
    act(cloud, "stop")
    assert ("stop", cloud.owner) in operations(cloud) and PREEMPTED not in operations(cloud)


def test_what_is_protected_from_deletion_stays(cloud):
    made(cloud, instance(deletion_protection=True))
    with refused("resourceInUseByAnotherResource", "protected against deletion"):
        act(cloud, "delete")


def test_a_host_error_stops_a_spot_vm_and_restarts_a_standard_one(cloud):
    made(cloud)
    made(cloud, instance("f-2", scheduling=STANDARD))
    cloud.host_error("f-1")
    cloud.host_error("f-2")
    assert (status(cloud), status(cloud, "f-2")) == ("TERMINATED", "RUNNING")
    assert cloud.instance("f-2").run == 2
    assert ("compute.instances.hostError", "system") in operations(cloud)


def test_a_guest_that_powers_off_stops_its_vm(cloud):
    made(cloud)
    cloud.guest_shutdown("f-1")
    assert status(cloud) == "TERMINATED"
    assert ("compute.instances.guestTerminate", "system") in operations(cloud)


def test_maintenance_is_told_and_ends_what_cannot_migrate(cloud, pass_s):
    made(cloud, instance(scheduling=STANDARD | {"automatic_restart": False}))
    made(cloud, instance("f-2", kind="e2-small", scheduling={}))
    for name in ("f-1", "f-2"):
        cloud.maintain(name, 60.0)
    events = [cloud.metadata(n, "/computeMetadata/v1/instance/maintenance-event",
                             headers={"Metadata-Flavor": "Google"})[2] for n in ("f-1", "f-2")]
    assert events == [b"TERMINATE_ON_HOST_MAINTENANCE", b"MIGRATE_ON_HOST_MAINTENANCE"]
    pass_s(60)
    assert (status(cloud), status(cloud, "f-2")) == ("TERMINATED", "RUNNING")


def test_a_simulated_maintenance_event_preempts_a_spot_vm_with_its_notice(cloud, pass_s):
    made(cloud)
    act(cloud, "simulate_maintenance_event")
    assert (preempted(cloud), status(cloud)) == ("TRUE", "RUNNING")
    pass_s(120)
    assert status(cloud) == "TERMINATED"


def test_a_preempted_vm_s_place_is_not_free_again(cloud):
    made(cloud)
    cloud.preempt("f-1", notice_s=None)
    assert cloud.room(ZONE, KIND) == 0


def test_a_deletion_while_a_notice_runs_is_the_end_and_no_preemption_follows(cloud, pass_s):
    made(cloud)
    cloud.preempt("f-1")
    act(cloud, "delete")
    pass_s(200)
    assert PREEMPTED not in operations(cloud) and cloud.everything() == []


def test_labels_and_metadata_change_under_their_fingerprints_alone(cloud):
    found = made(cloud)
    client, ask = cloud.client("InstancesClient"), {"project": cloud.project, "zone": ZONE, "instance": "f-1"}
    labels = {"labels": {"spotfleet": "f", "more": "x"}, "label_fingerprint": found.label_fingerprint}
    client.set_labels(request=ask | {"instances_set_labels_request_resource": labels})
    with refused("conditionNotMet"):
        client.set_labels(request=ask | {"instances_set_labels_request_resource": labels})
    values = {"items": [{"key": "spotfleet-dispatcher", "value": "https://x"}],
              "fingerprint": found.metadata.fingerprint}
    client.set_metadata(request=ask | {"metadata_resource": values})
    with refused("conditionNotMet"):
        client.set_metadata(request=ask | {"metadata_resource": values})
    assert cloud.instance("f-1").metadata == {"spotfleet-dispatcher": "https://x"}
    assert get(cloud).labels["more"] == "x"


def test_412_is_the_status_of_a_fingerprint_that_is_not_the_newest(cloud):
    made(cloud)
    with refused("conditionNotMet") as _:
        cloud.client("InstancesClient").set_metadata(request={
            "project": cloud.project, "zone": ZONE, "instance": "f-1", "metadata_resource": {"fingerprint": "AAAA"}})
    assert cloud.calls[-1].status == 412


def test_local_ssds_come_with_the_vm_and_cost_quota(cloud):
    cloud.set_quota("us-central1", "PREEMPTIBLE_LOCAL_SSD_GB", 374)
    from tests.support.gcp.gcp_asks import insert, waited

    done = waited(cloud, insert(cloud, instance() | {"disks": [boot_disk(), local_ssd()]}))
    assert errors(done) == ["QUOTA_EXCEEDED"]


def test_a_vm_is_billed_by_the_second_for_a_minute_at_least_and_a_first_minute_that_is_taken_is_free(cloud, pass_s):
    made(cloud)
    made(cloud, instance("f-2"))
    made(cloud, instance("f-3"))
    pass_s(20)
    cloud.preempt("f-2", notice_s=None)
    act(cloud, "delete", "f-3")
    pass_s(3580)
    cloud.price(ZONE, KIND)
    bill, usd = cloud.invoice(), cloud.price(ZONE, KIND)
    assert bill == {"f-1": pytest.approx(usd), "f-2": 0.0, "f-3": pytest.approx(usd / 60)}


def test_the_serial_port_is_read_from_a_position_on(cloud):
    made(cloud)
    cloud.machine("f-1").serial = "booting\nready\n"
    ask = {"project": cloud.project, "zone": ZONE, "instance": "f-1"}
    first = cloud.client("InstancesClient").get_serial_port_output(request=ask)
    more = cloud.client("InstancesClient").get_serial_port_output(request=ask | {"start": 8})
    assert (first.contents, first.next_, more.contents) == ("booting\nready\n", 14, "ready\n")
