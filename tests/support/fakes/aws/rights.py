"""Who asks, and what they may. Roles may what their policies say; users what the test says, or what the documents say
that are attached to them; everything by default. Guardrails are the organization's: they deny to everybody."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tests.support.fakes.aws.catalog import ACCOUNT
from tests.support.fakes.aws.operations import Context, operation
from tests.support.fakes.kit import patterns

OWNER = "owner"
OWNER_KEY = ("AKIAOWNEROFTHEFAKE01", "the-owners-secret-of-the-fake")
BOOLEAN = ("kms:GrantIsForAWSResource",)  # keys of conditions; a value of another type counts as not given


@dataclass
class Key:
    principal: str
    secret: str
    ends_at: float | None = None
    token: str = ""
    session: str = ""


class Rights:
    def __init__(self) -> None:
        self.keys = {OWNER_KEY[0]: Key(OWNER, OWNER_KEY[1])}
        self._allowed: dict[str, set[str] | None] = {}
        self._denied: dict[str, set[str]] = {}
        self._attached: dict[str, list[dict[str, Any]]] = {}  # statements, by user
        self.guardrails: list[dict[str, Any]] = []  # statements of service control policies
        self.expired: set[str] = set()

    def user(self, name: str) -> tuple[str, str]:
        key = "AKIA" + secrets.token_hex(8).upper()
        self.keys[key] = Key(name, secrets.token_hex(20))
        return key, self.keys[key].secret

    def session(self, role: str, session: str, ends_at: float) -> tuple[str, Key]:
        """Temporary credentials of a role."""
        for name, key in self.keys.items():
            if key.session == session and key.principal == f"role/{role}" and key.ends_at == ends_at:
                return name, key
        name = "ASIA" + secrets.token_hex(8).upper()
        self.keys[name] = Key(f"role/{role}", secrets.token_hex(20), ends_at, secrets.token_hex(32), session)
        return name, self.keys[name]

    def arn(self, principal: str) -> str:
        kind, _, role = principal.partition("/")
        if kind == "role" and role:
            return f"arn:aws:sts::{ACCOUNT}:assumed-role/{role}/session"
        return f"arn:aws:iam::{ACCOUNT}:user/{principal}"

    def allow(self, principal: str, actions: Iterable[str] | None) -> None:
        self._allowed[principal] = None if actions is None else set(actions)

    def deny(self, principal: str, actions: Iterable[str]) -> None:
        self._denied[principal] = set(actions)

    def attach(self, principal: str, document: dict[str, Any] | None) -> None:
        if document is None:
            self._attached.pop(principal, None)
        else:
            self._attached[principal] = list(document["Statement"])

    def may(self, principal: str, action: str, about: dict[str, Any] | None = None) -> bool:
        """`about`: "resource" (ARNs), and the keys that conditions ask for, by name ("aws:RequestTag/x"); those of
        one resource alone stand under "of". "coarse": no condition is asked for yet."""
        if action == "sts:GetCallerIdentity":
            return True  # needs no permission
        if any(_like(action, p) for p in self._denied.get(principal, ())):
            return False
        if self.forbidden(action, about or {}):
            return False
        if principal in self._allowed:
            allowed = self._allowed[principal]
            return allowed is None or any(_like(action, p) for p in allowed)
        if principal.startswith("role/"):
            name = principal.removeprefix("role/")
            bound = self._boundary(name)
            return decide(self._statements(name), action, about or {}) and (
                bound is None or decide(bound, action, about or {})
            )
        if principal in self._attached:
            return decide(self._attached[principal], action, about or {})
        return True

    def forbidden(self, action: str, about: dict[str, Any]) -> bool:
        """Does a guardrail deny it? A launch is judged when all of it is known."""
        return not about.get("coarse") and any(
            s["Effect"] == "Deny" and _applies(s, action, resource, about)
            for resource in about.get("resource") or ["*"]
            for s in self.guardrails
        )

    def refusal(self, principal: str, action: str, about: dict[str, Any]) -> str:
        """AWS's words."""
        asked = about.get("resource") or ()
        resources = [r for r in asked if not self.may(principal, action, {**about, "resource": [r]})]
        where = f" on resource: {resources[0].replace('/new', '/*')}" if resources else ""
        why = (
            "with an explicit deny in a service control policy"
            if self.forbidden(action, about)
            else f"because no identity-based policy allows the {action} action"
        )
        return (
            f"You are not authorized to perform this operation. User: {self.arn(principal)} is not authorized to "
            f"perform: {action}{where} {why}"
        )

    @staticmethod
    def _boundary(role: str) -> list[dict[str, Any]] | None:
        """Statements of the policy that bounds the role; [] if that policy is not there."""
        from moto.iam.models import iam_backends

        backend = iam_backends[ACCOUNT]["aws"]
        found = next((r for r in backend.roles.values() if r.name == role), None)
        arn = found.permissions_boundary_arn if found else None
        policy = backend.managed_policies.get(arn) if arn else None
        return None if not arn else json.loads(_document(policy))["Statement"] if policy else []

    def _statements(self, role: str) -> list[dict[str, Any]]:
        from moto.iam.models import iam_backends

        backend = iam_backends[ACCOUNT]["aws"]
        found = next((r for r in backend.roles.values() if r.name == role), None)
        if found is None:
            return []
        texts = list(found.policies.values())
        texts += [_document(p) for p in found.managed_policies.values()]
        statements: list[dict[str, Any]] = []
        for text in texts:
            document = json.loads(text if text.lstrip().startswith("{") else unquote(text))
            statement = document["Statement"]
            statements += statement if isinstance(statement, list) else [statement]
        return statements


def _document(policy: Any) -> str:
    """Text of a managed policy of moto's."""
    return str(next(v.document for v in policy.versions if v.version_id == policy.default_version_id))


def decide(statements: list[dict[str, Any]], action: str, about: dict[str, Any]) -> bool:
    """IAM's rule: no Deny that applies, and for every resource an Allow that applies."""
    resources = about.get("resource") or ["*"]
    for resource in resources:
        fits = [s for s in statements if _applies(s, action, resource, about)]
        if any(s["Effect"] == "Deny" for s in fits) or not any(s["Effect"] == "Allow" for s in fits):
            return False
    return True


def _applies(statement: dict[str, Any], action: str, resource: str, about: dict[str, Any]) -> bool:
    if "Action" in statement and not any(_like(action, a) for a in _list(statement["Action"])):
        return False
    if "NotAction" in statement and any(_like(action, a) for a in _list(statement["NotAction"])):
        return False
    if about.get("coarse"):  # judged in full later
        return True
    if resource != "*" and not any(_like(resource, r, case=True) for r in _list(statement.get("Resource", "*"))):
        return False
    known = {k.lower(): v for k, v in {**about, **about.get("of", {}).get(resource, {})}.items()}
    return all(
        _holds(operator, key, _list(values), known)
        for operator, pairs in statement.get("Condition", {}).items()
        for key, values in pairs.items()
    )


def _holds(operator: str, key: str, values: list[str], known: dict[str, Any]) -> bool:
    quantifier, _, plain = operator.rpartition(":")
    if_exists = plain.endswith("IfExists")
    plain = plain.removesuffix("IfExists")
    value = known.get(key.lower())
    if plain == "Null":
        return (value is None) == (str(values[0]).lower() == "true")
    if value is None:
        return if_exists or quantifier == "ForAllValues" or "Not" in plain
    have = _list(value)
    negative = "Not" in plain
    like = "Like" in plain or plain.startswith("Arn")

    def fits(one: str) -> bool:
        if plain == "Bool":
            return str(one).lower() == str(values[0]).lower()
        return any(_like(str(one), str(v), case=True) if like else str(one) == str(v) for v in values)

    hits = [fits(v) for v in have]
    if quantifier == "ForAllValues":
        return all(not h if negative else h for h in hits)
    if negative:
        return not any(hits)
    return any(hits)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _like(text: str, pattern: str, case: bool = False) -> bool:
    if not case:
        text, pattern = text.lower(), pattern.lower()
    return patterns.fits(text, pattern)


@operation("iam:SimulatePrincipalPolicy")
def simulate_principal_policy(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """What IAM says beforehand: one line per action; allowed if it is so for each resource."""
    kind, _, name = p["PolicySourceArn"].rpartition(":")[2].partition("/")
    principal = f"role/{name.rpartition('/')[2]}" if kind == "role" else name
    about: dict[str, Any] = {
        e["ContextKeyName"]: e["ContextKeyValues"]
        for e in p.get("ContextEntries", [])
        if e["ContextKeyName"] not in BOOLEAN or e["ContextKeyType"] == "boolean"
    }
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
