"""Launches on the fake of Google Cloud: one machine, one of several zones, a gang, and what refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import CloudState, Market, Need, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.gcp import launch
from spotfleet.providers.gcp.mapping import names

KIND = "g2-standard-4"
A, B = (Offer("gcp", "us-central1", f"us-central1-{zone}", KIND, Market.SPOT, 1, 300_000, 700_000, "L4",
              quota="PREEMPTIBLE_NVIDIA_L4_GPUS") for zone in "ab")
DISPATCHER = Offer("gcp", "us-central1", "us-central1-a", "e2-medium", Market.ON_DEMAND, 1, 33_000, 33_000)


def request(offer: Offer = A, request_id: str = "f-1", **more: Any) -> LaunchRequest:
    return LaunchRequest(request_id, "f", Role.WORKER, offer, Boot("idle_host", {"boot.json": request_id}), **more)


@pytest.fixture
def provider(gcp):
    return gcp()


def test_a_host_of_equal_pools_goes_where_there_is_room(provider, cloud):
    cloud.set_room(A.zone, KIND, 0)
    provider.launch(request(A, alternatives=(B,)))
    [line] = provider.hosts("f")
    assert (line.offer.zone, line.offer.instance_type, line.state) == (B.zone, KIND, CloudState.RUNNING)
    assert line.offer.price_micros_h == B.price_micros_h and provider.boot_files("f-1") == {"boot.json": "f-1"}
    provider.launch(request(A, alternatives=(B,)))
    assert len(cloud.instances()) == 1


def test_a_refusal_of_all_pools_names_them_and_leaves_nothing(provider, cloud):
    for zone in (A.zone, B.zone):
        cloud.set_room(zone, KIND, 0)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request(A, alternatives=(B,)))
    assert caught.value.scope == "pool" and set(caught.value.pools) == {A.pool, B.pool}
    assert cloud.everything() == [] and provider.hosts("f") == []


def test_a_stockout_names_the_zones_that_have_room(provider, cloud):
    cloud.set_room(A.zone, KIND, 0)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request())
    assert "us-central1-b" in caught.value.hint and "ZONE_RESOURCE_POOL_EXHAUSTED" in str(caught.value)


def test_a_stockout_without_details_refuses_the_pool_as_well(provider, cloud):
    cloud.plain_stockouts = True
    cloud.set_room(A.zone, KIND, 0)
    with pytest.raises(NoCapacity):
        provider.launch(request())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_quota_of_the_region_is_refused_with_its_scope(provider, cloud, at_once):
    cloud.quota_at_once = at_once
    for metric in ("PREEMPTIBLE_NVIDIA_L4_GPUS", "NVIDIA_L4_GPUS"):
        cloud.set_quota("us-central1", metric, 0)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request())
    assert caught.value.scope == "quota" and "PREEMPTIBLE_NVIDIA_L4_GPUS" in str(caught.value)
    assert cloud.everything() == []


def test_the_projects_quota_of_all_gpus_needs_a_person(provider, cloud):
    cloud.set_quota("", "GPUS_ALL_REGIONS", 0)
    with pytest.raises(NeedsPerson, match="GPUS_ALL_REGIONS"):
        provider.launch(request())


def test_a_gang_comes_whole_in_one_zone_and_each_machine_knows_its_host(provider, cloud):
    gang = [request(A, f"f-{n}", alternatives=(B,)) for n in (3, 4, 5)]
    cloud.set_room(A.zone, KIND, 2)
    provider.launch_together(gang)
    provider.launch_together(gang)
    lines = provider.hosts("f")
    assert [h.request_id for h in lines] == ["f-3", "f-4", "f-5"] and {h.offer.zone for h in lines} == {B.zone}
    assert {h.request_id: provider.boot_files(h.request_id) for h in lines} == {
        f"f-{n}": {"boot.json": f"f-{n}"} for n in (3, 4, 5)}
    assert len({h.ssh.host_keys for h in lines}) == 3 and len(cloud.instances()) == 3


def test_a_gang_without_room_for_all_makes_none(provider, cloud):
    for zone in (A.zone, B.zone):
        cloud.set_room(zone, KIND, 2)
    with pytest.raises(NoCapacity):
        provider.launch_together([request(A, f"f-{n}", alternatives=(B,)) for n in (3, 4, 5)])
    assert cloud.everything() == [] and provider.hosts("f") == []


def test_a_gang_that_a_quota_refuses_names_the_quota(provider, cloud):
    """The operation of a bulk request only counts; the cause is in the operations of its machines."""
    cloud.set_quota("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS", 2)
    with pytest.raises(NoCapacity) as caught:
        provider.launch_together([request(A, f"f-{n}", alternatives=(B,)) for n in (3, 4, 5)])
    assert caught.value.scope == "quota" and "PREEMPTIBLE_NVIDIA_L4_GPUS" in str(caught.value)
    assert cloud.everything() == []


@pytest.mark.parametrize("alternatives", [(), (B,)])
def test_a_service_account_that_may_not_be_used_needs_a_person(gcp, cloud, alternatives):
    cloud.deny(cloud.owner, {"iam.serviceAccounts.actAs"})
    with pytest.raises(NeedsPerson, match="SERVICE_ACCOUNT_ACCESS_DENIED") as caught:
        gcp(target="gs://bucket/prefix").launch(request(A, alternatives=alternatives))
    assert "roles/iam.serviceAccountUser" in caught.value.hint and cloud.everything() == []


@pytest.mark.parametrize("together", [False, True])
def test_a_dispatcher_asks_again_for_the_result_of_a_slow_launch(gcp, cloud, cloud_time, monkeypatch, together):
    monkeypatch.setattr(launch, "MOMENT_S", 0.0)
    dispatcher, cloud.pending_s = gcp(side="dispatcher"), 90.0
    gang = [request(A, f"f-{n}") for n in (3, 4)]

    def ask() -> None:
        if together:
            dispatcher.launch_together(gang)
        else:
            dispatcher.launch(gang[0])

    ask()
    assert dispatcher.hosts("f") == [] and len(gcp().hosts("f")) == 1 + together  # the laptop sees them, for `down`
    cloud_time.at += 95
    ask()
    assert [h.state for h in dispatcher.hosts("f")] == [CloudState.RUNNING] * (1 + together)
    assert len(cloud.instances()) == 1 + together
    assert "compute.zoneOperations.wait" not in cloud.actions()  # which takes up to two minutes


def test_a_slow_launch_that_is_refused_in_the_end_refuses_its_pool(gcp, cloud, cloud_time, monkeypatch):
    monkeypatch.setattr(launch, "MOMENT_S", 0.0)
    dispatcher, cloud.pending_s = gcp(side="dispatcher"), 90.0
    cloud.set_room(A.zone, KIND, 0)
    dispatcher.launch(request())
    dispatcher.launch(request())
    cloud_time.at += 95
    with pytest.raises(NoCapacity):
        dispatcher.launch(request())
    assert cloud.everything() == [] and dispatcher.hosts("f") == []


def test_a_host_that_is_ended_while_it_is_made_is_listed(gcp, cloud, cloud_time, monkeypatch):
    monkeypatch.setattr(launch, "MOMENT_S", 0.0)
    dispatcher, cloud.pending_s, cloud.ending_s = gcp(side="dispatcher"), 90.0, 30.0
    dispatcher.launch(request())
    dispatcher.terminate("f-1")
    assert [h.request_id for h in dispatcher.hosts("f")] == ["f-1"]
    cloud_time.at += 95
    cloud.tick()
    assert cloud.everything() == []


def test_hosts_that_differ_are_not_launched_together(provider):
    with pytest.raises(UsageError, match="alike"):
        provider.launch_together([request(A, "f-1"), request(B, "f-2")])


def test_a_launch_with_other_files_than_before_finds_the_first_machine(provider, cloud):
    provider.launch(request())
    later = replace(request(), boot=Boot("idle_host", {"boot.json": "new"}))
    provider.launch(later)
    overtaken = launch._Launching(provider.account, [later])  # it looked for the host before there was one
    overtaken.begin()
    overtaken.ask()
    assert len(cloud.instances()) == 1 and provider.boot_files("f-1") == {"boot.json": "f-1"}


def test_a_machine_type_that_the_zone_lacks_refuses_the_pool(provider):
    with pytest.raises(NoCapacity):
        provider.launch(request(replace(A, instance_type="a9-none-1g")))


def test_a_zone_that_does_not_exist_is_an_error_with_a_hint(provider, cloud):
    with pytest.raises(SpotfleetError) as caught:
        provider.launch(request(replace(A, zone="us-central1-z")))
    assert "us-central1-z" in str(caught.value) and caught.value.hint and cloud.instances() == []


def test_a_dispatcher_is_on_demand_with_its_own_account_and_door(provider, cloud):
    provider.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, DISPATCHER, Boot("idle_host")))
    [line] = provider.hosts("f")
    assert line.role is Role.DISPATCHER and line.ssh.address == cloud.instance("f-d-0-" + names.code(
        "e2-medium", Market.ON_DEMAND)).public_ip
    [machine] = cloud.instances()
    assert machine.service_account == cloud.default_account and "spotfleet-f-door" in machine.tags
    provider.terminate("f-d-0")
    assert [(h.role, h.state) for h in provider.hosts("f")] == [(Role.DISPATCHER, CloudState.TERMINATED)]


def test_the_disk_type_is_that_of_hosts_alone(gcp, cloud):
    """A dispatcher's machine type boots from no Hyperdisk."""
    provider = gcp(disk_type="hyperdisk-balanced")
    provider.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, DISPATCHER, Boot("idle_host")))
    assert len(cloud.instances()) == 1


def test_hosts_have_a_service_account_only_for_checkpoints_in_a_bucket(gcp, cloud):
    gcp().launch(request())
    gcp(target="gs://bucket/prefix").launch(request(A, "f-2"))
    accounts = {names.host_of(i.name): i.service_account for i in cloud.instances()}
    assert accounts == {"f-1": "", "f-2": cloud.default_account}


def test_an_n1_machine_has_the_gpus_that_its_pool_names(provider, cloud):
    provider.launch(request(replace(A, instance_type="n1-standard-4+nvidia-tesla-t4x1", accelerator="T4")))
    [line] = provider.hosts("f")
    assert line.offer.instance_type == "n1-standard-4+nvidia-tesla-t4x1"
    [machine] = cloud.instances()
    assert (machine.type, machine.accelerator) == ("n1-standard-4", ("nvidia-tesla-t4", 1))


def test_a_machine_in_a_private_network_has_no_public_address(gcp, cloud):
    cloud.add_network("own", auto=False, nat=True)
    provider = gcp(network="own", public_addresses=False)
    provider.launch(request())
    [machine] = cloud.instances()
    assert machine.network.endswith("/own") and not machine.public_ip
    assert provider.hosts("f")[0].addresses == 0


def test_a_network_that_does_not_exist_needs_a_person_with_a_command(gcp):
    with pytest.raises(NeedsPerson) as caught:
        gcp(network="nowhere").launch(request())
    assert "gcloud compute networks create nowhere" in caught.value.hint


def test_an_image_that_does_not_exist_needs_a_person(gcp):
    with pytest.raises(NeedsPerson) as caught:
        gcp(image="projects/acme-training/global/images/none").launch(request())
    assert "gcloud compute images list" in caught.value.hint


def test_offers_have_the_zones_that_sell_a_type_and_prices_of_today(provider, cloud):
    before = provider.offers(Need(instance_type=KIND))
    assert before and {o.instance_type for o in before} == {KIND} and all(o.life_s >= 0 for o in before)
    assert {o.quota for o in before} == {"PREEMPTIBLE_NVIDIA_L4_GPUS"}
    assert provider.offers(Need(instance_type=KIND, zone=before[0].zone)) == [before[0]]
    assert provider.offers(Need(instance_type=KIND, region="asia-east1")) == []


def test_a_region_is_chosen_by_the_price_of_the_whole_fleet(gcp):
    provider = gcp(regions=("us-central1", "us-east4", "europe-west4"))
    choice = provider.cheapest_region([Need(instance_type=KIND)], Need(use_spot=False), 4)
    assert choice.region == choice.rows[0].region and choice.rows[0].total_micros_h <= choice.rows[-1].total_micros_h
    with pytest.raises(UsageError, match="g9-standard"):
        provider.cheapest_region([Need(instance_type="g9-standard")], Need(use_spot=False))


def test_words_that_match_no_type_are_named_with_the_nearest(provider):
    assert "g2-standard-4" in provider.unknown([Need(instance_type="g2-standrd-4")])
    assert "L4" in provider.unknown([Need(accelerator="L5")])
    assert provider.unknown([Need(accelerator="L4"), Need(instance_type=KIND)]) == ""
