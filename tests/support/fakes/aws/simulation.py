"""What IAM says beforehand: the simulation of a principal's policies."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.aws.operations import Context, operation


@operation("iam:SimulatePrincipalPolicy")
def simulate_principal_policy(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """One line per action; allowed if it is so for each resource."""
    kind, _, name = p["PolicySourceArn"].rpartition(":")[2].partition("/")
    principal = f"role/{name.rpartition('/')[2]}" if kind == "role" else name
    about: dict[str, Any] = {e["ContextKeyName"]: e["ContextKeyValues"] for e in p.get("ContextEntries", [])}
    about["resource"] = p.get("ResourceArns", ["*"])
    lines = [
        {
            "EvalActionName": action,
            "EvalResourceName": about["resource"][0],
            "EvalDecision": "allowed" if ctx.cloud.rights.may(principal, action, about) else "implicitDeny",
        }
        for action in p["ActionNames"]
    ]
    return {"EvaluationResults": lines, "IsTruncated": False}
