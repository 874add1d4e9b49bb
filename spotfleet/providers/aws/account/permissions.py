"""Permission tests: does the caller have the permissions of `policies.laptop`? Makes no change.


    DryRun      EC2 reports whether a read, or a creation with our tags, would be allowed. The launch that it is asked
                about is the dispatcher's own: image, disk, metadata options, tags of each resource
    simulation  IAM reports the rest, if the caller may ask it: changes of existing things, roles, PassRole

DryRun of a change needs an existing resource with our tag; otherwise its answer is about something else. It is not used
for changes. Permissions that neither test decides are reported as undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.model import FleetSpec, Market, Offer, Role
from spotfleet.providers import Finding
from spotfleet.providers.aws import images, offers
from spotfleet.providers.aws.account import disk_key, network
from spotfleet.providers.aws.mapping import errors, listing, policies, template
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.providers.aws.session import Account, AwsClient

THREADS = 8
SHOWN = 6
DENIED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "Client.UnauthorizedOperation")
TRIED_TYPE = "t3.small"
TRIED = "spotfleet-check"  # name used in DryRun creations
ROLE_MAKING = ("iam:CreateRole", "iam:PutRolePolicy", "iam:TagRole", "iam:CreateInstanceProfile",
               "iam:TagInstanceProfile", "iam:AddRoleToInstanceProfile", "iam:DeleteRole", "iam:DeleteRolePolicy",
               "iam:ListRolePolicies", "iam:DeleteInstanceProfile", "iam:RemoveRoleFromInstanceProfile")
GROUP_MAKING = ("ec2:CreateSecurityGroup", "ec2:AuthorizeSecurityGroupIngress", "ec2:AuthorizeSecurityGroupEgress",
                "ec2:RevokeSecurityGroupIngress", "ec2:DeleteSecurityGroup")
GRANT = ("spotfleet check aws --policy > policy.json\n"
         "aws iam create-policy --policy-name spotfleet --policy-document file://policy.json\n"
         "and attach it to {who}: aws iam attach-{kind}-policy --{kind}-name {name} --policy-arn "
         "arn:{partition}:iam::{account}:policy/spotfleet")

KEY_FIRST = ("the account's default key for disks is its own: write `aws: {{kms_key: {key}}}` in the fleet file, so "
             "that `spotfleet check --policy FILE` allows it\n")
FORBIDDEN = ("ask the organization's administrator what its service control policies require of a launch; mandatory "
             "tags stand under `tags` of the fleet file, a key for disks under `aws.kms_key`")


@dataclass
class PermissionResults:
    """Actions that a test found allowed or denied."""

    allowed: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    forbidden: dict[str, str] = field(default_factory=dict)  # denied above all policies: action -> AWS's words
    why: str = ""  # why there are no results


def findings(account: Account, spec: FleetSpec | None) -> Iterator[Finding]:
    """Yield the results of both tests for the actions that a fleet needs."""
    number, arn = account.identity()
    settings, keys = account.settings, _default_keys(account)
    document = policies.laptop(policies.Scope(
        regions=account.regions, account=number, partition=arn.split(":")[1], kms_key=settings.spec.kms_key,
        default_keys=keys,
        target=settings.target, queue=settings.spec.event_queue, dispatcher_profile=settings.spec.dispatcher_profile,
        host_profile=settings.spec.host_profile, boundary=settings.spec.permissions_boundary,
        reserved=bool(settings.spec.capacity_reservations)))
    needed = needs(document, settings.spec, spec)
    tried = dry_run(account, needed, spec)
    open_ones = needed - tried.allowed - tried.denied - tried.forbidden.keys()
    root = arn.endswith(":root")
    simulated = PermissionResults() if root else simulate(account, document, open_ones, arn)
    if denied := tried.denied | simulated.denied:
        first = KEY_FIRST.format(key=keys[0]) if keys and any(a.startswith("kms:") for a in denied) else ""
        yield Finding(f"denied: {', '.join(sorted(denied))}", "blocker", first + _grant(arn, number))
    for words in tried.forbidden.values():
        yield Finding(f"a rule of your organization denies {words}", "blocker", FORBIDDEN)
    by = [f"{len(v.allowed)} by {how}" for v, how in ((tried, f"DryRun in {account.regions[0]}"),
                                                     (simulated, "IAM's simulation")) if v.allowed]
    if by:
        yield Finding(f"actions that are allowed: {', '.join(by)}")
    if root:
        yield Finding("these are the account's root user's credentials, which may do everything", "warning",
                      "make an IAM user with what `spotfleet check aws --policy` prints, and delete root's access keys")
    elif left := sorted(open_ones - simulated.allowed - simulated.denied):
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        why = f"; IAM's simulation has failed: {simulated.why}" if simulated.why else ""
        yield Finding(f"cannot be tried without doing it: {', '.join(left[:SHOWN])}{more}{why}", "warning",
                      "compare what you have with `spotfleet check aws --policy`; with iam:SimulatePrincipalPolicy "
                      "allowed, IAM answers")


def _default_keys(account: Account) -> tuple[str, ...]:
    """Return the account's own default keys; none where they are unknown, which is a finding of its own."""
    try:
        return disk_key.defaults(account)
    except SpotfleetError:
        return ()


def needs(document: Mapping[str, Any], named: AwsSpec, spec: FleetSpec | None) -> frozenset[str]:
    """Return the actions that a fleet will call; named resources are not created."""
    needed = set(policies.actions(document))
    if named.dispatcher_profile and (named.host_profile or spec is None or not spec.checkpoint.url):
        needed -= set(ROLE_MAKING)
    if named.networks and all(n.security_groups for n in named.networks):
        needed -= set(GROUP_MAKING)
    if spec is not None and spec.placement != "cluster":
        needed -= {"ec2:CreatePlacementGroup"}
    return frozenset(needed)


def _grant(arn: str, account: str) -> str:
    kind, _, name = arn.rpartition(":")[2].partition("/")
    if kind == "assumed-role":
        kind, name = "role", name.partition("/")[0]
    name = name.rpartition("/")[2]
    if kind not in ("user", "role") or not name:
        return "have what `spotfleet check aws --policy` prints allowed to you"
    return GRANT.format(who=arn, kind=kind, name=name, account=account, partition=arn.split(":")[1])


# ---- DryRun


def dry_run(account: Account, needed: Iterable[str], spec: FleetSpec | None = None) -> PermissionResults:
    """Test the actions that DryRun supports. A call may be denied for the lack of another action, which AWS names."""
    ec2 = account.launching(account.regions[0])
    calls = {action: ask for action, ask in probes(account, ec2, spec).items() if action in set(needed)}
    verdicts = PermissionResults()
    with ThreadPoolExecutor(THREADS) as pool:
        for action, error in zip(calls, pool.map(_answer, calls.values()), strict=True):
            code, words = errors.code(error), str(error).partition("denied: ")[2]
            if code == "DryRunOperation":
                verdicts.allowed.add(action)
            elif code in DENIED and "explicit deny in a service control policy" in words:
                verdicts.forbidden[action] = words
            elif code in DENIED:
                named = re.match(r"[a-z0-9-]+:[A-Za-z]+(?= )", words)
                verdicts.denied.add(named.group() if named else action)
    return verdicts


def _answer(ask: Callable[[], object]) -> SpotfleetError | None:
    try:
        ask()
    except SpotfleetError as error:
        return error
    return None


def probes(account: Account, ec2: AwsClient, spec: FleetSpec | None) -> dict[str, Callable[[], object]]:
    """Return action -> its call with DryRun."""
    users = spec.tags if spec is not None else {}
    found: dict[str, Callable[[], object]] = {}
    for name in (*policies.READ_ACTIONS, *policies.READ_ACTIONS_ON_LAPTOP):
        if name != "DescribeInstanceAttribute":  # it needs an existing resource
            found[f"ec2:{name}"] = lambda operation=_snake(name): getattr(ec2, operation)(DryRun=True)
    found["ec2:GetSpotPlacementScores"] = lambda: ec2.get_spot_placement_scores(
        DryRun=True, InstanceTypes=[TRIED_TYPE], TargetCapacity=1, RegionNames=[account.regions[0]])

    def tags(*kinds: str) -> list[dict[str, Any]]:
        return [network.tag_specification(kind, TRIED, users) for kind in kinds]

    def group() -> object:
        return ec2.create_security_group(DryRun=True, GroupName=TRIED, Description=TRIED, VpcId=_site(account).vpc,
                                         TagSpecifications=tags("security-group"))

    return found | {
        "ec2:CreateSecurityGroup": group,
        "ec2:CreatePlacementGroup": lambda: ec2.create_placement_group(
            DryRun=True, GroupName=TRIED, Strategy="cluster", TagSpecifications=tags("placement-group")),
        "ec2:CreateLaunchTemplate": lambda: ec2.create_launch_template(
            DryRun=True, LaunchTemplateName=TRIED, LaunchTemplateData={"InstanceType": TRIED_TYPE},
            TagSpecifications=tags("launch-template")),
        "ec2:RunInstances": lambda: ec2.run_instances(DryRun=True, **_launch(account, spec)),
    }


def _launch(account: Account, spec: FleetSpec | None) -> dict[str, Any]:
    """Return the launch of the fleet's dispatcher, without its template and user data.

    AWS judges each resource of a launch by its own tags, and an organization's rules ask for the rest: encrypted disks,
    tokens at the metadata server, types, mandatory tags.
    """
    site, named = _site(account), account.settings.spec
    offer = _offer(account, spec, site)
    order = template.LaunchOrder(TRIED, TRIED, Role.DISPATCHER, (offer,), tags=spec.tags if spec is not None else {})
    image = images.image(account, offer.region, images.wanted(account, Role.DISPATCHER, offer))
    facts = template.Facts(
        image.id, image.root_device, max(named.dispatcher_disk_gib, image.disk_gib), {}, site.groups,
        named.public_addresses, named.dispatcher_profile, named.key_pair, named.kms_key)
    return template.inline(order, facts, template.order_tags(order, listing.pools_tag(order.pools)),
                           site.of(offer.zone)[0].id)


def _offer(account: Account, spec: FleetSpec | None, site: network.FleetNetwork) -> Offer:
    """Return the cheapest offer for the fleet's dispatcher in the first region; a usual type where none is known."""
    try:
        sold = [] if spec is None else [o for o in offers.offers(account, spec.dispatcher)
                                        if o.region == account.regions[0] and site.of(o.zone)]
    except SpotfleetError:
        sold = []
    usual = Offer("aws", account.regions[0], site.subnets[0].zone, TRIED_TYPE, Market.ON_DEMAND, 1, 0, 0)
    return min(sold, key=lambda o: o.price_micros_h, default=usual)


def _site(account: Account) -> network.FleetNetwork:
    return network.site(account, account.regions[0])


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# ---- simulation


def simulate(account: Account, document: Mapping[str, Any], wanted: Iterable[str], arn: str) -> PermissionResults:
    """Return IAM's verdicts for `arn`, per statement of `document`; none if the caller may not ask."""
    verdicts, wanted = PermissionResults(), frozenset(wanted)
    try:
        source = _principal(account, arn)
        iam = account.client("iam")
        for statement in document["Statement"] if source else ():
            asked = sorted(wanted & set(statement["Action"]))
            if asked:
                rows = list(iam.pages("simulate_principal_policy", "EvaluationResults", PolicySourceArn=source,
                                      ActionNames=asked, **_circumstances(statement)))
                verdicts.allowed |= {r["EvalActionName"] for r in rows if r["EvalDecision"] == "allowed"}
                verdicts.denied |= {r["EvalActionName"] for r in rows if r["EvalDecision"] != "allowed"}
    except SpotfleetError as error:
        return PermissionResults(why=str(error))
    verdicts.allowed -= verdicts.denied
    return verdicts


def _principal(account: Account, arn: str) -> str:
    """Return the ARN whose policies count: for a session, the role's."""
    if ":assumed-role/" in arn:
        role = arn.partition(":assumed-role/")[2].partition("/")[0]
        return account.client("iam").get_role(RoleName=role)["Role"]["Arn"]
    return arn if ":user/" in arn or ":role/" in arn else ""


def _circumstances(statement: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources and context in which the statement would hold."""
    resources = [re.sub(r"\*", TRIED, r) for r in statement["Resource"] if r != policies.ANY]
    entries = [{"ContextKeyName": key, "ContextKeyType": _type(operator),
                "ContextKeyValues": [_sample(values)]}
               for operator, condition in statement.get("Condition", {}).items() for key, values in condition.items()]
    return {**({"ResourceArns": resources} if resources else {}), **({"ContextEntries": entries} if entries else {})}


def _type(operator: str) -> str:
    return "boolean" if operator == "Bool" else "stringList" if operator.startswith("For") else "string"


def _sample(values: str | list[str]) -> str:
    value = values if isinstance(values, str) else values[0]
    return value.replace("*", TRIED)


