"""The kit's error table with the codes of Google Cloud and Azure, which come in other ways than EC2's."""

from __future__ import annotations

import re

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.providers.kit.mapping import errors, names
from spotfleet.providers.kit.mapping.errors import ErrorTable, Reach, Reaction, rows, worst

GCP = ErrorTable({
    **rows(Reach.POOL, "no capacity there now", "other zones are tried",
           "ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", enough=True),
    **rows(Reach.QUOTA, "the quota is used up", "raise it in {region}", "QUOTA_EXCEEDED"),
    **rows(Reach.AGAIN, "Google Cloud slows us down", errors.ASKED_AGAIN, "rateLimitExceeded", "429"),
    **rows(Reach.PERSON, "denied", "`spotfleet check --policy`", "IAM_PERMISSION_DENIED", there="ask a person"),
}, Reaction(Reach.POOL, "", "other pools are tried"), ("", "instances.insert"),
    other_meanings=(("UNSUPPORTED_OPERATION", "being created", "ZONE_RESOURCE_POOL_EXHAUSTED"),),
    by_shape=lambda code: errors.GONE if code in ("404", "notFound") else None)
WHERE = "gcp us-central1-a g2-standard-8 spot"


class HttpError(Exception):
    """An exception of Azure's SDK, whose class says nothing: its code does."""

    def __init__(self, code: str) -> None:
        self.error = type("Error", (), {"code": code})


@pytest.mark.parametrize(("code", "message", "kind", "text"), [
    ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "The zone ... does not have enough resources", NoCapacity,
     f"{WHERE}: no capacity there now (ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS)"),
    ("UNSUPPORTED_OPERATION", "preempted while being created", NoCapacity,
     f"{WHERE}: no capacity there now (UNSUPPORTED_OPERATION)"),
    ("rateLimitExceeded", "Rate Limit Exceeded", SpotfleetError,
     f"{WHERE}: Google Cloud slows us down: Rate Limit Exceeded (rateLimitExceeded)"),
    ("IAM_PERMISSION_DENIED", "compute.instances.create", NeedsPerson,
     f"{WHERE}: denied: compute.instances.create (IAM_PERMISSION_DENIED)"),
    ("404", "not found", SpotfleetError, f"{WHERE}: not found (404)"),
])
def test_a_code_becomes_the_reaction_of_its_row(code: str, message: str, kind: type, text: str):
    error = GCP.refusal(WHERE, code, message, "instances.insert")
    assert (type(error), str(error), errors.code(error)) == (kind, text, code)


def test_an_unknown_code_refuses_the_pool_of_a_launch_and_repeats_any_other_call():
    launch, listing = (GCP.refusal(WHERE, "NEW_CODE", "no", operation) for operation in ("instances.insert", "list"))
    assert (type(launch), type(listing)) == (NoCapacity, SpotfleetError)
    assert listing.hint == "the cloud's reference of list may say more"


def test_hints_are_filled_in_and_a_machine_of_the_fleet_gets_its_own():
    quota = GCP.refusal(WHERE, "QUOTA_EXCEEDED", "no", fill={"{region}": "us-central1"})
    denied = GCP.refusal(WHERE, "IAM_PERMISSION_DENIED", "no", laptop=False)
    assert (quota.hint, quota.scope, denied.hint) == ("raise it in us-central1", "quota", "ask a person")
    assert worst([quota, denied]) is denied


def test_the_code_of_an_sdks_exception_is_found_behind_ours():
    try:
        raise SpotfleetError("no") from HttpError("SkuNotAvailable")
    except SpotfleetError as error:
        found = errors.code(error, lambda e: e.error.code if isinstance(e, HttpError) else "")
    assert found == "SkuNotAvailable"


def test_a_token_has_the_form_that_each_cloud_takes_and_differs_by_fleet_host_and_attempt():
    made = [names.token_uuid(*of) for of in (("s", "f-1"), ("s", "f-1", 1), ("s", "f-2"), ("t", "f-1"))]
    assert len(set(made)) == 4 and made[0] == names.token_uuid("s", "f-1", 0)
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}", text) for text in made)
    assert re.fullmatch(r"[0-9a-f]{64}", names.token("s", "f-1"))
