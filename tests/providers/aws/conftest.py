"""One AWS fake per test process, as new for each test, and the configuration of a provider that talks to it."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfleet.codec import to_json
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.section.spec import AwsSpec

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
COUNT = itertools.count()  # for this process: whoever has the same configuration shares what is remembered


@pytest.fixture(scope="session")
def shared_cloud() -> Iterator[Any]:
    from tests.support.fakes.aws import AwsCloud

    with AwsCloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(shared_cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As new; whoever asks for credentials gets those of the account's owner."""
    shared_cloud.reset()
    for name, value in shared_cloud.environ().items():
        monkeypatch.setenv(name, value)
    yield shared_cloud
    assert not shared_cloud.findings, shared_cloud.findings[:10]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore does not wait before it asks again."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)


@pytest.fixture
def aws(cloud: Any) -> Callable[..., AwsProvider]:
    """A provider of its own, with nothing remembered: aws(regions=("us-east-1",), side="dispatcher")."""
    def make(side: str = "laptop", placement: str = "spread", secret: str = "", **spec: Any) -> AwsProvider:
        spec.setdefault("regions", ("us-east-1",))
        return AwsProvider({"aws": json.dumps(to_json(AwsSpec(**spec))), "endpoint_url": cloud.url, "side": side,
                            "placement": placement, "secret": secret or f"secret {next(COUNT)}"})

    return make


class SleepingTime:
    """Time that passes only while somebody sleeps, in the cloud as well."""

    def __init__(self, began: float) -> None:
        self.began, self.slept_s = began, 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds

    def monotonic(self) -> float:
        return 1000.0 + self.slept_s

    def time(self) -> float:
        return self.began + self.slept_s


@pytest.fixture
def clock(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> SleepingTime:
    made = SleepingTime(cloud.clock())
    monkeypatch.setattr(cloud, "clock", made.time)
    monkeypatch.setattr(time, "sleep", made.sleep)
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made
