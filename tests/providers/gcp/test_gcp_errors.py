"""Reactions to the errors of Google Cloud."""

from __future__ import annotations

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.providers.gcp.mapping import errors

WHERE = "gcp us-central1 us-central1-a g2-standard-4 spot"


def refused(code: str, message: str = "text", operation: str = "instances.insert") -> SpotfleetError:
    return errors.refusal(WHERE, code, message, operation, project="p-1")


@pytest.mark.parametrize("code", ["ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
                                  "STOCKOUT", "UNSUPPORTED_OPERATION", "SOMETHING_NEW"])
def test_a_stockout_refuses_the_pool(code):
    error = refused(code)
    assert isinstance(error, NoCapacity) and error.scope == "pool" and error.hint and code in str(error)


def test_the_zones_that_a_stockout_names_stand_in_the_hint():
    details = [{"error_info": {"metadatas": {"zonesAvailable": "us-central1-b, us-central1-f"}}}]
    error = errors.of_operation(WHERE, {"error": {"errors": [
        {"code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "message": "no room", "error_details": details}]}},
        "instances.insert")
    assert isinstance(error, NoCapacity) and "us-central1-b, us-central1-f" in error.hint
    assert errors.of_operation(WHERE, {"status": "DONE"}, "instances.insert") is None


def test_a_quota_of_the_region_is_another_thing_than_that_of_the_project():
    region = refused("QUOTA_EXCEEDED", "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded. Limit: 0 in region us-central1.")
    assert isinstance(region, NoCapacity) and region.scope == "quota"
    project = refused("QUOTA_EXCEEDED", "Quota 'GPUS_ALL_REGIONS' exceeded. Limit: 0.0 globally.")
    assert isinstance(project, NeedsPerson) and "GPUS_ALL_REGIONS" in project.hint


@pytest.mark.parametrize("code", ["rateLimitExceeded", "RESOURCE_NOT_READY", "resourceInUseByAnotherResource", "503",
                                  "conditionNotMet"])
def test_errors_that_pass_are_asked_again(code):
    error = refused(code)
    assert type(error) is SpotfleetError and error.hint


@pytest.mark.parametrize("code, message, command", [
    ("accessNotConfigured", "Compute Engine API has not been used", "gcloud services enable compute.googleapis.com "
                                                                    "--project p-1"),
    ("forbidden", "Compute Engine API has not been used in project 12 before or it is disabled.", "services enable"),
    ("required", "Login Required.", "gcloud auth application-default login"),
    ("forbidden", "Required 'compute.instances.create' permission", "spotfleet check gcp --policy"),
    ("billingNotEnabled", "off", "gcloud billing projects link p-1"),
    ("conditionNotMet", "Constraint constraints/compute.vmExternalIpAccess violated", "organization"),
])
def test_a_person_is_given_the_command(code, message, command):
    error = refused(code, message)
    assert isinstance(error, NeedsPerson) and command in error.hint


def test_a_zone_without_the_machine_type_refuses_the_pool_and_other_missing_things_need_a_person():
    message = "Invalid value for field 'resource.machineType': 'zones/z/machineTypes/a9-x'. It does not exist."
    assert isinstance(refused("invalid", message), NoCapacity)
    assert isinstance(refused("notFound", "The resource 'projects/p/zones/z/acceleratorTypes/t' was not found"),
                      NoCapacity)
    assert isinstance(refused("notFound", "The resource 'projects/p/global/networks/n' was not found"), NeedsPerson)
    assert errors.gone(refused("notFound", "no such instance", "instances.delete"))
