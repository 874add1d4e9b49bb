"""Instances of the fake of Google Cloud from their insertion on: operations, names, request ids, stockouts, quotas."""

from __future__ import annotations

import uuid

import pytest

from tests.support.gcp.gcp_asks import (
    DELETED,
    KIND,
    REGION,
    STANDARD,
    ZONE,
    act,
    bulk,
    card,
    errors,
    get,
    insert,
    instance,
    is_done,
    listed,
    made,
    of_many,
    operations,
    refused,
    status,
    waited,
)


def test_an_instance_goes_through_its_states_and_its_operation_ends_with_them(cloud, pass_s):
    cloud.pending_s = 20.0
    accepted = insert(cloud)
    assert (accepted.status.name, accepted.operation_type) == ("RUNNING", "insert")
    seen = [status(cloud)]
    pass_s(12)
    seen.append(status(cloud))
    assert not is_done(waited(cloud, accepted))  # wait may answer before the end
    pass_s(8)
    done = waited(cloud, accepted)
    assert [*seen, status(cloud)] == ["PROVISIONING", "STAGING", "RUNNING"]
    assert is_done(done) and not done.error.errors
    assert done.target_id == get(cloud).id


def test_what_an_instance_has_when_it_is_there(cloud):
    made(cloud)
    found = get(cloud)
    assert found.scheduling.preemptible and found.scheduling.provisioning_model == "SPOT"
    nic = found.network_interfaces[0]
    assert nic.network_i_p.startswith("10.128.") and nic.access_configs[0].nat_i_p
    assert found.disks[0].source.endswith(f"zones/{ZONE}/disks/f-1")
    assert [(a.accelerator_type.rpartition("/")[2], a.accelerator_count) for a in found.guest_accelerators] == [
        ("nvidia-l4", 1)]
    assert found.creation_timestamp.endswith("-08:00")


def test_a_request_that_comes_again_under_its_id_makes_nothing_new(cloud):
    id = str(uuid.uuid4())
    first, again = insert(cloud, request_id=id), insert(cloud, request_id=id)
    assert first.name == again.name
    assert len(cloud.instances()) == 1
    with refused("invalid", "another request"):
        insert(cloud, instance("f-2"), request_id=id)


@pytest.mark.parametrize("id", ["f-1", str(uuid.UUID(int=0))])
def test_a_request_id_is_a_uuid_other_than_zero(cloud, id):
    with refused("invalid", "requestId"):
        insert(cloud, request_id=id)


def test_a_name_is_there_once_in_a_zone(cloud):
    made(cloud)
    with refused("alreadyExists", "/instances/f-1' already exists"):
        insert(cloud)
    made(cloud, instance(zone="us-central1-b"), "us-central1-b")  # another zone has names of its own


def test_a_stockout_is_in_the_operation_and_names_zones_that_have_room(cloud):
    cloud.set_room(ZONE, KIND, 0)
    cloud.set_room("us-central1-b", KIND, 0)
    done = waited(cloud, insert(cloud))
    assert errors(done) == ["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"]
    (detail,) = done.error.errors[0].error_details
    assert detail.error_info.reason == "resource_availability"
    assert detail.error_info.metadatas["zonesAvailable"] == "us-central1-c"
    assert done.http_error_status_code == 503
    assert cloud.everything() == []


def test_an_older_stockout_has_no_details(cloud):
    cloud.set_room(ZONE, KIND, 0)
    cloud.plain_stockouts = True
    done = waited(cloud, insert(cloud))
    assert errors(done) == ["ZONE_RESOURCE_POOL_EXHAUSTED"] and not done.error.errors[0].error_details


def test_a_stockout_shows_the_instance_for_a_while_and_then_it_is_gone(cloud, pass_s):
    cloud.pending_s = 10.0
    cloud.set_room(ZONE, KIND, 0)
    accepted = insert(cloud)
    assert status(cloud) == "PROVISIONING"
    pass_s(10)
    assert errors(waited(cloud, accepted))
    with refused("notFound", "/instances/f-1' was not found"):
        get(cloud)


def test_room_is_taken_and_given_back(cloud):
    cloud.set_room(ZONE, KIND, 1)
    made(cloud)
    assert cloud.room(ZONE, KIND) == 0
    assert errors(waited(cloud, insert(cloud, instance("f-2"))))
    act(cloud, "delete")
    assert cloud.room(ZONE, KIND) == 1


def test_a_quota_of_a_region_is_refused_in_the_operation(cloud):
    cloud.set_quota(REGION, "PREEMPTIBLE_NVIDIA_L4_GPUS", 1)
    made(cloud)
    done = waited(cloud, insert(cloud, instance("f-2")))
    assert errors(done) == ["QUOTA_EXCEEDED"]
    words = "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 1.0 in region us-central1."
    assert done.error.errors[0].message == words
    assert done.error.errors[0].error_details[0].quota_info.limit == 1.0
    made(cloud, instance("f-3", "us-east4-a"), "us-east4-a")  # another region has its own


def test_a_quota_of_the_project_is_refused_in_every_region(cloud):
    cloud.set_quota("", "GPUS_ALL_REGIONS", 0)
    for zone in (ZONE, "us-east4-a"):
        done = waited(cloud, insert(cloud, instance(zone=zone), zone), zone)
        assert "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally." in done.error.errors[0].message


def test_a_quota_may_be_refused_at_once(cloud):
    cloud.quota_at_once = True
    cloud.set_quota(REGION, "PREEMPTIBLE_CPUS", 3)
    with refused("quotaExceeded", "PREEMPTIBLE_CPUS"):
        insert(cloud)


def test_a_standard_vm_uses_the_standard_quota(cloud):
    cloud.set_quota(REGION, "NVIDIA_L4_GPUS", 0)
    made(cloud)
    assert errors(waited(cloud, insert(cloud, instance("f-2", scheduling=STANDARD)))) == ["QUOTA_EXCEEDED"]


def test_a_service_account_that_does_not_exist_is_told_in_the_operation(cloud):
    accounts = [{"email": "gone@acme-training.iam.gserviceaccount.com", "scopes": ["x"]}]
    done = waited(cloud, insert(cloud, instance(service_accounts=accounts)))
    assert errors(done) == ["EXTERNAL_RESOURCE_NOT_FOUND"]
    assert cloud.everything() == []


# ---- several at once


def test_a_bulk_insert_makes_all_in_one_zone_under_our_names(cloud):
    cloud.set_room(ZONE, KIND, 1)
    done = bulk(cloud, ["f-1", "f-2", "f-3"])
    (place,) = {i.zone for i in cloud.instances()}
    assert place != ZONE and sorted(i.name for i in cloud.instances()) == ["f-1", "f-2", "f-3"]
    status = dict(done.instances_bulk_insert_operation_metadata.per_location_status)
    assert {k: (v.target_vm_count, v.created_vm_count) for k, v in status.items()} == {f"zones/{place}": (3, 3)}
    assert operations(cloud).count(("insert", cloud.owner)) == 3


def test_a_bulk_insert_that_does_not_reach_its_minimum_leaves_nothing(cloud):
    for zone in ("us-central1-a", "us-central1-b", "us-central1-c"):
        cloud.set_room(zone, KIND, 1)
    done = bulk(cloud, ["f-1", "f-2"], least=2)
    assert errors(done) == ["VM_MIN_COUNT_NOT_REACHED"]
    assert cloud.everything() == []
    codes = [c for c, in _codes(cloud)]
    assert codes == ["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"] * 2


def _codes(cloud):
    found = cloud.client("GlobalOperationsClient").aggregated_list(
        request={"project": cloud.project, "filter": 'operationType = "insert"'})
    return [errors(o) for _, scope in found for o in scope.operations]


def test_a_bulk_insert_may_make_fewer_and_spread_them(cloud):
    for zone in ("us-central1-a", "us-central1-b", "us-central1-c"):
        cloud.set_room(zone, KIND, 1)
    bulk(cloud, ["f-1", "f-2", "f-3", "f-4"], least=1, shape="ANY")
    assert sorted(i.zone for i in cloud.instances()) == ["us-central1-a", "us-central1-b", "us-central1-c"]


def test_a_bulk_insert_keeps_to_the_zones_that_are_allowed(cloud):
    bulk(cloud, ["f-1"], zones=("us-central1-c",))
    assert [i.zone for i in cloud.instances()] == ["us-central1-c"]
    with refused("invalid", "no zone of region"):
        bulk(cloud, ["f-2"], zones=("us-east4-a",))


def test_a_bulk_insert_takes_the_first_type_of_the_ranks_that_has_room(cloud):
    for zone in ("us-central1-a", "us-central1-b", "us-central1-c"):
        cloud.set_room(zone, KIND, 0)
    choices = {"a": {"machine_types": [KIND], "rank": 1}, "b": {"machine_types": ["g2-standard-8"], "rank": 2}}
    bulk(cloud, ["f-1"], instance_flexibility_policy={"instance_selections": choices})
    assert [i.type for i in cloud.instances()] == ["g2-standard-8"]


def test_the_names_of_a_bulk_insert_are_those_of_instances(cloud):
    with refused("invalid", "Must be a match of regex"):
        bulk(cloud, ["f-1", "F_2"])
    assert cloud.instances() == []


def test_names_of_types_in_a_bulk_insert_have_no_zone(cloud):
    with refused("invalid", "the name of an accelerator type alone"):
        bulk(cloud, ["f-1"], properties=of_many(kind="n1-standard-8") | {"guest_accelerators": [card()]})


# ---- listings


def test_a_new_instance_is_listed_late_and_known_at_once(cloud, pass_s):
    cloud.new_lag_s = 5.0
    made(cloud)
    assert listed(cloud) == [] and status(cloud) == "RUNNING"
    pass_s(5)
    assert [i.name for i in listed(cloud)] == ["f-1"]


def test_a_listing_shows_states_of_some_time_ago_and_what_has_just_gone(cloud, pass_s):
    made(cloud, instance(scheduling=DELETED))
    pass_s(60)
    cloud.lag_s = 5.0
    act(cloud, "delete")
    assert [i.status for i in listed(cloud)] == ["RUNNING"]
    with refused("notFound"):
        get(cloud)
    pass_s(5)
    assert listed(cloud) == []


def test_pages_hold_what_the_request_wants_and_go_on(cloud):
    for n in range(5):
        made(cloud, instance(f"f-{n}"))
    pager = cloud.client("InstancesClient").list(request={"project": cloud.project, "zone": ZONE, "max_results": 2})
    pages = [[i.name for i in p.items] for p in pager.pages]
    assert pages == [["f-0", "f-1"], ["f-2", "f-3"], ["f-4"]]


def test_an_aggregated_listing_warns_where_a_zone_has_nothing(cloud):
    made(cloud)
    found = dict(cloud.client("InstancesClient").aggregated_list(request={"project": cloud.project}))
    assert [z for z, scope in found.items() if scope.instances] == [f"zones/{ZONE}"]
    assert found["zones/us-central1-b"].warning.code == "NO_RESULTS_ON_PAGE"


@pytest.mark.parametrize(("filter", "names"), [
    ("labels.spotfleet=f", ["f-1", "f-2"]), ("labels.spotfleet:*", ["f-1", "f-2", "g-1"]),
    ("labels.other:*", []), ('name = "f-2"', ["f-2"]), ("name != f-2", ["f-1", "g-1"]),
    ("(labels.spotfleet=f) (status=RUNNING)", ["f-1"]), ("status = TERMINATED OR labels.spotfleet=g", ["f-2", "g-1"]),
    ("scheduling.preemptible = true AND name = f-*", ["f-1", "f-2"]), ("NOT labels.spotfleet=f", ["g-1"]),
    ("name eq f-.*", ["f-1", "f-2"]), ("name eq f-", []), ("name ne '.*1'", ["f-2"]),
    ("(name eq .*-1) (status eq RUN.*)", ["f-1", "g-1"])])  # fmt: skip
def test_filters_in_both_of_their_languages(cloud, filter, names):
    for name in ("f-1", "f-2", "g-1"):
        made(cloud, instance(name) | {"labels": {"spotfleet": name[0]}})
    act(cloud, "stop", "f-2")
    assert sorted(i.name for i in listed(cloud, filter)) == names


@pytest.mark.parametrize("filter", ["name =", "name eq [", "(name eq f.*) (status = RUNNING)", "labels.a=1 ) b=1"])
def test_a_filter_that_is_none_is_refused(cloud, filter):
    with refused("invalid", "filter"):
        listed(cloud, filter)
