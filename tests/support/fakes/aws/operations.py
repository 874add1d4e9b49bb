"""The operations that this fake does itself, by service and name; all others are moto's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.state import RegionState
from tests.support.fakes.kit import patterns

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud

Operation = Callable[["Context", dict[str, Any]], dict[str, Any]]
OPERATIONS: dict[str, Operation] = {}  # "ec2:RunInstances" -> how


@dataclass
class Context:
    """Who asks, where and when."""

    cloud: AwsCloud
    region: RegionState
    principal: str
    now: float

    @property
    def backend(self) -> Any:
        """moto's EC2 of this region."""
        return self.cloud.backend(self.region.name)

    @property
    def arn(self) -> str:
        return self.cloud.rights.arn(self.principal)

    def may(self, action: str, known: dict[str, Any] | None = None) -> bool:
        return self.cloud.rights.may(self.principal, action, known)


def operation(name: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS[name] = function
        return function

    return register


def fingerprint(p: dict[str, Any]) -> str:
    """Of parameters, to tell whether a client token comes with the same ones."""
    told = {k: v for k, v in p.items() if k not in ("ClientToken", "DryRun")}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def once(ctx: Context, action: str, p: dict[str, Any]) -> Any | None:
    """What came of the request with this client token, if it was made before."""
    token = p.get("ClientToken")
    if not token:
        return None
    if len(token) > 64 or not token.isascii():
        raise AwsError("InvalidParameterValue", "Client token must be at most 64 ASCII characters")
    known = ctx.region.tokens.get((action, token))
    if known is None:
        return None
    if known[0] != fingerprint(p):
        raise AwsError("IdempotentParameterMismatch", "The client token was used with different request parameters.")
    return known[1]


def remember(ctx: Context, action: str, p: dict[str, Any], result: Any) -> None:
    if p.get("ClientToken"):
        ctx.region.tokens[action, p["ClientToken"]] = (fingerprint(p), result)


def tags(backend: Any, id: str) -> list[dict[str, str]]:
    return [{"Key": k, "Value": v} for k, v in sorted(backend.tags.get(id, {}).items())]


def put_tags(backend: Any, id: str, given: dict[str, str]) -> None:
    if given:
        backend.tags[id].update(given)


def tags_by_type(specs: list[dict[str, Any]], allowed: tuple[str, ...]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for spec in specs:
        kind = spec.get("ResourceType", "")
        if kind not in allowed:
            raise AwsError(
                "InvalidParameterValue", f"'{kind}' is not a valid taggable resource type for this operation."
            )
        mine = found.setdefault(kind, {})
        for tag in spec.get("Tags", []):
            key = tag.get("Key", "")
            if key.lower().startswith("aws:"):
                raise AwsError(
                    "InvalidParameterValue", f"Tag keys starting with 'aws:' are reserved for internal use: {key}"
                )
            if not 1 <= len(key) <= 128 or len(tag.get("Value") or "") > 256:
                raise AwsError("InvalidParameterValue", f"Tag '{key[:40]}' is too long or empty")
            mine[key] = tag.get("Value") or ""
        if len(mine) > 50:
            raise AwsError("TagLimitExceeded", "The maximum number of Tags for a resource has been reached.")
    return found


Values = Callable[[Any], Any]  # function from a thing to its value, or several


def filtered(
    things: Iterable[Any],
    filters: Sequence[dict[str, Any]] | None,
    known: dict[str, Values],
    tags_of: Callable[[Any], dict[str, str]],
) -> list[Any]:
    """Those that match all `filters` of a describe operation. Values may hold * and ?."""
    kept = list(things)
    for given in filters or []:
        name, wanted = given.get("Name", ""), given.get("Values", [])
        if name.startswith("tag:"):
            key = name.removeprefix("tag:")
            kept = [t for t in kept if key in tags_of(t) and _matches([tags_of(t)[key]], wanted)]
        elif name == "tag-key":
            kept = [t for t in kept if _matches(list(tags_of(t)), wanted)]
        elif name in known:
            kept = [t for t in kept if _matches(_several(known[name](t)), wanted)]
        else:
            raise AwsError("InvalidParameterValue", f"The filter '{name}' is invalid")
    return kept


def _several(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple, set)) else [value]
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in values if v is not None]


def _matches(values: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(patterns.fits(v, w) for w in wanted for v in values)


def page(items: list[Any], p: dict[str, Any], usual: int = 1000) -> tuple[list[Any], str | None]:
    """Of `items` those of this page, and the token of the next."""
    begin = int(p.get("NextToken") or 0)
    end = begin + int(p.get("MaxResults") or usual)
    return items[begin:end], str(end) if end < len(items) else None
