"""Requests about what a cloud does not know yet, and requests side by side."""

from __future__ import annotations

import pytest

from spotfleet.errors import SpotfleetError
from spotfleet.providers.kit import requests
from spotfleet.providers.kit.requests import each, until_known


class Cloud:
    """Knows a new thing after some requests."""

    def __init__(self, late: int, words: str = "unknown") -> None:
        self.late, self.words, self.asked = late, words, 0

    def tag(self) -> str:
        self.asked += 1
        if self.asked <= self.late:
            raise SpotfleetError(self.words)
        return "tagged"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses so far; time passes by them alone."""
    pauses: list[float] = []
    monkeypatch.setattr(requests.time, "sleep", pauses.append)
    monkeypatch.setattr(requests.time, "monotonic", lambda: sum(pauses))
    return pauses


def not_known(error: SpotfleetError) -> bool:
    return str(error) == "unknown"


def test_what_was_just_made_is_asked_for_until_the_cloud_knows_it(slept: list[float]):
    cloud, lines = Cloud(3), []
    assert until_known(cloud.tag, not_known, 30.0, 2.0, lambda: lines.append("waiting")) == "tagged"
    assert (cloud.asked, slept, len(lines)) == (4, [2.0] * 3, 3)


def test_another_error_is_raised_at_once_and_the_first_one_after_the_limit(slept: list[float]):
    with pytest.raises(SpotfleetError, match="denied"):
        until_known(Cloud(1, "denied").tag, not_known, 30.0, 2.0)
    assert slept == []
    with pytest.raises(SpotfleetError, match="unknown"):
        until_known(Cloud(99).tag, not_known, 30.0, 2.0)
    assert sum(slept) == 32.0


def test_requests_side_by_side_keep_their_order_and_the_first_failure_is_raised():
    assert each(lambda n: n * 2, [3, 1, 2]) == [6, 2, 4]

    def fail(n: int) -> int:
        raise SpotfleetError(f"no {n}")

    with pytest.raises(SpotfleetError, match="no 1"):
        each(fail, [1, 2])
