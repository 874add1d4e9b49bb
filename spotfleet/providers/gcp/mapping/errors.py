"""Error codes of Google Cloud, and the reaction to each. Pure.

An error comes in two ways: as the refusal of a request, with a reason such as "rateLimitExceeded", or in an operation
that was accepted and failed later, with a code such as "ZONE_RESOURCE_POOL_EXHAUSTED".
Sources: Compute Engine, "Troubleshooting resource availability", "Handle API errors", "Allocation quotas".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.providers.kit.mapping.errors import ASKED_AGAIN, GONE, ErrorTable, Reach, code, rows

__all__ = ["code", "gone", "of_operation", "refusal"]

LOGIN = "gcloud auth application-default login"
MORE = "another pool is tried; this one again in some minutes"
QUOTA = ("raise it: console, IAM & Admin, Quotas & System Limits, or `spotfleet check gcp FILE`, which names it; other "
         "types or regions are tried")
NO_ROOM = "no room for this machine type there now"
DENIED = "forbidden"
API_OFF = "accessNotConfigured"
ABSENT = "notFound"
FINGERPRINT = "conditionNotMet"
PROJECT_WIDE = "GPUS_ALL_REGIONS"
EVERYWHERE = "quotaExceeded in all regions"
TOO_FEW = "VM_MIN_COUNT_NOT_REACHED"  # a bulk request has this code; the operations of its machines have the cause

TABLE = ErrorTable({
    **rows(Reach.POOL, NO_ROOM, MORE, "ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
           "STOCKOUT", "insufficientCapacity", "RESOURCE_POOL_EXHAUSTED", TOO_FEW,
           "resource_availability"),
    **rows(Reach.POOL, "the machine was taken back while it was made", MORE, "UNSUPPORTED_OPERATION",
           "RESOURCE_NOT_FOUND", "PREEMPTED"),
    **rows(Reach.POOL, "the zone does not have it", "another pool is tried", "invalid machine type"),
    **rows(Reach.QUOTA, "the quota is used up", QUOTA, "QUOTA_EXCEEDED", "quotaExceeded"),
    **rows(Reach.PERSON, "the project's quota for GPUs in all regions is used up",
           "raise GPUS_ALL_REGIONS: console, IAM & Admin, Quotas & System Limits", EVERYWHERE),
    **rows(Reach.REGION, "the subnet has no free address", "name a larger one under `gcp.subnetworks`",
           "IP_SPACE_EXHAUSTED", "IP_SPACE_EXHAUSTED_WITH_DETAILS"),
    **rows(Reach.AGAIN, "too many requests", ASKED_AGAIN, "rateLimitExceeded", "userRateLimitExceeded", "429",
           "RATE_LIMIT_EXCEEDED", "RESOURCE_OPERATION_RATE_EXCEEDED", "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED"),
    **rows(Reach.AGAIN, "", ASKED_AGAIN, "RESOURCE_NOT_READY", "resourceNotReady", "backendError", "internalError",
           "INTERNAL_ERROR", "500", "502", "503", "504", "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
           "resourceInUseByAnotherResource", "resourceInUse", "operationInProgress", FINGERPRINT, "412"),
    **rows(Reach.AGAIN, "somebody else made it at the same time", ASKED_AGAIN, "alreadyExists",
           "RESOURCE_ALREADY_EXISTS"),
    **rows(Reach.PERSON, "", "`spotfleet check gcp --policy` prints the role that is needed", DENIED,
           "IAM_PERMISSION_DENIED", "PERMISSIONS_ERROR", "403",
           there="the dispatcher's service account lacks it: see `gcp.dispatcher_service_account` in "
                 "docs/clouds/gcp.md"),
    **rows(Reach.PERSON, "the service account of the machine cannot be used",
           "correct `gcp.service_account` and `gcp.dispatcher_service_account`; a launch with one needs the role "
           "roles/iam.serviceAccountUser on it: yours for the dispatcher, the dispatcher's account for hosts",
           "SERVICE_ACCOUNT_ACCESS_DENIED", "EXTERNAL_RESOURCE_NOT_FOUND"),
    **rows(Reach.PERSON, "no valid credentials", LOGIN, "required", "authError", "401", "UNAUTHENTICATED"),
    **rows(Reach.PERSON, "the API is not enabled",
           "gcloud services enable {service}.googleapis.com --project {project}",
           API_OFF, "SERVICE_DISABLED"),
    **rows(Reach.PERSON, "the project has no billing account, or its billing is off",
           "gcloud billing projects link {project} --billing-account ACCOUNT", "billingNotEnabled",
           "BILLING_DISABLED", "accountDisabled"),
    **rows(Reach.PERSON, "an organization policy does not allow it",
           "ask who administers the organization for an exception", "conditionNotMet policy",
           "CONDITION_NOT_MET", "ORG_POLICY"),
    **rows(Reach.PERSON, "", "correct the fleet file", "invalid", "badRequest", "INVALID_FIELD_VALUE",
           "INVALID_USAGE", "400"),
    **dict.fromkeys((ABSENT, "404"), GONE),
}, launches=("instances.insert", "regionInstances.bulkInsert"),
    reference="see Compute Engine's reference of {operation}",
    other_meanings=(
        ("QUOTA_EXCEEDED", PROJECT_WIDE, EVERYWHERE), ("quotaExceeded", PROJECT_WIDE, EVERYWHERE),
        (FINGERPRINT, "onstraint", "conditionNotMet policy"),
        ("invalid", "achine type", "invalid machine type"), ("invalid", "machineType", "invalid machine type"),
        ("invalid", "achineTypes/", "invalid machine type"),
        (DENIED, "has not been used in project", API_OFF), (DENIED, "it is disabled", API_OFF),
        ("403", "has not been used in project", API_OFF)))


def refusal(where: str, reason: str, message: str, operation: str, *, project: str = "", laptop: bool = True,
            ) -> SpotfleetError:
    """Return our error for a refused request. A launch that names a missing thing is for a person: it stays missing."""
    launch = operation in TABLE.launches
    if reason in (ABSENT, "404") and launch:
        reason = "invalid machine type" if "achineTypes/" in message or "cceleratorTypes/" in message else "invalid"
    service = "compute" if "." in operation or not operation else operation
    return TABLE.refusal(where, reason, message, operation, laptop=laptop, fill={
        "{project}": project or "PROJECT", "{service}": service})


def of_operation(where: str, operation: Mapping[str, Any], name: str, *, project: str = "",
                 laptop: bool = True) -> SpotfleetError | None:
    """Return our error for a failed operation; None for one without an error. Of several errors the first counts, as
    the others follow from it."""
    errors: Sequence[Mapping[str, Any]] = (operation.get("error") or {}).get("errors") or ()
    if not errors:
        return None
    first = errors[0]
    found = refusal(where, str(first.get("code", "")), str(first.get("message", "")), name, project=project,
                    laptop=laptop)
    if isinstance(found, NoCapacity) and (zones := hints(errors)):
        found.hint = f"Google Cloud sees room in {', '.join(zones)}; {found.hint}"
    return found


def hints(errors: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the zones that the details of a stockout name as having room."""
    found: list[str] = []
    for error in errors:
        for detail in error.get("error_details") or ():
            named = ((detail.get("error_info") or {}).get("metadatas") or {}).get("zonesAvailable", "")
            found += [zone for zone in re.split(r"[,\s]+", named) if zone]
    return list(dict.fromkeys(found))


def gone(error: BaseException) -> bool:
    """Return whether the error means that the thing does not exist."""
    return code(error) in (ABSENT, "404")
