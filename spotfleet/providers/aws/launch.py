"""Launches: a launch template describes the machine, then one call makes one host, or all hosts of a gang, or none.

    template of the host's name, reused if it exists --> CreateFleet, or RunInstances, under the host's token
        accepted            --> the template is deleted: its work is done
        refused             --> the template is deleted, and EC2's leftovers of the failed launch
        unknown             --> everything stays: a retry sends the same request

    spot, terminated when taken    CreateFleet, type instant, in the best of all equal pools
    spot, stopped when taken       RunInstances, a persistent request
    on demand; reserved; a gang    RunInstances

The machines of a gang share their user data. A tag tells each machine which of the hosts it is, as EC2 documents no
launch index for spot.

`kit/launching.py` has the order of the steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.aws import describe, images, terminate, types
from spotfleet.providers.aws.account import disk_key, identity, network
from spotfleet.providers.aws.mapping import errors, listing, names, template
from spotfleet.providers.aws.mapping.template import Facts, LaunchOrder
from spotfleet.providers.aws.session import Account, AwsClient
from spotfleet.providers.kit import launching, userdata
from spotfleet.providers.kit.launching import PAUSE_S, VISIBLE_S, LaunchSteps
from spotfleet.providers.kit.requests import until_known

log = logging.getLogger(__name__)
PROFILE_S, PROFILE_PAUSE_S = 120.0, 2.0  # the same for an instance profile, which IAM passes on: as Terraform waits
SLOWED = 2  # further attempts of a fleet that EC2 slows down
LISTED_S = 10.0  # until an instance of an earlier call is listed
FORGOTTEN_S = 3600.0  # added to the host's lifetime for its persistent request: EC2 counts from the launch
FULL = "InsufficientFreeAddressesInSubnet"
NO_TEMPLATE = ("InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound",
               "InvalidLaunchTemplateId.VersionNotFound")
NOT_YET = (*network.NO_GROUP, "InvalidPlacementGroup.Unknown", "InvalidSubnetID.NotFound",
           "InvalidIamInstanceProfileName.NotFound")
SPOT_QUOTA = ("MaxSpotInstanceCountExceeded", "SpotInstanceCountLimitExceeded")
ASKED_BEFORE = ("IdempotentParameterMismatch", "IdempotentInstanceTerminated")


def launch(account: Account, request: LaunchRequest) -> None:
    _launch(account, [request])


def launch_together(account: Account, requests: Sequence[LaunchRequest]) -> None:
    """Launch all or none. A reader of one host's user data sees that of all."""
    _launch(account, requests)


def _launch(account: Account, requests: Sequence[LaunchRequest]) -> None:
    order = _order(account, requests)
    account.pace("launch" if order.by_fleet else "run", order.offer.region)
    launching.launch(_Launching(account, order, requests))


def _place_members(account: Account, order: LaunchOrder, instances: Sequence[Mapping[str, Any]]) -> None:
    """Tag the machines of a gang with their places.

    If that fails, the machines wait for the tag and then use their launch index. Where that would be wrong, they end.
    """
    values = listing.missing_member_tags(instances)
    if not values:
        return
    ec2 = account.client("ec2", order.offer.region)
    try:
        account.each(lambda value: _tag_new(ec2, values[value], names.MEMBER, value), list(values))
    except SpotfleetError:
        if names.BY_INDEX in values:
            return
        terminate.end_instances(ec2, [i["InstanceId"] for i in instances])
        raise


def place_untagged(account: Account, region: str, instances: Sequence[Mapping[str, Any]]) -> None:
    """Tag the machines of gangs whose launching process was killed before it had."""
    ec2 = account.client("ec2", region)
    for value, ids in listing.missing_member_tags(instances).items():
        try:
            ec2.create_tags(Resources=ids, Tags=[{"Key": names.MEMBER, "Value": value}])
        except SpotfleetError as error:
            log.warning("machines of a gang are not tagged with their places yet: %s", error)


def _tag_new(ec2: AwsClient, ids: Sequence[str], key: str, value: str) -> None:
    """Tag instances that EC2 may not know yet."""
    until_known(lambda: ec2.create_tags(Resources=list(ids), Tags=[{"Key": key, "Value": value}]),
                lambda error: errors.code(error) in terminate.ABSENT, VISIBLE_S, PAUSE_S)


def _exists(account: Account, request: LaunchRequest) -> bool:
    """Return whether the host is listed, also as ended. Hosts launched together exist together."""
    found = describe.in_region(account, request.offer.region, request.request_id)
    return bool(found.instances) or any(r.get("State") not in terminate.OVER for r in found.requests)


def _order(account: Account, requests: Sequence[LaunchRequest]) -> LaunchOrder:
    first = requests[0]
    if any(replace(r, request_id="", boot=first.boot) != replace(first, request_id="") for r in requests):
        raise UsageError("hosts that are launched together must be alike", hint="launch them one by one")
    asked = first.offer  # the host gets its slots before its pool is known
    pools = [o for o in (asked, *first.alternatives)
             if (o.region, o.market, o.slots, o.reserved) == (asked.region, asked.market, asked.slots, asked.reserved)
             and template.burstable(o) == template.burstable(asked)]  # one template: CPU credits for all or for none
    if account.settings.placement == "cluster":  # a placement group is in one zone
        pools = [o for o in pools if o.zone == asked.zone]
    order = LaunchOrder(names.together([r.request_id for r in requests]), first.fleet, first.role,
                  tuple({o.pool: o for o in pools}.values()), first.interruption_behavior, first.tags, len(requests))
    if order.lasting and (lifetime_s := userdata.lifetime_s(first)):
        order = replace(order, until=time.time() + lifetime_s + FORGOTTEN_S)
    return order if order.by_fleet else replace(order, pools=order.pools[:1])


class _Launching(LaunchSteps):
    """One order, from its facts to EC2's answer."""

    facts: Facts
    tags: dict[str, str]

    def __init__(self, account: Account, order: LaunchOrder, requests: Sequence[LaunchRequest]) -> None:
        self.account, self.region, self.order, self.requests = account, order.offer.region, order, requests
        self.ec2 = account.client("ec2", self.region)
        self._reported = False

    def exists(self) -> bool:
        return _exists(self.account, self.requests[0])

    def complete(self) -> None:
        _place_members(self.account, self.order,
                       describe.launched_together(self.account, self.region, self.order.host))

    def begin(self) -> None:
        disk_key.refuse_again(self.account, self.region, self.order.fleet)
        self.facts = _facts(self.account, self.order)
        self.order = replace(self.order, pools=tuple(o for o in self.order.pools if self.facts.subnets.get(o.zone)))
        self.tags = template.order_tags(self.order, listing.pools_tag(self.order.pools))

    def prepare(self) -> None:
        """Make the template. An existing one is from an earlier call with the same content, and stays."""
        data = userdata.user_data(self.account.settings.machine, self.requests)
        try:
            self.ec2.create_launch_template(**template.template(self.order, self.facts, self.tags, data))
        except SpotfleetError as error:
            if errors.code(error) != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise

    def not_known_yet(self, error: SpotfleetError) -> bool:
        """Return whether the template is too new for EC2 to know it, or another caller has used it up."""
        return errors.code(error) in NO_TEMPLATE

    def ask(self) -> None:
        if self.order.by_fleet:
            self._ask_fleet()
        else:
            self._ask_instances()

    def _ask_fleet(self) -> None:
        """Make the host by CreateFleet.

        A fleet that made nothing has used up its token: EC2 would repeat the answer for a day. If EC2 does not know a
        resource that we have just made, another attempt follows under the next token; so do two where EC2 slows us down
        or has trouble, which closes no pool. A repeated call sends all
        attempts anew, and gets their results. On any other error another host is tried, even if the error is short.
        """
        ec2, began = self.account.launching(self.region, self.order.where), time.monotonic()
        for attempt in itertools.count():
            try:
                answer = ec2.create_fleet(**template.fleet(self.order, self.facts, self.tags, self._token(attempt)))
            except SpotfleetError as error:
                if errors.code(error) in ASKED_BEFORE:
                    return self._await_earlier(error)
                raise
            made = [i for i in answer.get("Instances") or [] if i.get("InstanceIds")]
            if made:
                return self._check_market({i.get("Lifecycle", "spot") for i in made},
                                          [name for i in made for name in i["InstanceIds"]])
            if fleet := answer.get("FleetId"):
                with suppress(SpotfleetError):  # `list_resources` lists it until it is gone; the refusal matters more
                    terminate.drop_fleets(self.ec2, [fleet])
            failures = answer.get("Errors") or []
            refusal = self._refused(failures)
            texts = [(e.get("ErrorCode", ""), e.get("ErrorMessage", "")) for e in failures]
            if isinstance(refusal, NeedsPerson):
                raise refusal
            if attempt < SLOWED and any(_slowed(*text) for text in texts):
                time.sleep(PROFILE_PAUSE_S * 2 ** attempt)
            elif not any(_too_new(*text) for text in texts) or not self._wait(
                    began, profile=any(_of_profile(*text) for text in texts)):
                raise refusal

    def _refused(self, failures: Sequence[dict[str, Any]]) -> NoCapacity | NeedsPerson:
        """Combine the errors of a fleet without an instance, one per pool."""
        zones = {subnet: zone for zone, subnets in self.facts.subnets.items() for subnet in subnets}
        refusals: dict[str, SpotfleetError] = {}
        refused: dict[str, list[str]] = {}  # reach of a refusal -> its pools
        for one in failures:
            where = (one.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
            subnet = where.get("SubnetId", "")
            zone = where.get("AvailabilityZone") or zones.get(subnet, "")
            if one.get("ErrorCode") == FULL and subnet:
                network.deprioritize(self.account, self.region, subnet)
            place = f"{self.region}/{zone} {where.get('InstanceType', '')} spot"
            refusal = errors.refusal(f"aws {place}", one.get("ErrorCode", ""), one.get("ErrorMessage", ""),
                                     "ec2:CreateFleet", self.account.origin)
            refusals.setdefault(f"{place} {one.get('ErrorCode')}", refusal)
            refused.setdefault(getattr(refusal, "scope", ""), []).extend(
                o.pool for o in self.order.pools if (o.zone, o.instance_type) == (zone, where.get("InstanceType")))
        if not refusals:
            pools = ", ".join(f"{o.zone} {o.instance_type}" for o in self.order.pools)
            return NoCapacity(f"aws {self.region}: EC2 made no host of {pools}, and gave no reason",
                              hint="other pools are tried; these again in some minutes",
                              pools=tuple(o.pool for o in self.order.pools))
        decisive = [e for e in refusals.values() if isinstance(e, (NoCapacity, NeedsPerson))]
        chosen = errors.worst(decisive or refusals.values())
        others = [str(e).removeprefix("aws ") for e in refusals.values() if e is not chosen]
        text, scope = "; ".join([str(chosen), *others]), getattr(chosen, "scope", "pool")
        # One family may have used up its quota: the pools of others are asked for next.
        pools = refused[scope] if scope == errors.Reach.QUOTA.value else itertools.chain(*refused.values())
        more = (NeedsPerson(text, hint=chosen.hint) if isinstance(chosen, NeedsPerson) else
                NoCapacity(text, hint=chosen.hint, scope=scope, pools=tuple(dict.fromkeys(pools))))
        more.__cause__ = chosen
        return more

    def _ask_instances(self) -> None:
        ec2 = self.account.launching(self.region, self.order.where)
        subnet, began = self.facts.subnets[self.order.offer.zone][0], time.monotonic()
        while True:
            try:
                answer = ec2.run_instances(**template.instances(self.order, self.facts, subnet, self._token()))
                break
            except SpotfleetError as error:
                code = errors.code(error)
                if code in ASKED_BEFORE:
                    return self._await_earlier(error)
                if code == FULL:  # the next host uses another subnet; this token is bound to these parameters
                    network.deprioritize(self.account, self.region, subnet)
                if not self._not_yet(code, str(error)) or not self._wait(began, _of_profile(code, str(error))):
                    raise
        made = answer["Instances"]
        self._check_market({"spot" if listing.spot(i) else "on-demand" for i in made},
                           [i["InstanceId"] for i in made])
        _place_members(self.account, self.order, made)

    def _token(self, attempt: int = 0) -> str:
        return names.token(self.account.settings.secret, self.order.host, attempt)

    def _not_yet(self, code: str, message: str) -> bool:
        """Return whether EC2 does not know yet what we have just made."""
        spec = self.account.settings.spec
        named = spec.dispatcher_profile if self.order.role is Role.DISPATCHER else spec.host_profile
        return code in NOT_YET or (_of_profile(code, message) and not named)

    def _wait(self, began: float, profile: bool) -> bool:
        """Wait for what EC2 does not know yet, here a new instance profile or something else; False: for too long."""
        if time.monotonic() - began > (PROFILE_S if profile else VISIBLE_S):
            return False
        if profile and not self._reported:
            self._reported = True
            log.warning("EC2 does not know the new instance profile yet; it is asked again for %.0f s", PROFILE_S)
        time.sleep(PROFILE_PAUSE_S if profile else PAUSE_S)
        return True

    def _check_market(self, made: set[str], ids: Sequence[str]) -> None:
        """End hosts of the wrong market or number: they cost more, or may be taken away."""
        wanted = "spot" if self.order.spot else "on-demand"
        if made - {wanted} or len(ids) != self.order.count:
            terminate.end_instances(self.ec2, ids)
            self.served()
            raise SpotfleetError(
                f"aws {self.order.where}: EC2 made {len(ids)} of market {' and '.join(sorted(made))} where "
                f"{self.order.count} of market {wanted} was asked for; ended",
                hint="please report it: it should not happen")

    def _await_earlier(self, error: SpotfleetError) -> None:
        """Wait for the host of an earlier call under this token, which EC2 accepted with other parameters.

        A host that ended and is no longer listed does not count: EC2 makes no other under its token.
        """
        deadline = time.monotonic() + LISTED_S
        host = names.members(self.order.host)[0]
        while not describe.in_region(self.account, self.region, host).instances:
            if time.monotonic() > deadline or errors.code(error) == "IdempotentInstanceTerminated":
                raise NoCapacity(f"aws {self.order.where}: asked for before, and EC2 has made no host of it",
                                 hint="another host is asked for") from error
            time.sleep(PAUSE_S)
        self.complete()

    def served(self) -> None:
        """Delete the template of an existing host. A failure does not affect the host: `down` tries again."""
        with suppress(SpotfleetError):
            terminate.drop_template(self.ec2, template.name(self.order.host))

    def clean_up(self, refusal: SpotfleetError) -> None:
        """Remove everything left of a refused launch.

        If that fails, the launch counts as unknown: it is requested again, and cleaned up again.
        """
        try:
            terminate.drop_template(self.ec2, template.name(self.order.host))
            if self.order.spot:
                asked = self.ec2.pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=[
                    {"Name": f"tag:{names.HOST}", "Values": [self.order.host]}])
                terminate.cancel(self.ec2, [r["SpotInstanceRequestId"] for r in asked
                                         if r.get("State") not in terminate.OVER])
        except SpotfleetError as error:
            raise SpotfleetError(f"{refusal}; and what is left of it cannot be removed: {error}",
                                 hint=error.hint) from error

    def explained(self, error: NoCapacity | NeedsPerson) -> SpotfleetError:
        """Add the open requests that use up a spot quota without an instance."""
        if errors.code(error) not in SPOT_QUOTA or not isinstance(error, NoCapacity):
            return error
        try:
            waiting = waiting_requests(self.ec2)
        except SpotfleetError:
            waiting = []
        if not waiting:
            return error
        first = ", ".join(f"{sir} ({fleet or 'of no fleet'})" for sir, fleet in waiting[:3])
        count = "1 open spot request counts" if len(waiting) == 1 else f"{len(waiting)} open spot requests count"
        more = NoCapacity(f"{error}; {count} against it: {first}", scope=error.scope, pools=error.pools,
                          hint=f"`spotfleet leaks --fix` cancels those that no fleet needs. {error.hint}")
        more.__cause__ = error
        return more


def _of_profile(code: str, message: str) -> bool:
    return code == "InvalidParameterValue" and "instance profile" in message.lower()


def _too_new(code: str, message: str) -> bool:
    """Return whether a fleet's error means that EC2 does not know something yet."""
    return code in NOT_YET or errors.reaction(code, message) is errors.TABLE["IncorrectState"]


def _slowed(code: str, message: str) -> bool:
    """Return whether a fleet's error means that EC2 slows us down, or has trouble."""
    return errors.reaction(code, message) in (errors.TABLE["RequestLimitExceeded"], errors.TABLE["InternalError"])


def waiting_requests(ec2: AwsClient) -> list[tuple[str, str]]:
    """Return (id, fleet) of each spot request that has no instance and still counts against the quota."""
    asked = ec2.pages("describe_spot_instance_requests", "SpotInstanceRequests",
                      Filters=[{"Name": "state", "Values": ["open"]}])
    return [(r["SpotInstanceRequestId"], listing.tags(r).get(names.FLEET, "")) for r in asked]


def _facts(account: Account, order: LaunchOrder) -> Facts:
    spec, region = account.settings.spec, order.offer.region
    dispatcher = order.role is Role.DISPATCHER
    image = images.image(account, region, images.wanted(account, order.role, order.offer))
    held = order.offer.reserved  # a placement group of ours has none of its capacity
    group = "" if dispatcher or held else network.placement_group(account, order.fleet, order.offer.zone)
    close = bool(group) or (bool(held) and account.settings.placement == "cluster")
    if group and order.lasting:
        raise UsageError("EC2 stops no spot host that is in a placement group",
                         hint="interruption_behavior: terminate, or placement: zone")
    return Facts(
        image.id, image.root_device, max(spec.dispatcher_disk_gib if dispatcher else spec.disk_gib, image.disk_gib),
        _subnets(account, order),
        network.groups(account, region, order.fleet, order.role), spec.public_addresses,
        identity.profile(account, order.fleet, order.role), spec.key_pair, spec.kms_key, group,
        _efa_cards(account, order) if close else ())


def _subnets(account: Account, order: LaunchOrder) -> dict[str, tuple[str, ...]]:
    """Return zone -> subnets, for the order's zones with one. Raises NoCapacity if none has any."""
    found: dict[str, tuple[str, ...]] = {}
    refusals: list[NoCapacity] = []
    for zone in dict.fromkeys(o.zone for o in order.pools):
        try:
            found[zone] = network.subnets(account, order.offer.region, zone)
        except NoCapacity as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def _efa_cards(account: Account, order: LaunchOrder) -> tuple[int, ...]:
    """Return the EFA cards of an order's machines, which are of one type in a placement group."""
    kind = order.offer.instance_type
    facts = types.facts(account, order.offer.region, [kind]).get(kind)
    cards = facts.efa_cards if facts else ()
    spec = account.settings.spec
    named = any(n.region == order.offer.region and n.subnets for n in spec.networks)
    if set(cards) - {0} and spec.public_addresses and not named:
        raise NeedsPerson(
            f"aws {order.where}: it has {len(cards)} network cards for EFA, and EC2 gives a machine with several no "
            "public address: it would reach nothing outside",
            hint="name subnets with a way out (NAT) under `aws.networks`")
    return cards
