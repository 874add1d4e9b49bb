"""Which interface bears an address, for NCCL_SOCKET_IFNAME, on machines as they are: other names, more networks, second
addresses, IPv6."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfleet.train.comm.nccl_environment import variables
from spotfleet.worker.sockets import holds, interface_of
from tests.support.network.namespaces import Namespaces, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def machine() -> Iterator[Namespaces]:
    with Namespaces() as net:
        net.add("m", "enp0s3", (4, 6))
        for words in ("link add docker0 type bridge", "link set docker0 up", "address add 172.17.0.1/16 dev docker0",
                      "address add 10.213.7.88/24 dev enp0s3 label enp0s3:1",  # an alias
                      "address add 10.213.7.89/32 dev enp0s3",  # a floating address
                      "address add 192.168.9.9/32 dev lo",  # a loopback address of a routed network
                      "address add fd00:9::9/128 dev lo", "link add wan type bridge", "link set wan up",
                      "address add 10.213.0.5/16 dev wan"):  # a wider network with the narrower one in it
            net.ip("m", *words.split())
        yield net


@pytest.mark.parametrize("address, interface", [
    ("10.213.7.2", "enp0s3"), ("fd00:213:7::2", "enp0s3"), ("10.213.7.88", "enp0s3"), ("10.213.7.89", "enp0s3"),
    ("172.17.0.1", "docker0"), ("192.168.9.9", "lo"), ("fd00:9::9", "lo"), ("10.213.0.5", "wan"),
    ("::ffff:10.213.7.2", "enp0s3"), ("FD00:213:7:0::2", "enp0s3"), ("8.8.8.8", "")])
def test_an_address_is_found_on_the_interface_that_bears_it(machine: Namespaces, address: str, interface: str):
    assert machine.call("m", lambda: interface_of(address)) == interface


def test_nccl_is_given_exactly_that_interface(machine: Namespaces):
    found = machine.call("m", lambda: variables({}, "fd00:213:7::2"))
    assert found["NCCL_SOCKET_IFNAME"] == "=enp0s3"


def test_a_machine_holds_its_own_addresses_and_no_other(machine: Namespaces):
    own, others = ("10.213.7.2", "fd00:213:7::2", "10.213.7.89", "192.168.9.9"), ("10.213.7.3", "fd00:213:7::3")
    assert machine.call("m", lambda: [[holds(a) for a in some] for some in (own, others)]) == [[True] * 4, [False] * 2]
