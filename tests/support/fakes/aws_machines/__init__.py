"""Instances of the AWS fake that really run: whole machines which know nothing but their user data.

    with AwsCloud() as cloud, AwsMachines(cloud) as machines:
        machines.laptop.run("spotfleet", "up", ..., env={"AWS_ENDPOINT_URL": machines.endpoint, ...})
        machine = machines[instance_id]     # tests/support/network/machines.py: path(), run(), processes()
        machines.story()                    # all logs, to find out why

An instance that the fake launches becomes a machine of `tests/support/network/machines.py`: namespaces of its own for
network,
processes, mounts and host name, a file system that is a fresh Ubuntu image over this machine's (`image.py`), its
private address on an interface, and the metadata server at 169.254.169.254. Debian's real cloud-init reads the user
data from there and does what they say; the real sshd lets in whom they say. No variable of the test's environment is
on it.

The guest's power-off (`systemctl poweroff`, `shutdown`, `poweroff`) switches the instance off. A stopped instance keeps
its disk and boots from it; a terminated one is gone. The interpreter that runs the tests is on every image (with
`environment: {python: sys.executable, inherit: true}` it is a ready one), but this checkout is not, and images of
`bare` have no SDK of a cloud, no pip and no uv either: see `image.py`.

Nobody reaches a machine from outside of its group: a route to the laptop exists where a security group lets the laptop
in. The API is at `machines.endpoint` for every machine and the laptop. Needs root: `why_not()`.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.support.fakes.aws import AwsCloud, InstanceView
from tests.support.fakes.aws_machines import doors, image
from tests.support.network import machines as lan
from tests.support.network.machine_init import OFF
from tests.support.network.machines import Build, Key, Machine
from tests.support.network.namespaces import SWITCH, Namespaces

LAPTOP, INTERFACE = "laptop", "ens5"
METADATA = "169.254.169.254"
PREFIX_BITS = 20  # prefix length of the fake's subnets
SMI, FIRST_GPU = "/usr/bin/nvidia-smi", "10.0, 0'"  # the driver's tool; the end of its first line


@functools.cache
def why_not() -> str:
    """Why instances cannot run here; empty where they can."""
    return lan.why_not() or image.why_not()


class Instance:
    """A machine of the fake cloud."""

    def __init__(self, view: InstanceView, cloud: AwsCloud, net: Namespaces, spec: dict[str, Any]) -> None:
        self.id, self._cloud, self._net = view.id, cloud, net
        net.add(view.id, INTERFACE, ())
        try:
            self._wire(view)
            self._metadata = net.call(view.id, self._metadata_server)
            self._metadata.start()
            self.machine = Machine(Build(view.id, INTERFACE, door="none", families=()), net, Key("", ""), spec)
            self.machine.wait()
        except BaseException:
            net.remove(view.id)
            raise
        threading.Thread(target=self._listen, daemon=True).start()

    def _metadata_server(self) -> doors.Metadata:
        return doors.metadata((METADATA, 80), self._cloud, self.id)

    def _wire(self, view: InstanceView) -> None:
        net, interface = self._net, ["dev", INTERFACE]
        net.ip(self.id, "link", "set", INTERFACE, "down")
        net.ip(self.id, "link", "set", INTERFACE, "address", view.mac, "up")
        net.ip(self.id, "address", "add", f"{view.private_ip}/{PREFIX_BITS}", *interface)
        net.ip(self.id, "route", "add", "default", *interface, "src", view.private_ip)
        net.ip(self.id, "address", "add", f"{METADATA}/32", "dev", "lo")
        self._publish("", view.public_ip)

    def _publish(self, old: str, new: str) -> None:
        """A public address is the machine's, but no interface shows it: it is the network's to translate."""
        for verb, address in (("delete", old), ("add", new)):
            if address:
                self._net.ip(self.id, "address", verb, f"{address}/32", "dev", "lo")
        self.public = new

    def admit(self, laptop: str, open_: bool) -> None:
        """Let the laptop reach it, or not."""
        with contextlib.suppress(RuntimeError):
            self._net.ip(self.id, "route", "delete", "unreachable", laptop)
        if not open_:
            self._net.ip(self.id, "route", "add", "unreachable", laptop)

    def _listen(self) -> None:
        for line in self.machine.said():
            if line == OFF:
                self._cloud.guest_shutdown(self.id)

    def boot(self, view: InstanceView) -> None:
        self._publish(self.public, view.public_ip)
        self.machine.power_on()

    def stop(self) -> None:
        self.machine.power_off()

    def close(self) -> None:
        self._metadata.close()
        self.machine.close()
        self._net.remove(self.id)


class AwsMachines:
    """The runner of an `AwsCloud`, and a laptop."""

    instance: type[Instance] = Instance

    def __init__(self, cloud: AwsCloud, bare: tuple[str, ...] = (), beside: AwsMachines | None = None) -> None:
        """`bare`: images whose interpreter has what the tests' has, but no SDK of a cloud, and no installer.
        `beside`: machines of another cloud, on one network and with one laptop, which outlive these."""
        self.net, self._cloud, self._bare = beside.net if beside else Namespaces(), cloud, bare
        self._beside = beside
        self.broken = 0  # so many of the next machines with GPUs have memory errors in the first one
        self._all: dict[str, Instance] = {}
        self.ended: dict[str, str] = {}  # instance -> its logs as they were at its end
        self._api = None
        try:
            if not beside:
                self.net.ip(SWITCH, "route", "add", "default", "dev", "br0")
            here = (self.net.address(SWITCH), 0)
            listener = self.net.call(SWITCH, lambda: socket.create_server(here, backlog=128))
            self._api = doors.Relay(listener, urlsplit(cloud.url).port or 80)
            self.endpoint = f"http://{self.net.address(SWITCH)}:{self._api.port}"
            self.laptop = beside.laptop if beside else self._make_laptop()
        except BaseException:
            self.close()
            raise
        cloud.runner = self

    def _make_laptop(self) -> Machine:
        build, key = Build(LAPTOP, "wlan0", door="none", families=(4,)), Key.make()
        address = self.net.add(LAPTOP, build.interface, build.families)
        self.net.ip(LAPTOP, "route", "add", "default", "dev", build.interface)
        self.net.ip(LAPTOP, "route", "add", "unreachable", METADATA)
        machine = Machine(build, self.net, key, lan.spec_of(build, key, key, {LAPTOP: [address]}, {}))
        machine.wait()
        return machine

    def __enter__(self) -> AwsMachines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, instance_id: str) -> Machine:
        return self._all[instance_id].machine

    def __iter__(self) -> Iterator[str]:
        """Instances that have a disk."""
        return iter(list(self._all))

    def close(self) -> None:
        self._cloud.runner = None
        for made in list(self._all.values()):
            made.close()
        self._all.clear()
        if self._api is not None:
            self._api.close()
        if self._beside:
            return
        if LAPTOP in self.__dict__:
            self.laptop.close()
        self.net.close()

    # ---- what the fake asks for

    def run(self, view: InstanceView) -> None:
        if view.id in self._all:
            self._all[view.id].boot(view)
        else:
            spec = self._spec(view, view.image in self._bare)
            smi = spec["files"].get(SMI, ("", 0))[0]
            if self.broken and FIRST_GPU in smi:
                self.broken -= 1
                spec["files"][SMI] = (smi.replace(FIRST_GPU, f"{FIRST_GPU[:-2]}3'", 1), 0o755)
            self._all[view.id] = self.instance(view, self._cloud, self.net, spec)
        self._all[view.id].admit(self.laptop.address, self._lets_in(view, self.laptop.address))

    def stop(self, view: InstanceView) -> None:
        if view.id in self._all:
            self._all[view.id].stop()

    def terminate(self, view: InstanceView) -> None:
        if made := self._all.pop(view.id, None):
            self.ended[view.id] = image.logs(made.machine)
            made.close()

    def _spec(self, view: InstanceView, bare: bool) -> dict[str, Any]:
        return image.spec(view, bare)

    def _lets_in(self, view: InstanceView, address: str) -> bool:
        """Does any of its groups let SSH from there in?"""
        groups = self._cloud.client("ec2", view.region).describe_security_groups(GroupIds=list(view.groups))
        rules = [rule for group in groups["SecurityGroups"] for rule in group["IpPermissions"]]
        ssh = [r for r in rules if r["IpProtocol"] == "-1" or r.get("FromPort", 0) <= 22 <= r.get("ToPort", 65535)]
        return any(ipaddress.ip_address(address) in ipaddress.ip_network(net["CidrIp"])
                   for rule in ssh for net in rule["IpRanges"])

    # ---- to find out why

    def story(self) -> str:
        running = {made.id: image.logs(made.machine) for made in self._all.values()}
        return "\n".join(f"=== {name}\n{logs}" for name, logs in (self.ended | running).items())
