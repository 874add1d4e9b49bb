"""The clouds' price lists on loopback, and a user who types commands in a home of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotfleet.catalog import web as web_module
from spotfleet.cli.app import run
from spotfleet.providers.azure import price_list as azure_prices
from spotfleet.providers.gcp import price_list as gcp_prices
from tests.support.catalog.price_web import Web, serving


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Nothing is sold yet."""
    monkeypatch.setattr(web_module, "WAIT_S", 0.0)
    for name in (gcp_prices.KEY_VARIABLE, "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    with serving(Web()) as found:
        monkeypatch.setenv(azure_prices.URL_VARIABLE, f"{found.url}/api/retail/prices")
        monkeypatch.setenv(gcp_prices.URL_VARIABLE, found.url)
        yield found


@dataclass
class Typed:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@dataclass
class Shopper:
    home: Path
    capture: pytest.CaptureFixture[str]

    def types(self, line: str) -> Typed:
        self.capture.readouterr()
        code = run(line.split())
        out, err = self.capture.readouterr()
        assert "Traceback" not in err, err
        return Typed(code, out, err)

    def ok(self, line: str) -> Typed:
        typed = self.types(line)
        assert typed.code == 0, typed
        return typed

    def fails(self, line: str, code: int) -> Typed:
        typed = self.types(line)
        assert typed.code == code, typed
        return typed


@pytest.fixture
def shopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shopper:
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "home"))
    return Shopper(tmp_path / "home", capsys)
