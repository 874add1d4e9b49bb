"""The parts of scripts/smoke-aws: each a tiny fleet of its own, for a question that only the real AWS can answer.

    part       minutes  dollars   the question
    basic           25     0.60   does a host that gets a real interruption notice leave in time, and another come?
    gang            15     0.10   does one call make two spot hosts, and which launch index has each?
    key             15     0.10   does EC2 start hosts whose disks a customer key encrypts (--kms-key)?
    private         20     0.15   do machines without public addresses work (--subnets; the laptop comes by VPN)?
    stop            30     0.60   does EC2 stop a host at a notice, start it again, and does it train again?

Minutes and dollars are what two small CPU hosts and their dispatcher take; the plan of each part says its own price.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import smoke_notice
from smoke_notice import Notices

from spotfleet.providers.aws.mapping import names

if TYPE_CHECKING:
    from smoke_aws import Smoke

RETURN_S = 1500.0  # for EC2 to start a host again that it has stopped


class Unproved(ValueError):
    """AWS does otherwise than this part expects."""


@dataclass(frozen=True)
class Part:
    """`needs`: option without which it cannot run. `over`: what it lays over the fleet file."""

    about: str
    minutes: int
    usd: float
    over: Callable[[argparse.Namespace], Mapping[str, Any]] = lambda _args: {}
    proof: Callable[[Smoke], None] | None = None  # None: the notice and the replacement of `Smoke.run`
    needs: str = ""
    fis: bool = False


def instances(smoke: Smoke, role: str = "", *states: str) -> list[dict[str, Any]]:
    """Return the fleet's machines as EC2 describes them."""
    filters = [{"Name": f"tag:{names.FLEET}", "Values": [smoke.name, names.any_life(smoke.name)]},
               {"Name": "instance-state-name", "Values": list(states or ("running",))}]
    filters += [{"Name": f"tag:{names.ROLE}", "Values": [role]}] if role else []
    found = smoke.session.client("ec2", region_name=smoke.region).describe_instances(Filters=filters)
    return [i | {"ReservationId": r["ReservationId"]} for r in found["Reservations"] for i in r["Instances"]]


def _gang(smoke: Smoke) -> None:
    made = instances(smoke, "worker")
    told = {i["InstanceId"]: {t["Key"]: t["Value"] for t in i["Tags"]} for i in made}
    for i in made:
        tags = told[i["InstanceId"]]
        smoke.report.say(f"{i['InstanceId']} of {i['ReservationId']}, {i.get('InstanceLifecycle')}: launch index "
                         f"{i['AmiLaunchIndex']}, place {tags.get(names.MEMBER)!r} in {tags.get(names.HOST)!r}")
    places = sorted(t.get(names.MEMBER, "") for t in told.values())
    if len({t.get(names.HOST) for t in told.values()}) != 1 or places not in (["0", "1"], ["index", "index"]):
        raise Unproved(f"two hosts of one call were expected, each with its place: {places}")


def _key(smoke: Smoke) -> None:
    ids = [d["Ebs"]["VolumeId"] for i in instances(smoke) for d in i["BlockDeviceMappings"]]
    volumes = smoke.session.client("ec2", region_name=smoke.region).describe_volumes(VolumeIds=ids)["Volumes"]
    keys = sorted({v.get("KmsKeyId", "none") for v in volumes})
    smoke.report.say(f"{len(volumes)} disks of 3 machines, encrypted by {', '.join(keys)}")
    if not all(v["Encrypted"] for v in volumes) or len(keys) != 1 or ":alias/aws/ebs" in keys[0]:
        raise Unproved("every disk was expected to be encrypted by the one key")


def _private(smoke: Smoke) -> None:
    shown = [i["InstanceId"] for i in instances(smoke) if i.get("PublicIpAddress")]
    if shown:
        raise Unproved(f"{', '.join(shown)} have public addresses")
    smoke.report.say("no machine has a public address")


def _stop(smoke: Smoke) -> None:
    """Interrupt a host, see that EC2 starts the same instance again, and that it trains."""
    victim = next(h for h in smoke.status()["hosts"] if h["role"] == "worker")["host"]
    before = next(i for i in instances(smoke, "worker") if _host(i) == victim)
    fleet = next(t["Value"] for t in before["Tags"] if t["Key"] == names.FLEET)
    notices = Notices(smoke.session, smoke.region, fleet, smoke.report.say, smoke.role, smoke.poll_s)
    began = time.monotonic()
    try:
        smoke.extra_usd += smoke_notice.USD
        smoke.report.say(f"FIS experiment {notices.send(before['InstanceId'])} interrupts {victim}")
        smoke.until("EC2 has stopped it and started it again", lambda _s: _again(smoke, before), RETURN_S)
        smoke.measure("until EC2 had started the stopped host again", began)
        steps = smoke.status()["jobs"][-1]["version"]
        smoke.until("it trains again", lambda s: smoke.trains(s, 2, steps), RETURN_S)
        smoke.measure("until it trained again", began)
    finally:
        for trouble in notices.close():
            smoke.report.failed.append(trouble)
            smoke.report.say(trouble)


def _again(smoke: Smoke, before: dict[str, Any]) -> bool:
    """Return whether this instance runs since another time: EC2 moves LaunchTime when it starts a stopped one."""
    ended = ("terminated", "shutting-down")
    if any(i["InstanceId"] == before["InstanceId"] for i in instances(smoke, "", *ended)):
        raise Unproved(f"EC2 has ended {before['InstanceId']} instead of stopping it")
    return any(i["InstanceId"] == before["InstanceId"] and i["LaunchTime"] > before["LaunchTime"]
               for i in instances(smoke, "worker"))


def _host(instance: dict[str, Any]) -> str:
    return next((t["Value"] for t in instance["Tags"] if t["Key"] == names.HOST), "")


PARTS = {
    "basic": Part("a real interruption notice, and the replacement", 25, 0.60, fis=True),
    "gang": Part("two spot hosts by one call", 15, 0.10, lambda _args: {"all_or_nothing": True}, _gang),
    "key": Part("disks with a customer key", 15, 0.10, lambda args: {"aws": {"kms_key": args.kms_key}}, _key,
                needs="--kms-key"),
    "private": Part("private subnets", 20, 0.15, lambda args: {"aws": {
        "public_addresses": False, "ssh_from": [args.ssh_from],
        "networks": {args.region: {"subnets": args.subnets.split(",")}}}}, _private, needs="--subnets"),
    "stop": Part("a host that EC2 stops and starts again", 30, 0.60, lambda _args: {"interruption_behavior": "stop"},
                 _stop, fis=True),
}  # fmt: skip


def table() -> str:
    """Return the parts with their minutes and dollars, for --help."""
    lines = [f"  {name:8} {part.minutes:3} min  ${part.usd:.2f}  {part.about}"
             + (f" (needs {part.needs})" if part.needs else "") for name, part in PARTS.items()]
    return "parts, each a fleet of its own:\n" + "\n".join(lines)
