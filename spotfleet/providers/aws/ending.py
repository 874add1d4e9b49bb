"""The end of hosts on EC2: requests are cancelled before instances are terminated, or EC2 would launch them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import SECOND
from spotfleet.providers.aws import errors, listing, look, names, template
from spotfleet.providers.aws.session import Account, Client

FLEET_ID = "aws:ec2:fleet-id"  # EC2's own tag on instances of a fleet
FLEET_GONE = ("fleetIdDoesNotExist", "fleetNotInDeletableState")  # the latter: it is being deleted
OVER = ("cancelled", "closed", "failed", "completed")  # states of a spot request that launches nothing any more
ABSENT = ("InvalidInstanceID.NotFound", "InvalidSpotInstanceRequestID.NotFound", "InvalidFleetId.NotFound",
          "InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound")


def terminate(account: Account, request_id: str) -> None:
    """Nothing of the host is left, or will be, once EC2 has done what it accepts here."""
    account.each(lambda region: _end(account, region, request_id), account.regions)


def _end(account: Account, region: str, request_id: str) -> None:
    found, ec2 = look.in_region(account, region, request_id), account.client("ec2", region)
    cancelled = [r for r in found.requests if r.get("State") not in OVER]
    cancel(ec2, [r["SpotInstanceRequestId"] for r in cancelled])
    instances = list(found.instances)
    if any(r.get("Type") == "persistent" for r in cancelled):  # it may have launched another one in the meantime
        instances += look.in_region(account, region, request_id).instances
    living = {i["InstanceId"]: i for i in instances if i["State"]["Name"] != "terminated"}
    end_instances(ec2, [i for i, instance in living.items() if names.FLEET in listing.tags(instance)])
    end_untagged(ec2, [i for i, instance in living.items() if names.FLEET not in listing.tags(instance)])
    drop_fleets(ec2, {fleet for i in found.instances if (fleet := listing.tags(i).get(FLEET_ID, ""))})
    hosts = {listing.tags(thing).get(names.HOST, "") for thing in (*found.instances, *found.requests)}
    for host in sorted({request_id, *hosts} - {""}):
        if SECOND not in host:
            drop_template(ec2, template.name(host))


def cancel(ec2: Client, ids: Sequence[str]) -> None:
    """The spot requests. One whose instance is stopped takes it along."""
    if ids:
        _each_that_is_there(ids, lambda some: ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=some))


def end_instances(ec2: Client, ids: Sequence[str]) -> None:
    if ids:
        _each_that_is_there(ids, lambda some: ec2.terminate_instances(InstanceIds=some))


def end_untagged(ec2: Client, ids: Sequence[str]) -> None:
    """What EC2 launched for a persistent request of ours after the first time. Where it bears no tags our policies do
    not let us end it: a policy that did would let us end machines of others, too."""
    try:
        end_instances(ec2, ids)
    except NeedsPerson as error:
        if errors.reaction(errors.code(error)) is not errors.DENIED:
            raise
        region = ec2.raw.meta.region_name
        raise NeedsPerson(
            f"{error}; EC2 has launched {', '.join(ids)} anew for a spot request of ours, without the tag by which we "
            "may end machines; nothing else will end it",
            hint=f"a person who may: `aws ec2 terminate-instances --region {region} --instance-ids {' '.join(ids)}`",
        ) from error


def drop_fleets(ec2: Client, ids: Iterable[str]) -> None:
    """Instant fleets, and with them what instances they have."""
    if wanted := sorted(ids):
        _each_that_is_there(wanted, lambda some: _drop_fleets(ec2, some))


def _drop_fleets(ec2: Client, ids: list[str]) -> None:
    """EC2 says 200 also where it has deleted none."""
    left: list[Mapping[str, Any]] = ec2.delete_fleets(FleetIds=ids, TerminateInstances=True).get(
        "UnsuccessfulFleetDeletions") or []
    told = [f"{f.get('FleetId')}: {f['Error'].get('Message', '')} ({f['Error'].get('Code', '')})"
            for f in left if f["Error"].get("Code") not in FLEET_GONE]
    if told:
        raise SpotfleetError(f"aws: EC2 does not delete fleet {'; '.join(told)}", hint="it is asked again")


def drop_template(ec2: Client, name: str) -> None:
    """No error if it is gone."""
    _each_that_is_there([name], lambda some: ec2.delete_launch_template(LaunchTemplateName=some[0]))


def interrupt(account: Account, request_id: str, notice_s: float | None) -> None:
    """EC2 gives notices of its own accord only. Without one the host is ended, or stopped, and bears a tag which says
    that it counts as taken."""
    living = [(f, instance) for f in look.find(account, request_id) for instance in f.living]
    if not living:
        raise look.unknown(request_id)
    if notice_s is not None:
        raise UsageError("EC2 sends an interruption notice of its own accord, or in an experiment of AWS's Fault "
                         "Injection Service", hint="scripts/smoke-aws shows how; or take the host without a notice")
    for found, instance in living:
        ec2, ids = account.client("ec2", found.region), [instance["InstanceId"]]
        lasting = {r["SpotInstanceRequestId"] for r in found.requests if r.get("Type") == "persistent"}
        ec2.create_tags(Resources=ids, Tags=[{"Key": names.TAKEN, "Value": "yes"}])
        if instance.get("SpotInstanceRequestId") in lasting:
            ec2.stop_instances(InstanceIds=ids, Force=True)
        else:
            ec2.terminate_instances(InstanceIds=ids)


def _each_that_is_there(ids: Sequence[str], ask: Callable[[list[str]], object]) -> None:
    """`ask` for all; where one is not there any more, EC2 does nothing: then for each."""
    try:
        ask(list(ids))
    except SpotfleetError as error:
        if errors.code(error) not in ABSENT:
            raise
        if len(ids) > 1:
            for one in ids:
                _each_that_is_there([one], ask)
