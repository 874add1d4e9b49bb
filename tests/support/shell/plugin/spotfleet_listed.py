"""A cloud whose listing is a file, LISTING: a JSON list of CloudHost, as the test wrote it last."""

from __future__ import annotations

import json
from pathlib import Path

from spotfleet.codec import from_json
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudHost
from spotfleet.plugins import Machines, Traits
from spotfleet.providers.plugin import BasePlugin, Config


class Listed:
    name = "listed"

    def __init__(self, config: dict[str, str] | None = None) -> None:
        self._listing = Path((config or {})["listing"])

    def hosts(self, fleet: str) -> list[CloudHost]:
        try:
            found = json.loads(self._listing.read_text())
        except FileNotFoundError:
            raise SpotfleetError("the cloud does not answer") from None
        return [host for host in (from_json(CloudHost, line) for line in found) if fleet in ("", host.fleet)]


class ListedPlugin(BasePlugin):
    name = "listed"
    traits = Traits(Machines.HERE)

    def open(self, config: Config) -> Listed:
        return Listed(config)


LISTED = ListedPlugin()
