"""EventBridge -> SQS: EC2's events about instances, also after an instance itself has stopped listening. Optional.

Each region of a fleet has a queue, and rules of the same name that send into it; all other senders are denied. The
dispatcher reads it by long polls, deletes every message, also unknown ones, and ignores instances of others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.providers import CloudEvent, Resource
from spotfleet.providers.aws.account import event_parser
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.aws.session import Account, AwsClient
from spotfleet.providers.kit.requests import until_known

QUEUE, RULE = "sqs-queue", "eventbridge-rule"  # kinds of Resource
PREFIX = "spotfleet-"
TARGET = "queue"  # name of each rule's only target
KEPT_S = 300  # older messages are useless
HIDDEN_S = 30  # a message that was received and not deleted
RULE_TEXT = "tells a spotfleet dispatcher what EC2 is about to do"
LONGEST_WAIT_S = 20.0  # SQS's maximum
DELETED_S = 75.0  # time after a queue's end in which SQS makes no other of the same name
AGAIN_S = 5.0
URL_S = 3600.0
MOST = 10  # messages per answer
GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "ResourceNotFoundException")
JUST_DELETED = ("AWS.SimpleQueueService.QueueDeletedRecently", "QueueDeletedRecently")


def rule(fleet: str, number: int) -> str:
    """Return the name of the rule for `signals.PATTERNS[number]`."""
    return f"{names.queue(fleet)}-{number}"


# ---- creation, listing, removal: on the laptop


def prepare(account: Account, fleet: str, tags: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Create queue and rules in each region, if the fleet uses them. Idempotent."""
    if not account.settings.spec.event_queue or account.settings.spec.interruption_queue:
        return
    for region in account.regions:
        _prepare(account, region, fleet, {**tags, names.FLEET: fleet, names.SINCE: str(int(time.time()))}, progress)


def _prepare(account: Account, region: str, fleet: str, tags: Mapping[str, str],
             progress: Callable[[str], None]) -> None:
    name = names.queue(fleet)
    where, rules = arns(region, account.identity()[0], fleet)
    attributes = {"MessageRetentionPeriod": str(KEPT_S), "VisibilityTimeout": str(HIDDEN_S),
                  "SqsManagedSseEnabled": "true", "Policy": json.dumps(policy(where, rules))}
    sqs, events = account.client("sqs", region), account.client("events", region)
    if _url(sqs, name) == "":
        _create(sqs, name, attributes, tags, progress)
        progress(f"queue {name} in {region}, for EventBridge's events about its machines")
    for n, pattern in enumerate(event_parser.PATTERNS):
        events.put_rule(Name=rule(fleet, n), EventPattern=json.dumps(pattern), State="ENABLED",
                        Description=RULE_TEXT,
                        Tags=[{"Key": k, "Value": v} for k, v in tags.items()])
        failed = events.put_targets(Rule=rule(fleet, n), Targets=[{"Id": TARGET, "Arn": where}])
        if failed.get("FailedEntryCount"):
            raise SpotfleetError(f"aws {region}: rule {rule(fleet, n)} does not reach its queue: "
                                 f"{failed['FailedEntries']}", hint="`spotfleet up` again")


def arns(region: str, account: str, fleet: str) -> tuple[str, list[str]]:
    """Return the ARN of the fleet's queue and those of its rules."""
    begin = f"arn:{names.partition(region)}"
    return (f"{begin}:sqs:{region}:{account}:{names.queue(fleet)}",
            [f"{begin}:events:{region}:{account}:rule/{rule(fleet, n)}" for n in range(len(event_parser.PATTERNS))])


def policy(queue: str, rules: list[str]) -> dict[str, Any]:
    """Return the queue's policy: only EventBridge may send, for these rules."""
    return {"Version": "2012-10-17", "Statement": [{
        "Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, "Action": "sqs:SendMessage",
        "Resource": queue, "Condition": {"ArnEquals": {"aws:SourceArn": rules}}}]}


def _create(sqs: AwsClient, name: str, attributes: Mapping[str, str], tags: Mapping[str, str],
            progress: Callable[[str], None]) -> None:
    until_known(lambda: sqs.create_queue(QueueName=name, Attributes=dict(attributes), tags=dict(tags)),
                lambda error: errors.code(error) in JUST_DELETED, DELETED_S, AGAIN_S,
                lambda: progress(f"queue {name} was removed a moment ago, SQS makes no other for a minute; tried again "
                                 f"in {AGAIN_S:.0f} s"))


def listed(account: Account, region: str, fleet: str) -> list[Resource]:
    """List rules, then queues, of `fleet`, "" for all: those with our prefix and our tag."""
    return [*_rules(account.client("events", region), region, fleet),
            *_queues(account.client("sqs", region), region, fleet)]


def _rules(events: AwsClient, region: str, fleet: str) -> Iterator[Resource]:
    for found in list(events.pages("list_rules", "Rules", NamePrefix=PREFIX)):
        tags = _unless_gone(lambda arn=found["Arn"]: events.list_tags_for_resource(ResourceARN=arn)["Tags"]) or []
        known = {t["Key"]: t["Value"] for t in tags}
        whose = known.get(names.FLEET, "")
        if whose and fleet in ("", whose):
            yield Resource(RULE, found["Name"], region, whose, names.since(known), found.get("State", ""))


def _queues(sqs: AwsClient, region: str, fleet: str) -> Iterator[Resource]:
    for url in list(sqs.pages("list_queues", "QueueUrls", QueueNamePrefix=PREFIX)):
        answer = _unless_gone(lambda url=url: sqs.list_queue_tags(QueueUrl=url)) or {}
        known = answer.get("Tags", {})
        whose = known.get(names.FLEET, "")
        if whose and fleet in ("", whose):
            yield Resource(QUEUE, url.rpartition("/")[2], region, whose, names.since(known))


def delete(account: Account, resource: Resource) -> bool:
    """Remove a rule or a queue, no error if it is gone; return False for any other kind."""
    if resource.kind == RULE:
        events = account.client("events", resource.region)
        _unless_gone(lambda: events.remove_targets(Rule=resource.id, Ids=[TARGET]))
        _unless_gone(lambda: events.delete_rule(Name=resource.id))
    elif resource.kind == QUEUE:
        sqs = account.client("sqs", resource.region)
        if url := _url(sqs, resource.id):
            _unless_gone(lambda: sqs.delete_queue(QueueUrl=url))
    return resource.kind in (RULE, QUEUE)


# ---- reading: on the dispatcher


def receive(account: Account, fleet: str, wait_s: float) -> list[CloudEvent]:
    """Receive events; see `InterruptionEvents.poll_events`."""
    spec = account.settings.spec
    if not spec.event_queue and not spec.interruption_queue:
        return []
    each_s = int(min(LONGEST_WAIT_S, wait_s / len(account.regions)))
    return [event for region in account.regions for event in _receive(account, region, fleet, each_s)]


def _receive(account: Account, region: str, fleet: str, wait_s: int) -> list[CloudEvent]:
    sqs, key = account.client("sqs", region), ("queue", region, fleet)
    named = account.settings.spec.interruption_queue
    url = account.cached(key, URL_S, lambda: _known(sqs, named or names.queue(fleet)))
    try:
        answer = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=MOST, WaitTimeSeconds=wait_s)
    except SpotfleetError:
        account.forget(key)
        raise
    messages = answer.get("Messages", [])
    if messages:
        sqs.delete_message_batch(QueueUrl=url, Entries=[
            {"Id": str(n), "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(messages)])
    now = time.time()
    return [event for m in messages for event in event_parser.read(m.get("Body", ""), now)]


def _known(sqs: AwsClient, name: str) -> str:
    url = _url(sqs, name)
    if not url:
        raise SpotfleetError(f"there is no queue {name}", hint="`spotfleet up` makes it again")
    return url


def _url(sqs: AwsClient, name: str) -> str:
    """Return the queue's URL; "" if it does not exist."""
    return (_unless_gone(lambda: sqs.get_queue_url(QueueName=name)) or {}).get("QueueUrl", "")


def _unless_gone(call: Callable[[], Any]) -> Any:
    """Return the result of `call`; None if the resource is gone."""
    try:
        return call()
    except SpotfleetError as error:
        if errors.code(error) not in GONE:
            raise
        return None
