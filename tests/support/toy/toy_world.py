"""The toy cloud for the contract suite: a real distribution on sys.path, found by its entry point. No process runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotfleet import plugins, providers
from spotfleet.interruptions import load as notices_of
from spotfleet.model import Need
from spotfleet.providers import Provider
from spotfleet.providers.local.inprocess import ManualClock

PLUGIN = (Path(__file__).with_name("plugin") / "spotfleet_toy.py").parent


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the distribution on the path of this process and of its children. Undo with `forget`."""
    plugins.load.cache_clear()
    plugins.installed.cache_clear()
    monkeypatch.syspath_prepend(PLUGIN)


def forget() -> None:
    plugins.load.cache_clear()
    plugins.installed.cache_clear()


class ToyWorld:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch)
        self.clock = ManualClock()
        monkeypatch.setattr("spotfleet_toy.now", self.clock)
        self._account = home / "account"
        self._account.mkdir()

    def provider(self) -> Provider:
        return providers.load("toy", {"section": {"account": str(self._account), "processes": False}})

    def need(self) -> Need:
        return Need(accelerator="TOY")

    def machines(self) -> list[str]:
        with self._toy().state() as state:
            return [n for n, h in state["hosts"].items() if h["ended_at"] is None or h["ended_at"] > self.clock()]

    def tag(self, request_id: str, key: str) -> str:
        source = notices_of("toy", str(self._account / request_id))
        assert source is not None
        return source.tag(key)

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def full(self, pool: str) -> None:
        self._change("refused", **{pool: "full"})

    def wants_a_person(self, pool: str) -> None:
        self._change("refused", **{pool: "person"})

    def lose(self, method: str, when: str) -> None:
        self._change("lose", **{method: when})

    def lag(self, seconds: float, duplicates: int) -> int:
        with self._toy().state() as state:
            state.update(lag_s=seconds, duplicates=duplicates)
        return 1 + duplicates

    def move_price(self, pool: str, micros_h: int) -> None:
        with self._toy().state() as state:
            state["prices"].setdefault(pool, []).append([self.clock() + 0.001, micros_h])

    def stops_hosts(self) -> None:
        pytest.skip("does not apply: this cloud stops no machine")

    def close(self) -> None:
        forget()

    def _toy(self) -> Any:
        return self.provider()

    def _change(self, part: str, **changed: str) -> None:
        with self._toy().state() as state:
            state[part].update(changed)
