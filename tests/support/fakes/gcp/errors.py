"""Refusals as Google's APIs make them: at once, as an HTTP error; or in an operation that was accepted before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.fakes.kit.requests import Lost

__all__ = ["GcpError", "LateError", "Lost", "refusal"]

# reason -> HTTP status, as "Compute Engine error messages" has them
STATUS = {
    "invalid": 400, "required": 400, "badRequest": 400, "invalidParameter": 400, "resourceInUseByAnotherResource": 400,
    "resourceNotReady": 400, "authError": 401, "forbidden": 403, "rateLimitExceeded": 403, "quotaExceeded": 403,
    "accessNotConfigured": 403, "notFound": 404, "alreadyExists": 409, "conditionNotMet": 412,
    "internalError": 500, "notImplemented": 501, "backendError": 503}  # fmt: skip
GRPC = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
        409: "ALREADY_EXISTS", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL",
        501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}  # fmt: skip
NO_ROOM = "ZONE_RESOURCE_POOL_EXHAUSTED"


class GcpError(Exception):
    """An error answer. `reason` is that of Compute's `error.errors[]`."""

    def __init__(self, reason: str, message: str, status: int = 0, details: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.details = reason, message, details or []
        self.status = status or STATUS.get(reason, 400)

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.status, "message": self.message, "errors": [
            {"message": self.message, "domain": "usageLimits" if self.code.endswith("Exceeded") else "global",
             "reason": self.code}]}
        if self.status in GRPC:
            error["status"] = GRPC[self.status]
        if self.details:
            error["details"] = self.details
        return {"error": error}


@dataclass(frozen=True)
class LateError:
    """An error of a finished operation. `details` are its `errorDetails`."""

    code: str
    message: str
    status: int = 400
    details: list[dict[str, Any]] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {"code": self.code, "message": self.message}
        return found | ({"errorDetails": self.details} if self.details else {})


def refusal(code: str, message: str) -> GcpError:
    """The error that a test has arranged: a reason, or "429" and the like."""
    return GcpError("rateLimitExceeded", message, 429) if code == "429" else GcpError(code, message)


def no_room(zone: str, vm_type: str, attachment: str, elsewhere: list[str], plain: bool) -> LateError:
    """A stockout; `plain` is the older form, without details."""
    if plain:
        return LateError(NO_ROOM, f"The zone '{zone}' does not have enough resources available to fulfill the request. "
                         " Try a different zone, or try again later.", 503)
    facts = {"zone": zone, "vmType": vm_type, "attachment": attachment,
             "zonesAvailable": ",".join(elsewhere)}
    text = f"A {vm_type} VM instance{f' with {attachment}' if attachment else ''} is currently unavailable in the "
    return LateError(f"{NO_ROOM}_WITH_DETAILS", f"{text}{facts['zone']} zone. Consider trying your request in the "
                     f"{', '.join(elsewhere) or 'other'} zone(s), which currently has capacity to accommodate your "
                     "request. Alternatively, you can try your request again with a different VM hardware "
                     "configuration or at a later time.", 503,
                     [{"errorInfo": {"reason": "resource_availability", "domain": "compute.googleapis.com",
                                     "metadatas": {k: v for k, v in facts.items() if v}}}])


def over_quota(metric: str, limit: float, region: str) -> LateError:
    """`region`: "" for a quota of the whole project."""
    where = f"in region {region}" if region else "globally"
    name = f"{metric.replace('_', '-')}-per-project{'-region' if region else ''}"
    return LateError("QUOTA_EXCEEDED", f"Quota '{metric}' exceeded.  Limit: {limit:.1f} {where}.", 403, [
        {"quotaInfo": {"metricName": f"compute.googleapis.com/{metric.lower()}", "limitName": name, "limit": limit,
                       "dimensions": {"region": region} if region else {}}}])


def not_found(path: str) -> GcpError:
    return GcpError("notFound", f"The resource '{path}' was not found")


def invalid(field_path: str, value: object, why: str) -> GcpError:
    return GcpError("invalid", f"Invalid value for field '{field_path}': '{value}'. {why}")
