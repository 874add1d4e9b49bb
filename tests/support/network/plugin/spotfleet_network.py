"""A cloud of files, for dispatchers and agents in namespaces: what they ask for, and what `network_fleet.py` does.

    HOME/REQUEST/request.json   asked by the dispatcher: launch
    HOME/REQUEST/boot.json      what the host's agent is told
    HOME/REQUEST/host.json      written by the fleet: the line of the cloud's listing
    HOME/REQUEST/unwanted       asked by the dispatcher: terminate
    HOME/REQUEST/notice.json    read by the agent, as from a metadata server: {"ends_at": Unix seconds}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.model import BillingRules, CloudHost, CloudState, Market, Need, Notice, Offer, PricePoint
from spotfleet.plugins import Machines as Kind
from spotfleet.plugins import Traits
from spotfleet.providers import LaunchRequest
from spotfleet.providers.plugin import BasePlugin, Config

OFFER = Offer("network", "r", "zone", "host", Market.SPOT, 1, 31_000, 85_000)


class Machines:
    name = "network"

    def __init__(self, config: dict[str, str] | None = None) -> None:
        self._home = Path((config or {})["home"])

    def check(self) -> None:
        return None

    def billing(self) -> BillingRules:
        return BillingRules()

    def offers(self, need: Need) -> list[Offer]:
        return [OFFER]

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        return [PricePoint(pool, since, OFFER.price_micros_h) for pool in pools]

    def launch(self, request: LaunchRequest) -> None:
        folder = self._home / request.request_id
        folder.mkdir(exist_ok=True)
        for name, text in request.boot.files.items():
            write(folder / name, text)
        asked = CloudHost(request.request_id, request.request_id, request.fleet, request.role, request.offer,
                          CloudState.PENDING)
        write(folder / "request.json", json.dumps(to_json(asked)))  # last: the rest is there

    def hosts(self, fleet: str) -> list[CloudHost]:
        asked = sorted(self._home.glob("*/request.json"))
        lines = [p.with_name("host.json") if p.with_name("host.json").exists() else p for p in asked]
        return [from_json(CloudHost, json.loads(p.read_text())) for p in lines]

    def terminate(self, request_id: str) -> None:
        if (self._home / request_id).exists():
            (self._home / request_id / "unwanted").touch()

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        return None

    def boot_files(self, request_id: str) -> dict[str, str]:
        return {"boot.json": (self._home / request_id / "boot.json").read_text()}

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        if notice_s is None:
            (self._home / request_id / "unwanted").touch()
        else:
            write(self._home / request_id / "notice.json", json.dumps({"ends_at": time.time() + notice_s}))


class Notices:
    """`metadata_url` is the host's folder."""

    def __init__(self, metadata_url: str) -> None:
        self._path = Path(metadata_url, "notice.json")

    def poll(self) -> Notice | None:
        try:
            ends_at = json.loads(self._path.read_text())["ends_at"]
        except FileNotFoundError:
            return None
        return Notice(ends_at - time.time())

    def tag(self, key: str) -> str:
        return ""


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    os.replace(partial, path)


class Network(BasePlugin):
    name = "network"
    traits = Traits(Kind.HERE)

    def open(self, config: Config) -> Machines:
        return Machines(config)

    def notices(self, metadata_url: str) -> Notices:
        return Notices(metadata_url)


NETWORK = Network()
