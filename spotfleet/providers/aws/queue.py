"""EventBridge -> SQS: what EC2 says of instances also when the instance itself does not listen any more. Optional.

In each region of a fleet a queue, and rules of the same name that send into it; nobody else may. The dispatcher reads
it by long polls, deletes every message, also what it does not understand, and ignores instances that are not its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.providers import Belonging, Heard
from spotfleet.providers.aws import errors, names, signals
from spotfleet.providers.aws.session import Account, Client

QUEUE, RULE = "sqs-queue", "eventbridge-rule"  # kinds of Belonging
PREFIX = "spotfleet-"
TARGET = "queue"  # of each rule, its only one
KEPT_S = 300  # what nobody has read by then is of no use any more
LONGEST_WAIT_S = 20.0  # that SQS allows
DELETED_S = 75.0  # for so long after its end no queue of the same name can be made
AGAIN_S = 5.0
URL_S = 3600.0
MOST = 10  # messages of one answer
GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "ResourceNotFoundException")
JUST_DELETED = ("AWS.SimpleQueueService.QueueDeletedRecently", "QueueDeletedRecently")


def rule(fleet: str, number: int) -> str:
    """The name of the rule for `signals.PATTERNS[number]`."""
    return f"{names.queue(fleet)}-{number}"


# ---- made, listed, removed: from the laptop


def prepare(account: Account, fleet: str, tags: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Queue and rules in each region, if the fleet wants them. Idempotent."""
    if not account.settings.spec.event_queue:
        return
    for region in account.regions:
        _prepare(account, region, fleet, {**tags, names.FLEET: fleet, names.SINCE: str(int(time.time()))}, tell)


def _prepare(account: Account, region: str, fleet: str, tags: Mapping[str, str], tell: Callable[[str], None]) -> None:
    name, number = names.queue(fleet), account.identity()[0]
    where = f"arn:{partition(region)}:sqs:{region}:{number}:{name}"
    rules = [f"arn:{partition(region)}:events:{region}:{number}:rule/{rule(fleet, n)}"
             for n in range(len(signals.PATTERNS))]
    attributes = {"MessageRetentionPeriod": str(KEPT_S), "VisibilityTimeout": "30", "SqsManagedSseEnabled": "true",
                  "Policy": json.dumps(policy(where, rules))}
    sqs, events = account.client("sqs", region), account.client("events", region)
    if _url(sqs, name) == "":
        _create(sqs, name, attributes, tags, tell)
        tell(f"queue {name} in {region}, for what EventBridge says of its machines")
    for n, pattern in enumerate(signals.PATTERNS):
        events.put_rule(Name=rule(fleet, n), EventPattern=json.dumps(pattern), State="ENABLED",
                        Description="tells a spotfleet dispatcher what EC2 is about to do",
                        Tags=[{"Key": k, "Value": v} for k, v in tags.items()])
        failed = events.put_targets(Rule=rule(fleet, n), Targets=[{"Id": TARGET, "Arn": where}])
        if failed.get("FailedEntryCount"):
            raise SpotfleetError(f"aws {region}: rule {rule(fleet, n)} does not reach its queue: "
                                 f"{failed['FailedEntries']}", hint="`spotfleet up` again")


def policy(queue: str, rules: list[str]) -> dict[str, Any]:
    """Who may send into the queue: EventBridge for these rules, and nobody else."""
    return {"Version": "2012-10-17", "Statement": [{
        "Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, "Action": "sqs:SendMessage",
        "Resource": queue, "Condition": {"ArnEquals": {"aws:SourceArn": rules}}}]}


def partition(region: str) -> str:
    return {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(region.rsplit("-", 2)[0], "aws")


def _create(sqs: Client, name: str, attributes: Mapping[str, str], tags: Mapping[str, str],
            tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + DELETED_S
    while True:
        try:
            sqs.create_queue(QueueName=name, Attributes=dict(attributes), tags=dict(tags))
            return
        except SpotfleetError as error:
            if errors.code(error) not in JUST_DELETED or time.monotonic() >= deadline:
                raise
        tell(f"queue {name} was removed a moment ago, SQS makes no other for a minute; tried again in {AGAIN_S:.0f} s")
        time.sleep(AGAIN_S)


def listed(account: Account, region: str, fleet: str) -> list[Belonging]:
    """Rules, then queues, of `fleet`, "" for all: by our tag among those with names as ours."""
    return [*_rules(account.client("events", region), region, fleet),
            *_queues(account.client("sqs", region), region, fleet)]


def _rules(events: Client, region: str, fleet: str) -> Iterator[Belonging]:
    for found in list(events.pages("list_rules", "Rules", NamePrefix=PREFIX)):
        tags = _unless_gone(lambda arn=found["Arn"]: events.list_tags_for_resource(ResourceARN=arn)["Tags"]) or []
        known = {t["Key"]: t["Value"] for t in tags}
        whose = known.get(names.FLEET, "")
        if whose and fleet in ("", whose):
            yield Belonging(RULE, found["Name"], region, whose, names.since(known), found.get("State", ""))


def _queues(sqs: Client, region: str, fleet: str) -> Iterator[Belonging]:
    for url in list(sqs.pages("list_queues", "QueueUrls", QueueNamePrefix=PREFIX)):
        told = _unless_gone(lambda url=url: sqs.list_queue_tags(QueueUrl=url)) or {}
        known = told.get("Tags", {})
        whose = known.get(names.FLEET, "")
        if whose and fleet in ("", whose):
            yield Belonging(QUEUE, url.rpartition("/")[2], region, whose, names.since(known))


def discard(account: Account, belonging: Belonging) -> bool:
    """Remove a rule or a queue, no error if it is gone. False: it is neither."""
    if belonging.kind == RULE:
        events = account.client("events", belonging.region)
        _unless_gone(lambda: events.remove_targets(Rule=belonging.id, Ids=[TARGET]))
        _unless_gone(lambda: events.delete_rule(Name=belonging.id))
    elif belonging.kind == QUEUE:
        sqs = account.client("sqs", belonging.region)
        if url := _url(sqs, belonging.id):
            _unless_gone(lambda: sqs.delete_queue(QueueUrl=url))
    return belonging.kind in (RULE, QUEUE)


# ---- read: by the dispatcher


def hear(account: Account, fleet: str, wait_s: float) -> list[Heard]:
    """See `Hears.hear`."""
    if not account.settings.spec.event_queue:
        return []
    each_s = int(min(LONGEST_WAIT_S, wait_s / len(account.regions)))
    return [heard for region in account.regions for heard in _hear(account, region, fleet, each_s)]


def _hear(account: Account, region: str, fleet: str, wait_s: int) -> list[Heard]:
    sqs, key = account.client("sqs", region), ("queue", region, fleet)
    url = account.cached(key, URL_S, lambda: _known(sqs, names.queue(fleet)))
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
    return [heard for m in messages for heard in signals.read(m.get("Body", ""), now)]


def _known(sqs: Client, name: str) -> str:
    url = _url(sqs, name)
    if not url:
        raise SpotfleetError(f"there is no queue {name}", hint="`spotfleet up` makes it again")
    return url


def _url(sqs: Client, name: str) -> str:
    """"" if there is no such queue."""
    return (_unless_gone(lambda: sqs.get_queue_url(QueueName=name)) or {}).get("QueueUrl", "")


def _unless_gone(call: Callable[[], Any]) -> Any:
    """None if it is gone."""
    try:
        return call()
    except SpotfleetError as error:
        if errors.code(error) not in GONE:
            raise
        return None
