"""The metadata server of an instance: 169.254.169.254, metadata.google.internal.

Every answer carries `Metadata-Flavor: Google` and an ETag; a request without that header gets 403, as do requests with
X-Forwarded-For. `?wait_for_change=true` answers once the value is another one: than that of `last_etag`, or else than
now. `timeout_sec` limits the wait. `?recursive=true` answers with a whole directory as JSON.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.state import Instance, last, relative

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

ROOT = "/computeMetadata/v1"
FLAVOR = ("Metadata-Flavor", "Google")
ENDLESS_S = 3600.0
USERS_NAMES = ("attributes", "guest-attributes", "service-accounts")
Answer = tuple[int, dict[str, str], bytes]
REFUSED = b"<p>Your client does not have permission to get this URL: Missing Metadata-Flavor:Google header.</p>"


def answer(cloud: GcpCloud, instance: Instance, target: str, method: str, headers: dict[str, str],
           body: bytes = b"") -> Answer:
    """Status 0: nobody answers."""
    if instance.deaf or instance.state not in ("running", "stopping", "shutting-down"):
        return 0, {}, b""
    known = {k.lower(): v for k, v in headers.items()}
    at = urlsplit(target)
    path = unquote(at.path)
    query = {k: v[-1] for k, v in parse_qs(at.query, keep_blank_values=True).items()}
    if path in ("", "/"):
        return 200, _headers("text"), b"computeMetadata/\n"
    if known.get("metadata-flavor") != "Google" or "x-forwarded-for" in known:
        return 403, _headers("text"), REFUSED
    if not path.startswith(ROOT):
        return 404, _headers("text"), b""
    if method == "PUT":
        return _put(instance, path, body)
    if method != "GET":
        return 405, _headers("text"), b""
    return _get(cloud, instance, path.removeprefix(ROOT), query)


def _get(cloud: GcpCloud, instance: Instance, path: str, query: dict[str, str]) -> Answer:
    def now() -> tuple[int, bytes, str]:
        with cloud.lock:
            return _value(cloud, instance, path, query)

    found = now()
    if query.get("wait_for_change", "").lower() == "true":
        before = query.get("last_etag") or _etag(found[1])
        limit_s = float(query.get("timeout_sec") or ENDLESS_S)
        if before != "0":
            cloud.wait_until(lambda: _etag(now()[1]) != before or instance.deaf or not instance.living, limit_s)
        if instance.deaf or not instance.living:
            return 0, {}, b""
        found = now()
    status, body, kind = found
    return status, {**_headers(kind), "ETag": _etag(body)}, body


def _value(cloud: GcpCloud, instance: Instance, path: str, query: dict[str, str]) -> tuple[int, bytes, str]:
    at: Any = tree(cloud, instance)
    for name in [p for p in path.split("/") if p]:
        if isinstance(at, list):
            at = dict(enumerate(at)).get(int(name)) if name.isdigit() else None
        else:
            at = at.get(name) if isinstance(at, dict) else None
        if at is None:
            return 404, b"not found", "text"
    if callable(at):
        return 200, json.dumps(at()).encode(), "json"
    if isinstance(at, Lines) and query.get("alt") != "json" and query.get("recursive", "").lower() != "true":
        return 200, "".join(f"{line}\n" for line in at).encode(), "text"
    if isinstance(at, (dict, list)):
        if query.get("recursive", "").lower() == "true" or query.get("alt") == "json":
            return 200, json.dumps(_whole(at, any(p in USERS_NAMES for p in path.split("/")))).encode(), "json"
        keys = list(at) if isinstance(at, dict) else list(map(str, range(len(at))))
        held = at if isinstance(at, dict) else dict(enumerate(at))
        lines = [f"{k}/" if isinstance(held[k if isinstance(at, dict) else int(k)], (dict, list)) else k for k in keys]
        return 200, "".join(f"{line}\n" for line in lines).encode(), "text"
    if query.get("alt") == "json":
        return 200, json.dumps(at).encode(), "json"
    return 200, str(at).encode(), "text"


class Lines(list[str]):
    """A list that is a value: text line by line, and a list in JSON."""


def mac(address: str) -> str:
    """As Compute Engine gives them: 42:01 and the address."""
    return "42:01:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _whole(at: Any, plain: bool = False) -> Any:
    """As `recursive` has it: names in camelCase, but for names that users gave."""
    if isinstance(at, dict):
        return {(k if plain else _camel(k)): _whole(v, plain or k in USERS_NAMES) for k, v in at.items()
                if not callable(v)}  # such as a token, which nobody gets by the way
    return [_whole(v) for v in at] if isinstance(at, list) else at


def _camel(name: str) -> str:
    first, *others = name.split("-")
    return first + "".join(o.capitalize() for o in others)


def tree(cloud: GcpCloud, instance: Instance) -> dict[str, Any]:
    body, project = instance.body, cloud.project
    accounts: dict[str, Any] = {}
    for account in body.get("serviceAccounts", ()):
        email, scopes = account["email"], account["scopes"]
        held = {"aliases": Lines(["default"]), "email": email, "scopes": Lines(scopes),
                "token": lambda email=email, scopes=scopes: {
                    "access_token": cloud.rights.token(email, scopes), "expires_in": 3599, "token_type": "Bearer"},
                "identity": "a-signed-identity"}
        accounts |= {email: held, "default": held}
    nics = [{"ip": n["networkIP"], "mac": mac(n["networkIP"]),
             "network": relative(n["network"]).replace(project, catalog.NUMBER, 1),
             "mtu": "1460", "gateway": _gateway(cloud, n),
             "subnetmask": "255.255.240.0",
             "access-configs": [{"external-ip": c.get("natIP", ""), "type": "ONE_TO_ONE_NAT"}
                                for c in n.get("accessConfigs", ())]}
            for n in body["networkInterfaces"]]
    return {
        "instance": {
            "attributes": instance.metadata, "name": instance.name, "id": instance.id,
            "hostname": f"{instance.name}.{instance.zone}.c.{project}.internal",
            "zone": f"projects/{catalog.NUMBER}/zones/{instance.zone}",
            "machine-type": f"projects/{catalog.NUMBER}/machineTypes/{instance.kind.name}",
            "image": next((relative(cloud.things[relative(d["source"])].get("sourceImage", ""))
                           for d in body["disks"] if relative(d.get("source", "")) in cloud.things), ""),
            "preempted": "TRUE" if instance.preempted else "FALSE",
            "maintenance-event": instance.maintenance[0] if instance.maintenance else "NONE",
            "scheduling": {"preemptible": str(instance.scheduling["preemptible"]).upper(),
                           "automatic-restart": str(instance.scheduling["automaticRestart"]).upper(),
                           "on-host-maintenance": instance.scheduling["onHostMaintenance"]},
            "tags": json.dumps(body["tags"].get("items", [])), "network-interfaces": nics,
            "service-accounts": accounts, "guest-attributes": _guest(instance), "cpu-platform": body["cpuPlatform"],
            "licenses": [], "description": body.get("description", "")},
        "project": {"project-id": project, "numeric-project-id": catalog.NUMBER,
                    "attributes": dict(cloud.common_metadata)},
        "universe": {"universe-domain": "googleapis.com"}}


def _gateway(cloud: GcpCloud, nic: dict[str, Any]) -> str:
    return cloud.things.get(relative(nic["subnetwork"]), {}).get("gatewayAddress", "")


def _guest(instance: Instance) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in instance.guest.items():
        space, _, name = key.partition("/")
        found.setdefault(space, {})[name] = value
    return found


def _put(instance: Instance, path: str, body: bytes) -> Answer:
    """The guest may write its guest attributes, where its metadata enables them, and nothing else."""
    key = path.removeprefix(f"{ROOT}/instance/guest-attributes/")
    enabled = instance.metadata.get("enable-guest-attributes", "").upper() == "TRUE"
    if key == path or key.count("/") != 1 or not enabled:
        return 403 if key != path else 405, _headers("text"), b""
    instance.guest[key] = body.decode()
    return 200, _headers("text"), b""


def _headers(kind: str) -> dict[str, str]:
    return dict([FLAVOR]) | {"Server": "Metadata Server for VM",
                             "Content-Type": "application/json" if kind == "json" else "application/text"}


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def image_of(instance: Instance, cloud: GcpCloud) -> str:
    """Name of the image of its boot disk."""
    source = relative(instance.body["disks"][0].get("source", ""))
    return last(cloud.things.get(source, {}).get("sourceImage", ""))
