"""A fleet's folder on a laptop whose home is the test's own, and machines on loopback that its provider lists."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.api.access import ssh
from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.codec import to_json
from spotfleet.model import CloudHost, CloudState, FleetSpec, Market, Offer, Role, Run, SshAccess
from spotfleet.ssh import keys
from spotfleet.transport import certs
from tests.support.command_line import Said
from tests.support.shell.loopback_sshd import LIMIT_S, Machine

CLI = str(Path(sys.executable).with_name("spotfleet"))
PLUGIN = Path(__file__).with_name("plugin")
OFFER = Offer("listed", "here", "rack", "machine", Market.ON_DEMAND, 1, 0, 0)


@functools.cache
def certificates() -> certs.FleetCertificates:
    return certs.make("digits", time.time())


def listed(host: str, role: Role, door: SshAccess | None, since: float = 0.0, address: str = "127.0.0.1", port: int = 0,
           state: CloudState = CloudState.RUNNING, fleet: str = "digits") -> CloudHost:
    return CloudHost(host, host, fleet, role, OFFER, state, (Run(since),), address, port, ssh=door)


@dataclass
class Laptop:
    """Someone's account: HOME, SPOTFLEET_HOME in it, and the fleet `digits`."""

    home: Path
    pair: keys.KeyPair

    @property
    def house(self) -> Home:
        return Home(self.home / ".spotfleet")

    @property
    def user_config(self) -> Path:
        return self.home / ".ssh" / "config"

    @property
    def folder(self) -> FleetDir:
        return self.house.folder("digits")

    @property
    def listing(self) -> Path:
        return self.home / "listing.json"

    def make_fleet(self, name: str = "digits", pair: keys.KeyPair | None = None) -> FleetDir:
        pair, made, folder = pair or self.pair, certificates(), self.house.folder(name)
        record = FleetRecord(FleetSpec(name, provider="listed"), name, time.time(), {"listing": str(self.listing)},
                        reached=True)
        folder.make(record, Keys("admin", "secret", made.cert, made.key, ssh_private=pair.private,
                                 ssh_public=pair.public), made.ca)
        return folder

    def list(self, *hosts: CloudHost) -> None:
        self.listing.write_text(json.dumps(to_json(list(hosts))))

    def enters(self, *hosts: CloudHost) -> ssh.SshTargets:
        """The provider lists these, and the fleet's folder knows them."""
        self.list(*hosts)
        return ssh.refresh(self.folder, hosts)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "HOME": str(self.home), "SPOTFLEET_HOME": str(self.house.path), "PYTHONPATH": path}

    def starts(self, *words: str) -> Said:
        """`spotfleet WORDS` as a process of its own, which may become another program."""
        done = subprocess.run([CLI, *words], cwd=self.home, env=self.environment, text=True, capture_output=True,
                              timeout=LIMIT_S, stdin=subprocess.DEVNULL)
        return Said(done.returncode, done.stdout, done.stderr)


@dataclass
class Rack:
    """A dispatcher's machine and two workers, of which the second is entered through the dispatcher's."""

    laptop: Laptop
    dispatcher: Machine
    workers: list[Machine]

    def hosts(self, port: int = 0) -> list[CloudHost]:
        head = listed("digits-d-0", Role.DISPATCHER, self.dispatcher.door, address=self.dispatcher.address, port=port)
        doors = [self.workers[0].door, replace(self.workers[1].door, jump=True)]
        return [head, *(listed(f"digits-{i + 1}", Role.WORKER, door, since=float(i), address=door.address)
                        for i, door in enumerate(doors))]


def make_rack(laptop: Laptop, machines: list[Machine]) -> Rack:
    rack = Rack(laptop, machines[0], machines[1:])
    laptop.make_fleet()
    laptop.enters(*rack.hosts())
    return rack
