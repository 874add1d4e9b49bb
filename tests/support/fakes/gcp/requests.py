"""A request as its handler gets it, the handlers, and pages of listings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.fakes.discovery import Method
from tests.support.fakes.gcp import filters
from tests.support.fakes.gcp.catalog import REGIONS, ZONES
from tests.support.fakes.gcp.errors import GcpError, not_found
from tests.support.fakes.gcp.state import link

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

PAGE = 500


@dataclass(frozen=True)
class Request:
    cloud: GcpCloud
    method: Method
    named: dict[str, str]
    query: dict[str, str]
    body: Any
    principal: str
    now: float
    repeated: dict[str, list[str]]  # the query with all values of each name

    @property
    def project(self) -> str:
        return self.named.get("project", self.cloud.project)

    @property
    def zone(self) -> str:
        return self.named["zone"]

    @property
    def scope(self) -> str:
        """As "zones/us-central1-a"."""
        if "zone" in self.named:
            return f"zones/{self.zone}"
        return f"regions/{self.named['region']}" if "region" in self.named else "global"

    def several(self, name: str) -> list[str]:
        return self.repeated.get(name, [])

    def may(self, permission: str) -> bool:
        return self.cloud.rights.may(self.principal, permission)

    def need(self, permission: str, path: str) -> None:
        if not self.may(permission):
            raise GcpError("forbidden", f"Required '{permission}' permission for '{path}'")

    def known_place(self) -> None:
        """GcpError for a zone or region that does not exist."""
        for kind, known in (("zone", ZONES), ("region", REGIONS)):
            if kind in self.named and self.named[kind] not in known:
                path = f"projects/{self.project}/{kind}s/{self.named[kind]}"
                raise not_found(path) if self.method.id.endswith(f"{kind}s.get") else GcpError(
                    "invalid", f"Invalid value for field '{kind}': '{self.named[kind]}'. Unknown {kind}.")


Handler = Callable[[Request], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*methods: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for method in methods:
            HANDLERS[method] = handler
        return handler

    return register


# ---- listings


def page(request: Request, items: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Filter, order and cut as the query wants it; returns the items and the token of the next page."""
    query = request.query
    test = filters.compiled(query.get("filter", ""))
    found = sorted((i for i in items if test(i)), key=lambda i: i.get("name", ""))
    match query.get("orderBy", "name").split():
        case ["creationTimestamp", "desc"]:
            found.sort(key=lambda i: i.get("creationTimestamp", i.get("insertTime", "")), reverse=True)
        case ["name"]:
            pass
        case _:
            raise GcpError("invalid", f"Invalid value for field 'orderBy': '{query['orderBy']}'. Must be name or "
                           "creationTimestamp desc.")
    most = int(query.get("maxResults", PAGE))
    if most > PAGE:
        raise GcpError("invalid", f"Invalid value for field 'maxResults': '{most}'. Must be between 0 and {PAGE}")
    begin = _begin(query.get("pageToken", ""))
    end = begin + (most or PAGE)
    return found[begin:end], _token(end) if end < len(found) else ""


def _token(at: int) -> str:
    return base64.urlsafe_b64encode(f"at:{at}".encode()).decode()


def _begin(token: str) -> int:
    try:
        return int(base64.urlsafe_b64decode(token).decode().removeprefix("at:")) if token else 0
    except ValueError:
        raise GcpError("invalid", f"Invalid value for field 'pageToken': '{token}'.") from None


def listing(request: Request, kind: str, items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer of `list`."""
    found, token = page(request, items)
    collection = request.method.id.split(".")[1]
    path = "/".join(p for p in (f"projects/{request.project}", request.scope, collection) if p)
    answer = {"kind": kind, "id": path, "selfLink": link(path), "items": found, "nextPageToken": token}
    return {k: v for k, v in answer.items() if v}


def aggregated(request: Request, kind: str, collection: str, items: Iterable[tuple[str, dict[str, Any]]],
               scopes: Sequence[str]) -> dict[str, Any]:
    """The answer of `aggregatedList`: items by scope; a scope without items has a warning in their place.

    `items`: (scope, item). Scopes that cannot be reached are missing, and named in `unreachables`, or they have a
    warning: status 200.
    """
    cloud = request.cloud
    away = [s for s in scopes if s in cloud.unreachable]
    marked = [(scope, item) for scope, item in items if scope not in away]
    found, token = page(request, (i for _, i in marked))
    place = {id(item): scope for scope, item in marked}
    by_scope: dict[str, dict[str, Any]] = {
        s: {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": f"There are no results for scope '{s}' on this page.",
                        "data": [{"key": "scope", "value": s}]}} for s in scopes if s not in away}
    for item in found:
        held = by_scope[place[id(item)]]
        held.pop("warning", None)
        held.setdefault(collection, []).append(item)
    if cloud.unreachable_warns:
        by_scope |= {s: {"warning": {"code": "UNREACHABLE", "message": f"No answer of '{s}'."}} for s in away}
        away = []
    path = f"projects/{request.project}/aggregated/{collection}"
    answer = {"kind": kind, "id": path, "selfLink": link(path), "items": by_scope, "nextPageToken": token,
              "unreachables": [link(f"projects/{request.project}/{s}") for s in away]}
    return {k: v for k, v in answer.items() if v}


def all_scopes() -> list[str]:
    return ["global", *(f"regions/{r}" for r in REGIONS), *(f"zones/{z}" for z in ZONES)]
