"""Parser of EventBridge's events about machines. No SDK; the time comes in as `now`.

    source         detail-type                                  effect for the instance
    aws.ec2        EC2 Spot Instance Interruption Warning       a notice of 120 s from the event on
    aws.ec2        EC2 Instance Rebalance Recommendation        a hint
    aws.ec2        EC2 Instance State-change Notification       an immediate listing, if it is ending
    aws.health     AWS Health Event, scheduledChange            a hint, or a notice if it is near

Rules cannot select instances: events of the whole account in this region arrive. All of it is best effort.
Source: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations"; EventBridge User
Guide, "AWS Health events".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from spotfleet.interruptions.maintenance import Planned, notice_of
from spotfleet.model import Notice
from spotfleet.providers import CloudEvent

WARNING = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
STATE = "EC2 Instance State-change Notification"
HEALTH = "AWS Health Event"
LEAVING = ("stopping", "stopped", "shutting-down", "terminated")
NOTICE_S = 120.0  # between a warning and its instance's end
HEALTH_CODES = {"AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED": "instance-retirement",
                "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED": "instance-stop",
                "AWS_EC2_INSTANCE_STOP_SCHEDULED": "instance-stop",
                "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED": "instance-reboot",
                "AWS_EC2_SYSTEM_REBOOT_MAINTENANCE_SCHEDULED": "system-reboot",
                "AWS_EC2_DEDICATED_HOST_RETIREMENT_SCHEDULED": "instance-retirement"}

PATTERNS: tuple[dict[str, Any], ...] = (
    {"source": ["aws.ec2"], "detail-type": [WARNING, REBALANCE]},
    {"source": ["aws.ec2"], "detail-type": [STATE], "detail": {"state": list(LEAVING)}},
    {"source": ["aws.health"], "detail-type": [HEALTH],
     "detail": {"service": ["EC2"], "eventTypeCategory": ["scheduledChange"]}},
)


def read(body: str, now: float) -> list[CloudEvent]:
    """Parse one message; [] for an unknown one."""
    try:
        event = json.loads(body)
        return list(_read(event, event["detail"], now))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []


def _read(event: dict[str, Any], detail: dict[str, Any], now: float) -> Iterator[CloudEvent]:
    match event["detail-type"]:
        case kind if kind == WARNING:
            action = "terminate" if detail["instance-action"] == "terminate" else "stop"
            left_s = min(NOTICE_S, max(0.0, NOTICE_S - (now - _at(event["time"]))))
            yield CloudEvent(str(detail["instance-id"]),
                             Notice(left_s, action, why=f"EC2 will {action} it, by EventBridge"))
        case kind if kind == REBALANCE:
            yield CloudEvent(str(detail["instance-id"]),
                             Notice(0.0, kind="rebalance", why="EC2 recommends to leave it"))
        case kind if kind == STATE and detail["state"] in LEAVING:
            yield CloudEvent(str(detail["instance-id"]))
        case kind if kind == HEALTH:
            yield from _of_health(detail, now)


def _of_health(detail: dict[str, Any], now: float) -> Iterator[CloudEvent]:
    code = HEALTH_CODES.get(detail["eventTypeCode"], str(detail["eventTypeCode"]))
    planned = Planned(code, parsedate_to_datetime(detail["startTime"]).timestamp(),
                      str(detail.get("statusCode", "upcoming")))
    notice = notice_of([planned], now)
    for entity in detail["affectedEntities"] if notice else ():
        if str(entity["entityValue"]).startswith("i-"):
            yield CloudEvent(entity["entityValue"], notice)


def _at(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
