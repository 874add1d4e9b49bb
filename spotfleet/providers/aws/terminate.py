"""Termination of hosts on EC2.

Requests are cancelled before instances are terminated, or EC2 would launch new instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import SECOND
from spotfleet.providers.aws import describe
from spotfleet.providers.aws.mapping import errors, listing, names, template
from spotfleet.providers.aws.session import Account, AwsClient

FLEET_ID = "aws:ec2:fleet-id"  # EC2's own tag on instances of a fleet
FLEET_GONE = ("fleetIdDoesNotExist", "fleetNotInDeletableState")  # the latter means: already being deleted
OVER = ("cancelled", "closed", "failed", "completed")  # states of a spot request that launches nothing more
ABSENT = ("InvalidInstanceID.NotFound", "InvalidSpotInstanceRequestID.NotFound", "InvalidFleetId.NotFound",
          "InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound")


def terminate(account: Account, request_id: str) -> None:
    """End the host. Nothing of it remains once EC2 has done what it accepts here."""
    account.each(lambda region: _end(account, region, request_id), account.regions)


def _end(account: Account, region: str, request_id: str) -> None:
    account.pace("end", region)
    found, ec2 = describe.in_region(account, region, request_id), account.client("ec2", region)
    cancelled = [r for r in found.requests if r.get("State") not in OVER]
    cancel(ec2, [r["SpotInstanceRequestId"] for r in cancelled])
    instances = list(found.instances)
    if any(r.get("Type") == "persistent" for r in cancelled):  # it may have launched another one meanwhile
        instances += describe.in_region(account, region, request_id).instances
    living = {i["InstanceId"]: i for i in instances if i["State"]["Name"] != "terminated"}
    end_instances(ec2, [i for i, instance in living.items() if names.FLEET in listing.tags(instance)])
    end_untagged(ec2, [i for i, instance in living.items() if names.FLEET not in listing.tags(instance)])
    drop_fleets(ec2, {fleet for i in found.instances if (fleet := listing.tags(i).get(FLEET_ID, ""))})
    hosts = {listing.tags(thing).get(names.HOST, "") for thing in (*found.instances, *found.requests)}
    for host in sorted({request_id, *hosts} - {""}):
        if SECOND not in host:
            drop_template(ec2, template.name(host))


def cancel(ec2: AwsClient, ids: Sequence[str]) -> None:
    """Cancel spot requests. A request with a stopped instance terminates it too."""
    if ids:
        _each_that_is_there(ids, lambda some: ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=some))


def end_instances(ec2: AwsClient, ids: Sequence[str]) -> None:
    if ids:
        _each_that_is_there(ids, lambda some: ec2.terminate_instances(InstanceIds=some))


def end_untagged(ec2: AwsClient, ids: Sequence[str]) -> None:
    """End untagged instances: relaunches of a persistent request of ours.

    Without tags our policies do not allow it. A policy that did would also allow ending machines of others.
    """
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


def drop_fleets(ec2: AwsClient, ids: Iterable[str]) -> None:
    """Delete instant fleets, and terminate their instances."""
    if wanted := sorted(ids):
        _each_that_is_there(wanted, lambda some: _drop_fleets(ec2, some))


def _drop_fleets(ec2: AwsClient, ids: list[str]) -> None:
    """Delete fleets and check each result: EC2 answers 200 even if it deleted none."""
    left: list[Mapping[str, Any]] = ec2.delete_fleets(FleetIds=ids, TerminateInstances=True).get(
        "UnsuccessfulFleetDeletions") or []
    failures = [f"{f.get('FleetId')}: {f['Error'].get('Message', '')} ({f['Error'].get('Code', '')})"
            for f in left if f["Error"].get("Code") not in FLEET_GONE]
    if failures:
        raise SpotfleetError(f"aws: EC2 does not delete fleet {'; '.join(failures)}", hint="it is asked again")


def drop_template(ec2: AwsClient, name: str) -> None:
    """Delete the template; no error if it is gone."""
    _each_that_is_there([name], lambda some: ec2.delete_launch_template(LaunchTemplateName=some[0]))


def interrupt(account: Account, request_id: str, notice_s: float | None) -> None:
    """End or stop the host, tagged so that it counts as taken by the cloud.

    A notice is impossible: EC2 sends them only of its own accord.
    """
    living = [(f, instance) for f in describe.find(account, request_id) for instance in f.living]
    if not living:
        raise describe.unknown(request_id)
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
    """Call `ask` for all ids; if one is gone, EC2 does nothing, so repeat it for each."""
    try:
        ask(list(ids))
    except SpotfleetError as error:
        if errors.code(error) not in ABSENT:
            raise
        if len(ids) > 1:
            for one in ids:
                _each_that_is_there([one], ask)
