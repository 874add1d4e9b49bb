"""The world of the example provider `lambda`: its API as a fake over loopback. Its hosts run nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from spotfleet.model import Need
from spotfleet.providers.local.inprocess import ManualClock
from tests.support.fakes.lambda_cloud import KEY, SSH_KEY, LambdaCloud

EXAMPLE = Path(__file__).parents[3] / "examples" / "lambda-cloud"
PATHS = {"launch": "/instance-operations/launch", "terminate": "/instance-operations/terminate"}


class LambdaWorld:
    lacks = ("past prices", "interruptions", "tags after a launch", "boot files")

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(EXAMPLE)
        self.module: Any = import_module("spotfleet_lambda")
        self.clock = ManualClock()
        self.cloud = LambdaCloud(self.clock).__enter__()

    def provider(self) -> Any:
        return self.module.LAMBDA.open({"url": self.cloud.url, "api_key": KEY, "secret": "the fleet's",
                                        "section": {"ssh_key": SSH_KEY, "regions": ["us-east-1"]}})

    def need(self) -> Need:
        return Need(accelerator="A10", use_spot=False)

    def machines(self) -> list[str]:
        return [t["value"] for i in self.cloud.living() for t in i.body["tags"] if t["key"] == "spotfleet-host"]

    def tag(self, request_id: str, key: str) -> str:
        raise AssertionError("hosts of this cloud read no tags")

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def full(self, pool: str) -> None:
        _, region, kind, _ = pool.split("/")
        self.cloud.full.add((kind, region))

    def wants_a_person(self, pool: str) -> None:
        self.cloud.inactive = True

    def lose(self, method: str, when: str) -> None:
        self.cloud.lost[PATHS[method]] = when

    def lag(self, seconds: float, duplicates: int) -> int:
        """A host has one line, however often the cloud lists its instance."""
        self.cloud.lag_s = seconds
        return 1

    def move_price(self, pool: str, micros_h: int) -> None:
        self.cloud.cents[pool.split("/")[2]] = micros_h // 10_000

    def stops_hosts(self) -> None:
        pytest.skip("does not apply: this cloud stops no machine")

    def close(self) -> None:
        self.cloud.__exit__(None, None, None)
