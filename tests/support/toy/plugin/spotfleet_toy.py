"""A whole cloud in one module, as a third party would publish it: `toy`, whose account is a folder of this machine.

    ACCOUNT/state.json     hosts, prices, refusals and scripted faults; read and written under a lock
    ACCOUNT/REQUEST_ID/    a host: its boot files; tags.json and notice.json are its metadata server

Section `toy` of the fleet file: `account` (a folder), `regions` (a new fleet takes the cheapest), `processes` (false:
hosts are lines of the account, and nothing runs).
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spotfleet.codec import from_json, to_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.interruptions.folder import NOTICE, TAGS, FolderSource
from spotfleet.matching import meets
from spotfleet.model import BillingRules, CloudHost, CloudState, FleetSpec, Market, Need, Offer, PricePoint, Role, Run
from spotfleet.plugins import FileFacts, Machines, Note, Traits
from spotfleet.providers import LaunchRequest
from spotfleet.providers.kit.mapping.prices import in_force
from spotfleet.providers.kit.offers import RegionChoice, RegionPrice, cheapest_region, region_price
from spotfleet.providers.kit.plugin import RegionalPlugin
from spotfleet.providers.plugin import AccountKey, Config

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")
REGIONS = {"north": 1.0, "south": 0.5}  # region -> its prices, as a part of the north's
TYPES = {"toy.gpu": ("TOY", 900_000), "toy.small": ("", 30_000)}  # type -> accelerator, micro-dollars an hour
TAKEN = "the cloud took it back"
now: Callable[[], float] = time.time


def sold() -> Iterator[Offer]:
    for region, part in REGIONS.items():
        for kind, (accelerator, micros_h) in TYPES.items():
            full = int(micros_h * part)
            for market, price in ((Market.SPOT, full // 3), (Market.ON_DEMAND, full)):
                yield Offer("toy", region, f"{region}-1", kind, market, 1, price, full, accelerator)


class ToyProvider:
    name = "toy"

    def __init__(self, config: Config) -> None:
        section = config.get("section") or {}
        self.account = Path(section.get("account") or "/nonexistent")
        self.regions = tuple(section.get("regions") or REGIONS)
        self._processes = section.get("processes", True)

    # ---- the account

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """The account as it is now; what the caller changes is kept."""
        if not self.account.is_dir():
            raise NeedsPerson(f"toy: there is no account {self.account}", hint="make that folder, or name another "
                                                                               "under `toy.account`")
        with (self.account / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.account / "state.json"
            found = json.loads(path.read_text()) if path.exists() else {
                "hosts": {}, "prices": {}, "refused": {}, "lose": {}, "lag_s": 0.0, "duplicates": 0}
            for name, host in found["hosts"].items():
                if host["ended_at"] is None and (self.account / name / "off").exists():
                    host.update(ended_at=now(), why="it switched itself off")
                if host["ended_at"] is not None and host["ended_at"] <= now() and host["pid"]:
                    with suppress(ProcessLookupError):
                        os.killpg(host["pid"], signal.SIGKILL)
                    host["pid"] = 0
            yield found
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(found))
            partial.replace(path)

    def _call(self, method: str, act: Callable[[dict[str, Any]], T]) -> T:
        with self.state() as state:
            fate = state["lose"].pop(method, "")
        if fate == "before":
            raise SpotfleetError(f"toy: {method} was not answered", hint="try again")
        with self.state() as state:
            result = act(state)
        if fate == "after":
            raise SpotfleetError(f"toy: {method} was not answered", hint="try again")
        return result

    # ---- the contract of spotfleet/providers/__init__.py

    def check(self) -> None:
        self._call("check", lambda _state: None)

    def billing(self) -> BillingRules:
        return BillingRules(minimum_s=1)

    def cloud_time(self) -> float:
        return now()

    def offers(self, need: Need) -> list[Offer]:
        def read(state: dict[str, Any]) -> list[Offer]:
            priced = [replace(o, price_micros_h=state["prices"].get(o.pool, [[0, o.price_micros_h]])[-1][1])
                      for o in sold() if o.region in self.regions]
            return sorted((o for o in priced if meets(need, o)), key=lambda o: (o.price_micros_h, o.pool))

        return self._call("offers", read)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        def read(state: dict[str, Any]) -> list[PricePoint]:
            found = []
            for offer in (o for o in sold() if o.pool in pools):
                steps = [(0.0, offer.price_micros_h), *map(tuple, state["prices"].get(offer.pool, []))]
                found += [PricePoint(offer.pool, at, micros_h) for at, micros_h in in_force(steps, since)]
            return found

        return self._call("prices", read)

    def launch(self, request: LaunchRequest) -> None:
        def act(state: dict[str, Any]) -> None:
            if request.request_id in state["hosts"]:
                return
            refused = state["refused"].get(request.offer.pool, "")
            if refused == "person":
                raise NeedsPerson(f"toy: {request.offer.pool} is for customers who signed", hint="sign the contract")
            if refused:
                raise NoCapacity(f"toy: {request.offer.pool} is full", hint="another pool is tried", scope="pool")
            number = len(state["hosts"])
            folder, address = self.account / request.request_id, f"127.0.3.{number + 1}"
            folder.mkdir(exist_ok=True)
            for name, text in request.boot.files.items():
                (folder / name).write_text(text)
            (folder / TAGS).write_text(json.dumps(request.tags))
            port = _free_port(address) if request.role is Role.DISPATCHER and self._processes else 7000
            line = CloudHost(request.request_id, f"toy-{number}", request.fleet, request.role, request.offer,
                             CloudState.RUNNING, address=address, port=port)
            pid = self._start(request.boot.module, folder, address, port) if self._processes else 0
            state["hosts"][request.request_id] = {
                "line": to_json(line), "began_at": now(), "ended_at": None, "taken": False, "why": "", "pid": pid,
                "files": sorted(request.boot.files)}

        self._call("launch", act)

    @staticmethod
    def _start(module: str, folder: Path, address: str, port: int) -> int:
        """Run the host's process until it ends with status 0: then its machine is off."""
        line = shlex.join([sys.executable, "-m", module, "--home", str(folder)])
        place = {"SPOTFLEET_HOST_ADDRESS": address, "SPOTFLEET_HOST_PORT": str(port),
                 "SPOTFLEET_METADATA_URL": str(folder)}
        with (folder / "console.log").open("ab") as log:
            return subprocess.Popen(
                ["sh", "-c", f"until {line}; do sleep 1; done; : > {shlex.quote(str(folder / 'off'))}"],
                env={**os.environ, **place}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True).pid

    def hosts(self, fleet: str) -> list[CloudHost]:
        def read(state: dict[str, Any]) -> list[CloudHost]:
            at = now() - state["lag_s"]
            lines = [_line(host, at) for host in state["hosts"].values() if host["began_at"] <= at]
            return [h for h in lines if fleet in ("", h.fleet)] * (1 + state["duplicates"])

        return self._call("hosts", read)

    def terminate(self, request_id: str) -> None:
        def act(state: dict[str, Any]) -> None:
            host = state["hosts"].get(request_id)
            if host is not None and (host["ended_at"] is None or host["ended_at"] > now()):
                host.update(ended_at=now(), taken=False, why="terminated")

        self._call("terminate", act)
        self.check()  # ends its process

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        def act(state: dict[str, Any]) -> None:
            ends_at = now() + (notice_s or 0.0)
            self._living(state, request_id).update(ended_at=ends_at, taken=True, why=TAKEN)
            (self.account / request_id / NOTICE).write_text(json.dumps({"ends_at": ends_at}))

        self._call("interrupt", act)
        self.check()

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        def act(state: dict[str, Any]) -> None:
            self._living(state, request_id)
            path = self.account / request_id / TAGS
            path.write_text(json.dumps({**json.loads(path.read_text()), **tags}))

        self._call("tag", act)

    def boot_files(self, request_id: str) -> dict[str, str]:
        def read(state: dict[str, Any]) -> dict[str, str]:
            if request_id not in state["hosts"]:
                raise UsageError(f"toy: there is no host '{request_id}'", hint="`spotfleet status` lists the hosts")
            return {n: (self.account / request_id / n).read_text() for n in state["hosts"][request_id]["files"]}

        return self._call("boot_files", read)

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
        def row(region: str) -> RegionPrice:
            pools, own = ([o for need in needs for o in self.offers(need) if o.region == region]
                          for needs in (any_of, [dispatcher]))
            return region_price(region, pools, own, hosts)

        return cheapest_region(self.name, self.regions, row, lambda: self.unknown([*any_of, dispatcher]))

    def all_regions(self) -> tuple[str, ...]:
        return tuple(REGIONS)

    def unknown(self, needs: Sequence[Need]) -> str:
        return "; ".join(f"instance_type '{n.instance_type}' is unknown; there is {', '.join(TYPES)}"
                         for n in needs if n.instance_type and n.instance_type not in TYPES)

    @staticmethod
    def _living(state: dict[str, Any], request_id: str) -> dict[str, Any]:
        host = state["hosts"].get(request_id)
        if host is None or (host["ended_at"] is not None and host["ended_at"] <= now()):
            raise UsageError(f"toy: there is no host '{request_id}'", hint="`spotfleet status` lists the hosts")
        return host


def _line(host: Mapping[str, Any], at: float) -> CloudHost:
    line, ended_at = from_json(CloudHost, host["line"]), host["ended_at"]
    if ended_at is None or ended_at > at:
        return replace(line, runs=(Run(host["began_at"]),))
    return replace(line, state=CloudState.TERMINATED, why=host["why"], ended_at=ended_at,
                   runs=(Run(host["began_at"], ended_at, host["taken"]),))


def _free_port(address: str) -> int:
    with socket.socket() as one:
        one.bind((address, 0))
        return one.getsockname()[1]


class ToyPlugin(RegionalPlugin):
    name = "toy"
    traits = Traits(Machines.HERE, settles_region=True, poll_s=0.25, notice_poll_s=0.5, boot_limit_s=600.0)

    def section(self) -> type[BaseModel] | None:
        from spotfleet.config.sections import Flag, Section, Text

        class ToySection(Section):
            account: Text
            regions: list[Text] = [*REGIONS]  # noqa: RUF012 - pydantic copies it
            processes: Flag = True

        return ToySection

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        if given is None:
            note(("toy",), "is missing: it names the account, such as `toy: {account: /srv/toy}`")
            return {}
        if facts.interruption_behavior == "stop":
            note(("interruption_behavior",), "machines of toy are never stopped; remove this")
        found = given.model_dump()
        for region in found["regions"]:
            if region not in REGIONS:
                note(("toy", "regions"), f"'{region}' is no region; there is {', '.join(REGIONS)}")
        return found

    def open(self, config: Config) -> ToyProvider:
        return ToyProvider(config)

    def notices(self, metadata_url: str) -> FolderSource:
        return FolderSource(metadata_url)

    def account_key(self, config: Config) -> AccountKey:
        return (("account", (config.get("section") or {}).get("account", "")),)

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        return "not in these prices: the electricity of this machine"


TOY = ToyPlugin()
