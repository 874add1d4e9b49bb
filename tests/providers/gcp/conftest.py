"""One fake of Google Cloud per test process, as new for each test, and a provider that talks to it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfleet.codec import to_json
from spotfleet.providers.gcp import GcpProvider, session
from spotfleet.providers.gcp.spec import GcpSpec

COUNT = itertools.count()  # callers with the same configuration share what is remembered


class CloudTime:
    """Time of the cloud, which passes only where a test says so."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(scope="session")
def cloud_time() -> CloudTime:
    return CloudTime()


@pytest.fixture(scope="session")
def shared_cloud(cloud_time: CloudTime) -> Iterator[Any]:
    from tests.support.fakes.gcp import GcpCloud

    cloud_time.at = time.time()
    with GcpCloud(clock=cloud_time) as cloud:
        yield cloud


@pytest.fixture
def cloud(shared_cloud: Any, cloud_time: CloudTime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As new; Application Default Credentials are those of the project's owner."""
    cloud_time.at = time.time()
    shared_cloud.reset()
    for name, value in shared_cloud.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "PAUSE_S", 0.0)
    yield shared_cloud
    assert not shared_cloud.findings, shared_cloud.findings[:10]
    assert not shared_cloud.bugs, shared_cloud.bugs[:10]


@pytest.fixture
def gcp(cloud: Any) -> Callable[..., GcpProvider]:
    """A provider of its own, with nothing remembered: gcp(regions=("us-central1",), side="dispatcher")."""
    def make(side: str = "laptop", target: str = "", placement: str = "spread", **spec: Any) -> GcpProvider:
        spec = {"project": cloud.project, "regions": ("us-central1",), "ssh_from": ("192.0.2.1/32",), **spec}
        return GcpProvider({"section": to_json(GcpSpec(**spec)), "endpoint_url": cloud.url, "side": side,
                            "placement": placement, "target": target, "secret": f"secret {next(COUNT)}"})

    return make
