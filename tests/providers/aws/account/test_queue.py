"""EventBridge -> SQS on the AWS fake: made, read, removed; and what its messages mean."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from spotfleet.errors import SpotfleetError
from spotfleet.model import Notice
from spotfleet.providers import CloudEvent, GroupLaunch, InterruptionEvents, ManagedResources, Resource
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.account import event_parser, queue
from spotfleet.providers.aws.mapping import names

NOW = 1_800_000_000.0
TAGS = {"team": "vision"}


def event(kind: str, source: str = "aws.ec2", at: str = "2027-01-15T08:00:00Z", **detail: Any) -> str:
    return json.dumps({"version": "0", "id": "x", "detail-type": kind, "source": source, "account": "123456789012",
                       "time": at, "region": "us-east-1", "resources": [], "detail": detail})


def health(code: str, in_s: float, status: str = "upcoming", *entities: str) -> str:
    detail = {"eventTypeCode": code, "service": "EC2", "eventTypeCategory": "scheduledChange", "statusCode": status,
              "startTime": formatdate(NOW + in_s, usegmt=True),
              "affectedEntities": [{"entityValue": e} for e in entities or ("i-1",)]}
    return event(event_parser.HEALTH, "aws.health", **detail)


# ---- what messages mean


@pytest.mark.parametrize(("action", "told"), [("terminate", "terminate"), ("stop", "stop"), ("hibernate", "stop")])
def test_a_warning_is_a_notice_with_what_is_left_of_its_two_minutes(action, told):
    body = event(event_parser.WARNING, **{"instance-id": "i-1", "instance-action": action})
    (heard,) = event_parser.read(body, NOW + 15)
    assert heard == CloudEvent("i-1", Notice(105.0, told, why=f"EC2 will {told} it, by EventBridge"))
    assert event_parser.read(body, NOW + 500)[0].notice.seconds_left == 0.0
    assert event_parser.read(body, NOW - 90)[0].notice.seconds_left == 120.0  # clocks differ


def test_a_recommendation_is_a_hint_and_a_change_of_state_a_reason_to_look():
    assert event_parser.read(event(event_parser.REBALANCE, **{"instance-id": "i-1"}), NOW)[0].notice.kind == "rebalance"
    assert event_parser.read(event(event_parser.STATE, **{"instance-id": "i-1", "state": "stopping"}),
                             NOW) == [CloudEvent("i-1")]
    assert event_parser.read(event(event_parser.STATE, **{"instance-id": "i-1", "state": "running"}), NOW) == []


def test_planned_maintenance_is_a_hint_until_it_is_near_and_then_a_notice_for_each_machine():
    code = "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED"
    assert event_parser.read(health(code, 86_400), NOW)[0].notice.kind == "maintenance"
    near = event_parser.read(health(code, 300, "upcoming", "i-1", "i-2", "vol-1"), NOW)
    assert [(h.provider_id, h.notice.kind, h.notice.seconds_left) for h in near] == [
        ("i-1", "interruption", 300.0), ("i-2", "interruption", 300.0)]
    assert event_parser.read(health("AWS_EC2_SOMETHING_NEW", 300), NOW)[0].notice.kind == "maintenance"
    assert event_parser.read(health(code, 300, "closed"), NOW) == []


@pytest.mark.parametrize("body", [
    "", "<xml>", "[]", "null", "{}", '{"detail": 5}', event("EC2 Fleet Error"), event(event_parser.WARNING),
    event(event_parser.WARNING, at="soon", **{"instance-id": "i-1", "instance-action": "stop"}),
    event(event_parser.HEALTH, startTime="never"), event(event_parser.STATE, state=7)],
    ids=["empty", "xml", "list", "null", "object", "no detail", "other kind", "no instance", "no time", "no date",
         "no state"])
def test_what_cannot_be_read_says_nothing(body):
    assert event_parser.read(body, NOW) == []


# ---- made and removed


def lines(aws: AwsProvider, fleet: str = "f", tags: dict[str, str] = TAGS) -> list[str]:
    told: list[str] = []
    queue.prepare(aws.account, fleet, tags, told.append)
    return told


def ours(cloud: Any) -> list[tuple[str, str]]:
    return sorted((t.kind, t.name) for t in cloud.everything() if t.kind in ("queue", "rule"))


def test_the_provider_is_all_that_it_says_and_hears_where_that_is_wanted(aws):
    provider = aws(event_queue=True)
    assert all(isinstance(provider, kind) for kind in (ManagedResources, GroupLaunch, InterruptionEvents))
    assert provider.has_events() and not aws().has_events()


def test_nothing_is_made_or_asked_where_it_is_not_wanted(cloud, aws):
    assert lines(aws()) == [] and aws().poll_events("f", 0.0) == []
    assert ours(cloud) == [] and not [c for c in cloud.calls if c.service in ("sqs", "events")]


def test_queue_and_rules_are_made_once_tagged_and_open_to_these_rules_of_eventbridge_alone(cloud, aws):
    provider = aws(event_queue=True)
    assert len(lines(provider)) == 1 and lines(provider) == []
    assert [name for _, name in ours(cloud)] == ["spotfleet-f", "spotfleet-f-0", "spotfleet-f-1", "spotfleet-f-2"]
    sqs = cloud.client("sqs", "us-east-1")
    url = sqs.get_queue_url(QueueName="spotfleet-f")["QueueUrl"]
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"].items() >= {"spotfleet": "f", "team": "vision"}.items()
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    (statement,) = json.loads(told["Policy"])["Statement"]
    assert statement["Principal"] == {"Service": "events.amazonaws.com"}
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": [
        f"arn:aws:events:us-east-1:{provider.account.identity()[0]}:rule/spotfleet-f-{n}" for n in range(3)]}}
    assert (told["SqsManagedSseEnabled"], told["MessageRetentionPeriod"]) == ("true", "300")


def test_what_was_made_is_listed_and_removed_and_nobody_elses(cloud, aws):
    provider = aws(event_queue=True)
    lines(provider), lines(provider, "g")
    sqs, events = cloud.client("sqs", "us-east-1"), cloud.client("events", "us-east-1")
    sqs.create_queue(QueueName="spotfleet-mine")
    events.put_rule(Name="spotfleet-mine", ScheduleExpression="rate(1 day)")
    found = queue.listed(provider.account, "us-east-1", "f")
    assert [(b.kind, b.id, b.fleet) for b in found] == [
        *((queue.RULE, f"spotfleet-f-{n}", "f") for n in range(3)), (queue.QUEUE, "spotfleet-f", "f")]
    assert len(queue.listed(provider.account, "us-east-1", "")) == 8
    for resource in found * 2:  # a second time it is gone, and no error
        assert queue.delete(provider.account, resource)
    assert queue.listed(provider.account, "us-east-1", "f") == []
    assert ours(cloud) == [("queue", "spotfleet-g"), ("queue", "spotfleet-mine"), ("rule", "spotfleet-g-0"),
                           ("rule", "spotfleet-g-1"), ("rule", "spotfleet-g-2"), ("rule", "spotfleet-mine")]
    assert not queue.delete(provider.account, Resource("volume", "vol-1", "us-east-1", "f"))


def test_a_queue_that_was_removed_a_moment_ago_is_waited_for(cloud, aws, monkeypatch):
    monkeypatch.setattr(queue, "AGAIN_S", 0.01)
    cloud.fault("sqs:CreateQueue", code="AWS.SimpleQueueService.QueueDeletedRecently", times=2)
    told = lines(aws(event_queue=True))
    assert len(told) == 3 and "tried again" in told[0] and queue.QUEUE == "sqs-queue"


def test_each_region_has_its_own_of_both_and_each_partition_its_own_names(cloud, aws):
    lines(aws(event_queue=True, regions=("us-east-1", "us-west-2"), joined=True))
    assert len(cloud.client("sqs", "us-west-2").list_queues(QueueNamePrefix="spotfleet-f")["QueueUrls"]) == 1
    for region, partition in (("us-east-1", "aws"), ("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"),
                              ("ap-southeast-2", "aws"), ("eusc-de-east-1", "aws-eusc")):
        where, rules = queue.arns(region, "123", "f")
        assert where == f"arn:{partition}:sqs:{region}:123:spotfleet-f"
        assert rules[0] == f"arn:{partition}:events:{region}:123:rule/spotfleet-f-0"


# ---- read


@pytest.fixture
def fleet(cloud: Any, aws: Callable[..., AwsProvider]) -> tuple[AwsProvider, list[str]]:
    """A dispatcher that hears, and two spot instances."""
    lines(aws(event_queue=True))
    made = cloud.client("ec2", "us-east-1").run_instances(
        ImageId=cloud.UBUNTU, InstanceType="g5.xlarge", MinCount=2, MaxCount=2,
        InstanceMarketOptions={"MarketType": "spot"})
    dispatcher = aws(event_queue=True, side="dispatcher")
    while dispatcher.poll_events("f", 0.0):
        pass
    return dispatcher, [i["InstanceId"] for i in made["Instances"]]


def heard(dispatcher: AwsProvider, count: int) -> list[CloudEvent]:
    found: list[CloudEvent] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found += dispatcher.poll_events("f", 1.0)
    return found


def test_a_warning_reaches_the_dispatcher_as_a_notice_and_is_gone_from_the_queue(cloud, fleet):
    dispatcher, (first, _) = fleet
    cloud.interrupt(first)
    (said,) = heard(dispatcher, 1)
    assert said.provider_id == first and 100 < said.notice.seconds_left <= 120
    assert dispatcher.poll_events("f", 0.0) == []


def test_recommendations_and_ends_reach_it_too(cloud, fleet):
    dispatcher, (first, second) = fleet
    cloud.rebalance(first)
    assert [(h.provider_id, h.notice.kind) for h in heard(dispatcher, 1)] == [(first, "rebalance")]
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[second])
    assert set(heard(dispatcher, 1)) == {CloudEvent(second)}


def test_what_cannot_be_read_is_deleted_and_holds_nothing_up(cloud, fleet):
    dispatcher, (first, _) = fleet
    sqs = cloud.client("sqs", "us-east-1")
    url = sqs.get_queue_url(QueueName=names.queue("f"))["QueueUrl"]
    for body in ("<xml>", "{}", event(event_parser.REBALANCE, **{"instance-id": first})):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    assert [h.provider_id for h in heard(dispatcher, 1)] == [first]
    dispatcher.poll_events("f", 0.0)
    told = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[
        "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"])["Attributes"]
    assert set(told.values()) == {"0"}


def test_it_waits_for_a_word_and_has_it_at_once(cloud, fleet):
    dispatcher, (first, _) = fleet
    found: list[CloudEvent] = []
    listener = threading.Thread(target=lambda: found.extend(heard(dispatcher, 1)))
    listener.start()
    cloud.interrupt(first)
    listener.join(30)
    assert not listener.is_alive() and [h.provider_id for h in found] == [first]


def test_a_queue_that_is_gone_is_said_and_heard_again_once_it_is_there(cloud, aws, fleet):
    dispatcher, _ = fleet
    for resource in queue.listed(dispatcher.account, "us-east-1", "f"):
        queue.delete(dispatcher.account, resource)
    with pytest.raises(SpotfleetError):
        dispatcher.poll_events("f", 0.0)
    with pytest.raises(SpotfleetError, match="there is no queue spotfleet-f"):
        dispatcher.poll_events("f", 0.0)
    lines(aws(event_queue=True))
    assert dispatcher.poll_events("f", 0.0) == []
