"""Launch templates and the removal of security groups: moto's, with what it lacks."""

from __future__ import annotations

import re
from typing import Any

from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.operations import Context, filtered, once, operation, page, put_tags, remember, tags
from tests.support.fakes.aws.ordering import tags_by_type
from tests.support.fakes.aws.state import when


@operation("ec2:DeleteSecurityGroup")
def delete_security_group(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    id = p.get("GroupId", "")
    group = (
        ctx.backend.get_security_group_from_id(id)
        if id
        else ctx.backend.get_security_group_from_name(p.get("GroupName", ""), ctx.backend.get_default_vpc().id)
    )
    if group is None:
        raise AwsError("InvalidGroup.NotFound", f"The security group '{id or p.get('GroupName')}' does not exist")
    if group.name == "default":
        raise AwsError("CannotDelete", 'the specified group: "default" name: "default" cannot be deleted by a user')
    used = any(group in e._group_set for e in ctx.backend.enis.values())
    others = [g for by_vpc in ctx.backend.groups.values() for g in by_vpc.values() if g.id != group.id]
    rules = [r for g in others for r in (*g.ingress_rules, *g.egress_rules)]
    named = any(r.source_group.get("GroupId") == group.id for r in rules)
    if used or named:
        raise AwsError("DependencyViolation", f"resource {group.id} has a dependent object")
    ctx.backend.delete_security_group(group_id=group.id)
    ctx.backend.tags.pop(group.id, None)
    return {"Return": True, "GroupId": group.id}


@operation("ec2:CreateLaunchTemplate")
def create_launch_template(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    from moto.core.types import Base64EncodedString

    before = once(ctx, "CreateLaunchTemplate", p)
    backend = ctx.backend
    if before in backend.launch_templates:
        return {"LaunchTemplate": template_told(ctx, backend.launch_templates[before])}
    name = p.get("LaunchTemplateName", "")
    if not 3 <= len(name) <= 128 or not re.fullmatch(r"[a-zA-Z0-9().\-/_]+", name):
        raise AwsError("InvalidLaunchTemplateName.MalformedException", f"The launch template name {name} is malformed.")
    if name in backend.launch_template_name_to_ids:
        raise AwsError(
            "InvalidLaunchTemplateName.AlreadyExistsException", f"Launch template name already in use.: {name}"
        )
    given = tags_by_type(p.get("TagSpecifications", []), ("launch-template",)).get("launch-template", {})
    data = dict(p.get("LaunchTemplateData", {}))
    tags_by_type(
        data.get("TagSpecifications", []),
        ("instance", "volume", "network-interface", "spot-instances-request", "elastic-gpu"),
    )
    if "UserData" in data:
        data["UserData"] = Base64EncodedString(str(data["UserData"]))
    made = backend.create_launch_template(name, p.get("VersionDescription", ""), data, {})
    made.create_time = made.versions[0].create_time = when(ctx.now)
    made.creator = ctx.arn
    put_tags(backend, made.id, given)
    remember(ctx, "CreateLaunchTemplate", p, made.id)
    return {"LaunchTemplate": template_told(ctx, made)}


def template_told(ctx: Context, made: Any) -> dict[str, Any]:
    return {
        "LaunchTemplateId": made.id,
        "LaunchTemplateName": made.name,
        "CreateTime": made.create_time,
        "CreatedBy": getattr(made, "creator", ctx.arn),
        "DefaultVersionNumber": made.default_version_number,
        "LatestVersionNumber": made.latest_version_number,
        "Tags": tags(ctx.backend, made.id),
    }


@operation("ec2:DescribeLaunchTemplates")
def describe_launch_templates(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    found = list(ctx.backend.launch_templates.values())
    for name in p.get("LaunchTemplateNames", []):
        if name not in ctx.backend.launch_template_name_to_ids:
            raise AwsError(
                "InvalidLaunchTemplateName.NotFoundException",
                f"At least one of the launch templates specified in the request does not exist: {name}",
            )
    for id in p.get("LaunchTemplateIds", []):
        if id not in ctx.backend.launch_templates:
            raise AwsError("InvalidLaunchTemplateId.NotFound", f"The launch template {id} does not exist")
    found = [t for t in found if not p.get("LaunchTemplateNames") or t.name in p["LaunchTemplateNames"]]
    found = [t for t in found if not p.get("LaunchTemplateIds") or t.id in p["LaunchTemplateIds"]]
    known = {"launch-template-name": lambda t: t.name, "create-time": lambda t: t.create_time}
    found = filtered(found, p.get("Filters"), known, lambda t: ctx.backend.tags.get(t.id, {}))
    some, token = page(found, p, 200)
    return {"LaunchTemplates": [template_told(ctx, t) for t in some], "NextToken": token}


@operation("ec2:DeleteLaunchTemplate")
def delete_launch_template(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    backend = ctx.backend
    id = p.get("LaunchTemplateId") or backend.launch_template_name_to_ids.get(p.get("LaunchTemplateName", ""), "")
    if id not in backend.launch_templates:
        if p.get("LaunchTemplateId"):
            raise AwsError("InvalidLaunchTemplateId.NotFound", f"The launch template {id} does not exist")
        raise AwsError(
            "InvalidLaunchTemplateName.NotFoundException",
            f"The specified launch template, with template name {p.get('LaunchTemplateName')}, does not exist.",
        )
    gone = backend.launch_templates[id]
    said = template_told(ctx, gone)
    backend.delete_launch_template(gone.name, None)
    backend.tags.pop(id, None)
    return {"LaunchTemplate": said}
