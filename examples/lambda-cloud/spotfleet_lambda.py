"""Lambda Cloud as a provider, by its public API 1.10 (https://docs-api.lambda.ai/api/cloud) and the standard library.

An example of a small cloud: `docs/clouds/new-cloud.md` walks through it. It ran against a fake only.

    offers      GET  /instance-types             on demand alone; a region is a zone
    launch      POST /instance-operations/launch the user data makes the host; three tags name it
    hosts       GET  /instances, /audit-events   the tags of instances; their first and last event give the run
    terminate   POST /instance-operations/terminate

A launch has no client token, so it is listed before and after: of several instances of one host the one with the lowest
id stays, and the next caller ends the others. The API sets no tags after a launch, returns no user data, has
no past prices, and takes no machine back. `tag` and `boot_files` therefore raise UsageError, and so does `interrupt`.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from spotfleet.codec import from_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.matching import matches, meets
from spotfleet.model import (
    BillingRules,
    CloudHost,
    CloudState,
    EnvironmentSpec,
    FleetSpec,
    Market,
    Need,
    Offer,
    PricePoint,
    Role,
    Run,
    SshAccess,
)
from spotfleet.plugins import FileFacts, Machines, Note, Traits
from spotfleet.providers import LaunchRequest
from spotfleet.providers.plugin import AccountKey, BasePlugin, Config, RegionRow

if TYPE_CHECKING:
    from pydantic import BaseModel

URL = "https://cloud.lambda.ai/api/v1"
KEY = "LAMBDA_API_KEY"  # in the laptop's environment; the dispatcher gets it with its configuration
TIMEOUT_S = 30.0
USER = "ubuntu"
PORT = 7443  # where a dispatcher listens
FLEET, HOST, ROLE = "spotfleet", "spotfleet-host", "spotfleet-role"
TAG = re.compile(r"[a-z][a-z0-9-:]{1,54}"), 128  # what the API accepts: a key, and the length of a value
STATES = {"booting": CloudState.PENDING, "terminated": CloudState.TERMINATED, "preempted": CloudState.TERMINATED}
MAKE_KEY = f"make an API key at https://cloud.lambda.ai/api-keys and set {KEY}"
PEOPLE = {  # error codes that only a person can answer -> what to do
    "global/invalid-api-key": MAKE_KEY,
    "global/account-inactive": "verify the account and its payment at https://cloud.lambda.ai",
    "global/invalid-address": "correct the billing address at https://cloud.lambda.ai",
    "global/object-does-not-exist": "see that `lambda.ssh_key` is the name of an SSH key of the account",
}
FULL = {"instance-operations/launch/insufficient-capacity": "pool", "global/quota-exceeded": "account"}


class Client:
    """JSON requests with the account's key. One request, no retries: the next tick asks again."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self._call("GET", f"{path}?{urlencode(query)}" if query else path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        if not self._key:
            raise NeedsPerson(f"lambda: there is no {KEY}", hint=MAKE_KEY)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise _refusal(path, error.code, error.read(10_000)) from None
        except (OSError, ValueError) as error:
            raise SpotfleetError(f"lambda: {path} gave no whole answer: {error}", hint="it is asked again") from error


def _refusal(path: str, status: int, body: bytes) -> SpotfleetError:
    """Return our error for one of the API's."""
    try:
        found = json.loads(body).get("error") or {}
    except (ValueError, AttributeError):
        found = {}
    code, text = str(found.get("code", status)), f"lambda: {path}: {found.get('message') or f'status {status}'}"
    if code in FULL:
        return NoCapacity(text, hint="another pool is tried; this one again in some minutes", scope=FULL[code])
    if code in PEOPLE:
        return NeedsPerson(text, hint=PEOPLE[code])
    return SpotfleetError(f"{text} ({code})", hint="it is asked again")  # 429 too: launches are limited to 5 a minute


class LambdaProvider:
    name = "lambda"

    def __init__(self, config: Config) -> None:
        self._config, section = config, config.get("section") or {}
        self.regions = tuple(section.get("regions") or ())
        self._ssh_key = section.get("ssh_key", "")
        self._secret = config.get("secret", "")
        self._client = Client(config.get("url") or URL, config.get("api_key") or os.environ.get(KEY, ""))

    # ---- the contract of spotfleet/providers/__init__.py

    def check(self) -> None:
        self._client.get("/instance-types")

    def billing(self) -> BillingRules:
        return BillingRules()  # the API's document names none

    def offers(self, need: Need) -> list[Offer]:
        return sorted((o for o in self._sold() if meets(need, o)), key=lambda o: (o.price_micros_h, o.pool))

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        """Return today's price at `since` and now: a caller that knows an older one takes the second for a change."""
        now = max(time.time(), since + 1.0)
        return [PricePoint(o.pool, at, o.price_micros_h) for o in self._sold(everything=True) if o.pool in pools
                for at in (since, now)]

    def launch(self, request: LaunchRequest) -> None:
        if self._of(request.request_id):
            self._end_others(request.request_id)
            return
        tags = {**request.tags, FLEET: request.fleet, HOST: request.request_id, ROLE: request.role.value}
        self._client.post("/instance-operations/launch", {
            "region_name": request.offer.region, "instance_type_name": request.offer.instance_type,
            "ssh_key_names": [self._ssh_key], "name": request.request_id[:64], "user_data": self._user_data(request),
            "tags": [{"key": key, "value": value} for key, value in sorted(tags.items())]})
        self._end_others(request.request_id)

    def hosts(self, fleet: str) -> list[CloudHost]:
        events, held = self._events(), {}
        for instance in sorted(self._instances(), key=lambda i: (_living(i), i["id"]), reverse=True):
            tags = _tags(instance)
            if HOST in tags and fleet in ("", tags[FLEET]):
                held.setdefault(tags[HOST], []).append(self._line(instance, tags, events.get(instance["id"], ())))
        return [replace(of[-1] if _is_over(of[0]) else _lowest(of), runs=tuple(sorted(
            (run for line in of for run in line.runs), key=lambda r: r.started_at))) for of in held.values()]

    def terminate(self, request_id: str) -> None:
        self._end([i["id"] for i in self._of(request_id) if _living(i)])

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        raise UsageError(f"lambda takes no machine back, so {request_id} cannot be interrupted",
                         hint="`spotfleet drain` takes it out of the fleet")

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        self._one(request_id)
        raise UsageError(f"lambda sets no tags after a launch: {request_id} keeps its tags",
                         hint="hosts that lose their dispatcher end themselves after `orphan_after`")

    def boot_files(self, request_id: str) -> dict[str, str]:
        self._one(request_id)
        raise UsageError(f"lambda returns no user data, so the boot files of {request_id} cannot be read",
                         hint="use the laptop that made the fleet")

    # ---- instances

    def _instances(self) -> list[dict[str, Any]]:
        return self._client.get("/instances")["data"]

    def _of(self, request_id: str) -> list[dict[str, Any]]:
        return [i for i in self._instances() if _tags(i).get(HOST) == request_id]

    def _one(self, request_id: str) -> None:
        if not any(_living(i) for i in self._of(request_id)):
            raise UsageError(f"lambda: there is no host '{request_id}'", hint="`spotfleet status` lists the hosts")

    def _end_others(self, request_id: str) -> None:
        """End all living instances of one host except the one with the lowest id."""
        self._end(sorted(i["id"] for i in self._of(request_id) if _living(i))[1:])

    def _end(self, ids: Sequence[str]) -> None:
        if ids:
            self._client.post("/instance-operations/terminate", {"instance_ids": list(ids)})

    def _line(self, instance: Mapping[str, Any], tags: Mapping[str, str], times: Sequence[float]) -> CloudHost:
        role = Role.DISPATCHER if tags.get(ROLE) == Role.DISPATCHER.value else Role.WORKER
        state, public = STATES.get(instance["status"], CloudState.RUNNING), instance.get("ip") or ""
        over = state is CloudState.TERMINATED
        runs = (Run(times[0], max(times[-1], times[0] + 1e-3) if over else None, instance["status"] == "preempted",
                    paid=True),) if times and state is not CloudState.PENDING else ()
        door = SshAccess(public, USER, host_keys=_host_keys(self._secret, tags[HOST])) if public else None
        return CloudHost(tags[HOST], instance["id"], tags[FLEET], role, _offer(
            instance["instance_type"], instance["region"]["name"]), state, runs, instance.get("private_ip") or public,
            PORT if role is Role.DISPATCHER else 0, instance["status"] if over else "", door,
            ended_at=times[-1] if over and times else None)

    def _events(self) -> dict[str, list[float]]:
        """Return instance -> the times of its events. The API's document names no actions of instances, so the first
        event counts as the launch, and the last one of an ended instance as its end."""
        found: dict[str, list[float]] = {}
        query = {"resource_type": "cloud.instance"}
        while True:
            page = self._client.get("/audit-events", **query)
            for event in page["data"]:
                at = datetime.fromisoformat(event["event_time"]).timestamp()
                for lrn in event["resource_lrns"]:
                    found.setdefault(lrn.rpartition(":")[2], []).append(at)
            if not page.get("page_token"):
                return {name: sorted(times) for name, times in found.items()}
            query["page_token"] = page["page_token"]

    # ---- what is sold

    def _sold(self, everything: bool = False) -> list[Offer]:
        """Return what the regions sell now; with `everything` also types without capacity, in every region named."""
        found = []
        for entry in self._client.get("/instance-types")["data"].values():
            there = {region["name"] for region in entry["regions_with_capacity_available"]}
            found += [_offer(entry["instance_type"], region) for region in sorted(there | set(
                self.regions if everything else ())) if not self.regions or region in self.regions]
        return found

    def unknown(self, needs: Sequence[Need]) -> str:
        kinds = self._client.get("/instance-types")["data"]
        return "; ".join(f"instance_type '{n.instance_type}' is unknown; there is {', '.join(sorted(kinds))}"
                         for n in needs if n.instance_type and n.instance_type not in kinds)

    # ---- the machine

    def _user_data(self, request: LaunchRequest) -> str:
        from spotfleet.bootstrap import HostPlan, cloud_init, wheel
        from spotfleet.ssh.keys import derived_host_key

        code, dispatcher = wheel.running(), request.role is Role.DISPATCHER
        environment = from_json(EnvironmentSpec, self._config.get("environment") or {})
        plan = HostPlan(
            request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
            code.sha256, environment, port=PORT if dispatcher else 0, power_off=True, modules=("spotfleet_lambda",),
            gpus=0 if dispatcher else request.offer.slots)
        admitted, secret = self._config.get("public_key", ""), self._secret
        return cloud_init.user_data(plan, user=USER, authorized_keys=[admitted] if admitted else [],
                                    host_key=derived_host_key(secret, request.request_id) if secret else None)


def _living(instance: Mapping[str, Any]) -> bool:
    return instance["status"] not in ("terminating", "terminated", "preempted")


def _is_over(line: CloudHost) -> bool:
    return line.state is CloudState.TERMINATED


def _lowest(lines: Sequence[CloudHost]) -> CloudHost:
    return min((line for line in lines if not _is_over(line)), key=lambda line: line.provider_id)


def _tags(instance: Mapping[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in instance.get("tags") or ()}


def _offer(kind: Mapping[str, Any], region: str) -> Offer:
    micros_h, gpu = kind["price_cents_per_hour"] * 10_000, kind["gpu_description"].partition("(")[0].strip()
    return Offer("lambda", region, region, kind["name"], Market.ON_DEMAND, max(1, kind["specs"]["gpus"]), micros_h,
                 micros_h, gpu if kind["specs"]["gpus"] else "")


@lru_cache(maxsize=8192)
def _host_keys(secret: str, request_id: str) -> tuple[str, ...]:
    from spotfleet.ssh.keys import derived_host_key, pinned

    return (pinned(derived_host_key(secret, request_id).public),) if secret else ()


class LambdaPlugin(BasePlugin):
    name = "lambda"
    traits = Traits(Machines.MADE, settles_region=True, boot_limit_s=1800.0, keeps_results_s=86_400.0)

    def section(self) -> type[BaseModel] | None:
        from spotfleet.config.sections import Section, Text

        class LambdaSection(Section):
            ssh_key: Text
            regions: list[Text] = []  # noqa: RUF012 - pydantic copies it

        return LambdaSection

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        if any(need.use_spot for need in facts.needs):
            note(("resources",), "lambda sells no spot machines; write `use_spot: false`")
        if facts.interruption_behavior == "stop":
            note(("interruption_behavior",), "machines of lambda are never stopped; remove this")
        for key, value in facts.tags.items():
            if not TAG[0].fullmatch(key) or len(value) > TAG[1] or key.startswith(FLEET):
                note(("tags", key), "lambda takes tags of small letters, digits, - and :, with up to 128 characters")
        if given is None:
            note(("lambda",), "is missing: it names an SSH key of your account, such as `lambda: {ssh_key: laptop}`")
            return {}
        return given.model_dump()

    def open(self, config: Config) -> LambdaProvider:
        return LambdaProvider(config)

    def for_dispatcher(self, config: Config) -> Config:
        """Add the account's key: a machine of this cloud has no credentials of its own."""
        return {**config, "side": "dispatcher", "api_key": os.environ.get(KEY, "")}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        section = {**spec.section, "regions": config["section"]["regions"]}
        return {**config, **self.config(spec, {}, ""), "section": section}

    def settle(self, provider: Any, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[RegionRow, ...]]:
        if region:
            return _in(config, region), ()
        sold, rows = provider._sold(), []
        for name in dict.fromkeys(o.region for o in sold):
            here = [o for o in sold if o.region == name]
            each = min((o.price_micros_h for o in here if any(matches(n, o) for n in spec.any_of)), default=0)
            own = min((o.price_micros_h for o in here if matches(spec.dispatcher, o)), default=0)
            why = "" if each and own else "nothing on offer for the hosts and the dispatcher"
            rows.append(RegionRow(name, each, own, hosts * each + own, why))
        rows.sort(key=lambda row: (bool(row.why), row.total_micros_h, row.region))
        if not rows or rows[0].why:
            raise NoCapacity("lambda: no region has room for hosts and dispatcher now", scope="account",
                             hint="name other types under `resources`, or try again later")
        return _in(config, rows[0].region), tuple(rows)

    def region(self, config: Config) -> str:
        regions = (config.get("section") or {}).get("regions") or ()
        return regions[0] if len(regions) == 1 else ""

    def account_key(self, config: Config) -> AccountKey:
        return (("url", config.get("url") or URL),)

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        return bool(environ.get(KEY))


def _in(config: Config, region: str) -> Config:
    return {**config, "section": {**config["section"], "regions": [region]}}


LAMBDA = LambdaPlugin()
