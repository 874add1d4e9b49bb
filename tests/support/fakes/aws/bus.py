"""What EC2 tells EventBridge, and EventBridge its targets in SQS."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws.catalog import ACCOUNT, region_of
from tests.support.fakes.aws.state import Machine, iso

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud


class Bus:
    def __init__(self, cloud: AwsCloud) -> None:
        self.cloud = cloud

    def warned(self, machine: Machine) -> None:
        assert machine.notice
        self._send(
            machine,
            "EC2 Spot Instance Interruption Warning",
            {"instance-id": machine.id, "instance-action": machine.notice[0]},
        )

    def recommended(self, machine: Machine) -> None:
        self._send(machine, "EC2 Instance Rebalance Recommendation", {"instance-id": machine.id})

    def state_changed(self, machine: Machine, state: str) -> None:
        self._send(machine, "EC2 Instance State-change Notification", {"instance-id": machine.id, "state": state})

    def foreign(self, region: str, detail_type: str, detail: dict[str, Any]) -> None:
        """An event of an instance that is not in this cloud's books: rules cannot be scoped, so these arrive too."""
        self._put(region, detail_type, detail, "arn:aws:ec2:*:instance/" + detail.get("instance-id", ""))

    def _send(self, machine: Machine, kind: str, detail: dict[str, Any]) -> None:
        region = region_of(machine.order.zone)
        self._put(region, kind, detail, f"arn:aws:ec2:{region}:{ACCOUNT}:instance/{machine.id}")

    def _put(self, region: str, kind: str, detail: dict[str, Any], resource: str) -> None:
        if not self.cloud.used("events"):
            return
        event = {
            "version": "0",
            "id": str(uuid.uuid4()),
            "detail-type": kind,
            "source": "aws.ec2",
            "account": ACCOUNT,
            "time": iso(self.cloud.now()),
            "region": region,
            "resources": [resource],
            "detail": detail,
        }
        from moto.events.models import events_backends

        for bus in events_backends[ACCOUNT][region].event_buses.values():
            for rule in bus.rules.values():
                if rule.state == "ENABLED" and rule.event_pattern.matches_event(event):
                    for target in rule.targets:
                        self._deliver(region, target, event)

    def _deliver(self, region: str, target: dict[str, Any], event: dict[str, Any]) -> None:
        arn = target["Arn"]
        if arn.split(":")[2] != "sqs":
            return
        from moto.sqs.models import sqs_backends

        backend = sqs_backends[ACCOUNT][arn.split(":")[3]]
        queue = next((q for q in backend.queues.values() if q.queue_arn == arn), None)
        if queue is None or not _may_send(queue, event):
            return
        backend.send_message(queue.name, json.dumps(event))


def _may_send(queue: Any, event: dict[str, Any]) -> bool:
    """EventBridge needs the queue's own policy to let it in."""
    policy = queue.policy
    if not policy:
        return False
    document = json.loads(policy) if isinstance(policy, str) else policy
    statements = document.get("Statement", [])
    for statement in statements if isinstance(statements, list) else [statements]:
        principal = statement.get("Principal", {})
        service = principal.get("Service", []) if isinstance(principal, dict) else principal
        actions = statement.get("Action", [])
        actions = [a.lower() for a in ([actions] if isinstance(actions, str) else actions)]
        if "events.amazonaws.com" in service and any(a in ("sqs:sendmessage", "sqs:*") for a in actions):
            return True
    return False
