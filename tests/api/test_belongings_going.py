"""Removing what a fleet has besides machines: how long a cloud is asked, by a clock that its answers move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from spotfleet.api.account import resources
from spotfleet.errors import SpotfleetError
from spotfleet.providers import Resource

LIMIT_S = 900.0


@dataclass
class SlowCloud:
    """Lists what is left; each removal takes `takes_s`. `used` cannot go, `deaf` is removed and stays."""

    left: list[str]
    takes_s: float
    used: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    now: float = 0.0

    def listed(self) -> list[Resource]:
        return [Resource("network", name, "us-east-1", "f") for name in self.left]

    def delete_resource(self, thing: Resource) -> None:
        self.now += self.takes_s
        if thing.id in self.used:
            raise SpotfleetError("another machine uses it")
        if thing.id not in self.deaf:
            self.left.remove(thing.id)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def remove(cloud: SlowCloud, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(resources, "time", cloud)
    gone = resources.remove(cloud, cloud.listed, lambda _: None, LIMIT_S, "again")
    return [b.id for b in gone]


def test_a_round_that_takes_longer_than_the_limit_and_removes_all_is_no_failure(monkeypatch):
    cloud = SlowCloud(["a", "b", "c"], takes_s=LIMIT_S / 2)
    assert remove(cloud, monkeypatch) == ["a", "b", "c"]
    assert cloud.now > LIMIT_S and cloud.left == []


@pytest.mark.parametrize("takes_s", [0.1, LIMIT_S])
def test_what_is_in_use_is_named_once_the_limit_is_over_and_all_else_is_gone(takes_s, monkeypatch):
    cloud = SlowCloud(["a", "b", "c"], takes_s, used={"b"})
    with pytest.raises(SpotfleetError, match="after 900 s there are still network b in us-east-1: another machine"):
        remove(cloud, monkeypatch)
    assert cloud.now >= LIMIT_S and cloud.left == ["b"]


def test_what_is_let_go_before_the_limit_is_removed(monkeypatch):
    cloud = SlowCloud(["a", "b"], takes_s=1.0, used={"b"})
    pass_s = cloud.sleep

    def let_go(seconds: float) -> None:
        pass_s(seconds)
        if cloud.now > LIMIT_S / 2:
            cloud.used.clear()

    cloud.sleep = let_go
    assert remove(cloud, monkeypatch) == ["a", "b"]
    assert LIMIT_S / 2 < cloud.now < LIMIT_S


def test_what_stays_listed_though_it_is_removed_again_and_again_is_named(monkeypatch):
    cloud = SlowCloud(["a", "b"], takes_s=1.0, deaf={"b"})
    with pytest.raises(SpotfleetError, match="still network b in us-east-1: still listed"):
        remove(cloud, monkeypatch)
    assert cloud.now >= LIMIT_S and cloud.left == ["b"]
