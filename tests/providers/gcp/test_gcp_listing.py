"""Instances and operations of Compute Engine as lines of a listing."""

from __future__ import annotations

from typing import Any

import pytest

from spotfleet.catalog import load
from spotfleet.model import CloudHost, CloudState, Market, Offer, Role, Run
from spotfleet.providers.gcp.mapping import listing, names
from spotfleet.providers.kit.mapping.listing import ListingContext

KIND, ZONE = "g2-standard-4", "us-central1-a"
NAME = names.machine("f-1", KIND, Market.SPOT)
CONTEXT = ListingContext("", "ubuntu", lambda host: (), lambda offer: offer, lambda role: 100)
AT = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def instance(status: str = "RUNNING", name: str = NAME, machine: str = "7", **more: Any) -> dict[str, Any]:
    return {"id": machine, "name": name, "status": status, "zone": f"https://x/zones/{ZONE}",
            "machine_type": f"https://x/zones/{ZONE}/machineTypes/{KIND}", "creation_timestamp": at(0.0),
            "labels": {"spotfleet": "f", "spotfleet-role": "worker"}, "scheduling": {"provisioning_model": "SPOT"},
            "network_interfaces": [{"network_i_p": "10.0.0.2", "access_configs": [{"nat_i_p": "203.0.113.5"}]}], **more}


def operation(kind: str, after_s: float | None, name: str = NAME, machine: str = "7", error: str = "",
              user: str = "me") -> dict[str, Any]:
    """An operation that ended so long after AT; None: it goes on."""
    return {"name": f"{kind}-{machine}-{after_s}", "operation_type": kind, "target_id": machine, "user": user,
            "target_link": f"https://x/projects/p/zones/{ZONE}/instances/{name}", "zone": f"https://x/zones/{ZONE}",
            "status": "RUNNING" if after_s is None else "DONE", "end_time": at(after_s or 0.0),
            **({"error": {"errors": [{"code": error}]}} if error else {})}


def at(after_s: float) -> str:
    minutes, seconds = divmod(after_s, 60)
    return f"2027-01-15T00:{int(minutes):02d}:{seconds:06.3f}-08:00"


def lines(instances: list[dict[str, Any]], operations: list[dict[str, Any]], fleet: str = "f") -> list[CloudHost]:
    return listing.lines(fleet, instances, operations, CONTEXT, load().machines)


def test_a_time_is_read_with_its_zone_and_its_fraction():
    assert listing.instant(at(61.5)) == AT + 61.5
    assert listing.instant("2027-01-15T08:00:00Z") == AT
    assert listing.instant("yesterday") == listing.instant("") == 0.0


def test_no_two_machine_types_of_the_catalog_have_one_code():
    kinds = {p.machine.name for p in load().prices if p.machine.provider == "gcp"}
    assert len(kinds) > 20 and len({names.code(kind, Market.SPOT) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("market", Market)
def test_a_machines_name_tells_its_host_its_type_and_its_market(market):
    name = names.machine("f-ab12-d-3", KIND, market)
    assert names.host_of(name) == "f-ab12-d-3" and names.sold(name, load().machines) == (KIND, market)
    assert len(names.machine("f" * 40 + "-ab12-123456", KIND, market)) <= 63


def test_the_name_of_a_host_tells_its_role_with_and_without_a_group():
    hosts = ("f-ab12-3", "f-ab12-gpu-3", "f-ab12-d-3", "f-ab12", "f-ab12-a-b-3", "g-ab12-3")
    assert [names.of_fleet("f-ab12", host) for host in hosts] == [
        Role.WORKER, Role.WORKER, Role.DISPATCHER, None, None, None]


def test_a_running_machine_is_billed_from_the_end_of_its_making():
    [line] = lines([instance()], [operation("insert", 20.0)])
    assert (line.request_id, line.provider_id, line.state, line.runs) == (
        "f-1", "7", CloudState.RUNNING, (Run(AT + 20.0),))
    assert (line.address, line.addresses, line.role, line.disk_gib) == ("10.0.0.2", 1, Role.WORKER, 100)
    assert line.offer == Offer("gcp", "us-central1", ZONE, KIND, Market.SPOT, 1, 0, 0)


def test_a_machine_in_the_making_is_pending_whatever_its_status():
    for status in ("PROVISIONING", "STAGING", "RUNNING"):
        [line] = lines([instance(status)], [operation("insert", None)])
        assert (line.state, line.runs) == (CloudState.PENDING, ())


def test_a_dispatcher_lists_no_machine_in_the_making_and_no_remains_of_a_failed_launch():
    def listed(status: str, *operations: dict[str, Any]) -> list[CloudHost]:
        return listing.lines("f", [instance(status)], operations, CONTEXT, load().machines, in_the_making=False)

    assert listed("STAGING", operation("insert", None)) == []
    assert listed("TERMINATED", operation("insert", 9.0, error="PREEMPTED")) == []
    assert len(listed("STOPPING", operation("insert", None), operation("delete", None))) == 1
    assert len(listed("RUNNING", operation("insert", 9.0))) == len(listed("RUNNING")) == 1


def test_a_deleted_machine_is_read_back_from_its_operations_with_the_same_run():
    [before] = lines([instance()], [operation("insert", 20.0)])
    [after] = lines([], [operation("insert", 20.0), operation("delete", 90.0)])
    assert (after.request_id, after.provider_id, after.state, after.offer.pool, after.role) == (
        "f-1", "7", CloudState.TERMINATED, before.offer.pool, Role.WORKER)
    assert after.runs == (Run(AT + 20.0, AT + 90.0),) and after.ended_at == AT + 90.0


def test_a_preempted_and_deleted_machine_was_taken_by_the_cloud():
    for ends in ([operation(listing.PREEMPTED, 80.0, user="system"), operation("delete", 90.0, user="system")],
                 [operation(listing.PREEMPTED, 80.0, user="system")]):
        [line] = lines([], [operation("insert", 20.0), *ends])
        assert line.state is CloudState.TERMINATED and "preempted" in line.why
        assert line.runs == (Run(AT + 20.0, AT + 80.0, taken=True),)


def test_a_failure_of_the_clouds_machine_counts_as_taken_and_is_paid():
    [line] = lines([], [operation("insert", 20.0), operation("compute.instances.hostError", 80.0),
                        operation("delete", 99.0)])
    assert line.runs == (Run(AT + 20.0, AT + 80.0, taken=True, paid=True),)


def test_a_stopped_machine_that_was_started_again_has_both_runs():
    history = [operation("insert", 20.0), operation(listing.PREEMPTED, 80.0, user="system")]
    [stopped] = lines([instance("TERMINATED")], history)
    assert (stopped.state, stopped.runs) == (CloudState.STOPPED, (Run(AT + 20.0, AT + 80.0, taken=True),))
    [back] = lines([instance()], [*history, operation("start", 200.0)])
    assert (back.state, back.runs) == (CloudState.RUNNING, (Run(AT + 20.0, AT + 80.0, taken=True), Run(AT + 200.0)))


def test_a_machine_older_than_its_operations_has_the_run_since_its_last_start():
    [line] = lines([instance(last_start_timestamp=at(30.0))], [])
    assert line.runs == (Run(AT + 30.0),)


def test_an_operation_that_failed_made_and_ended_nothing():
    assert lines([], [operation("insert", 20.0, error="ZONE_RESOURCE_POOL_EXHAUSTED"), operation("delete", 30.0)]) == []
    [line] = lines([instance()], [operation("insert", 20.0), operation("delete", 30.0, error="X")])
    assert line.runs == (Run(AT + 20.0),)


def test_ended_hosts_of_another_fleet_are_not_listed():
    other = names.machine("f-2-1", KIND, Market.SPOT)  # its fleet is "f-2"
    assert lines([], [operation("insert", 1.0, other), operation("delete", 2.0, other)]) == []
    assert [o.request_id for o in lines([], [operation("insert", 1.0, other), operation("delete", 2.0, other)],
                                        "f-2")] == ["f-2-1"]


def test_a_second_machine_of_one_host_is_an_intruder():
    first, second = instance(), instance(machine="8", creation_timestamp=at(5.0))
    found = lines([second, first, second], [operation("insert", 2.0), operation("insert", 6.0, machine="8")])
    assert [o.request_id for o in found] == ["f-1", "f-1~7"] and found[0].provider_id == "8"


def test_the_metadata_of_a_machine_holds_its_pool_and_price():
    items = [{"key": names.POOL, "value": f"1 L4 {ZONE}/{KIND}=300000/700000"}]
    [line] = lines([instance(metadata={"items": items})], [operation("insert", 2.0)])
    assert (line.offer.accelerator, line.offer.price_micros_h, line.offer.on_demand_micros_h) == ("L4", 300000, 700000)


def test_a_type_with_attached_gpus_has_a_name_of_ours_that_can_be_split():
    gpus = [{"accelerator_type": f"https://x/zones/{ZONE}/acceleratorTypes/nvidia-tesla-t4", "accelerator_count": 2}]
    [line] = lines([instance(machine_type="zones/z/machineTypes/n1-standard-8", guest_accelerators=gpus)], [])
    assert line.offer.instance_type == "n1-standard-8+nvidia-tesla-t4x2"
    assert listing.split(line.offer.instance_type) == ("n1-standard-8", "nvidia-tesla-t4", 2)
    assert listing.split(KIND) == (KIND, "", 0)
