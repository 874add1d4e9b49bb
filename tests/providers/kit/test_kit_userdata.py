"""Packages of a machine that a cloud makes: a host's, and those of a dispatcher, which runs no job but a Ray head."""

from __future__ import annotations

import gzip

import pytest

from spotfleet.bootstrap import gang
from spotfleet.model import EnvironmentSpec, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.kit.userdata import MachineSetup, user_data

OFFER = Offer("local", "r", "z", "t", Market.SPOT, 1, 1000, 3000)
BOTH = ("torch==2.13.0", "ray==2.60.*")


@pytest.mark.parametrize("images", [{}, {"plain_dispatcher": True}, {"ready_dispatcher": True}], ids=str)
@pytest.mark.parametrize(("role", "packages", "installed"), [
    (Role.WORKER, BOTH, [*BOTH]), (Role.DISPATCHER, BOTH, ["ray==2.60.*"]), (Role.DISPATCHER, BOTH[:1], [])])
def test_the_dispatcher_gets_ray_of_the_hosts_packages_and_nothing_else(images, role, packages, installed):
    setup = MachineSetup(EnvironmentSpec(packages=packages), **images)
    request = LaunchRequest("f-1", "f", role, OFFER, Boot("spotfleet.agent"))
    config = gang.parsed(gzip.decompress(user_data(setup, [request])).decode())
    text = next(f["content"] for f in config["write_files"] if f["path"].endswith("/packages.txt"))
    assert text.split() == installed
