"""Maintenance that the cloud plans for a machine, as its metadata server tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from spotfleet.errors import NoticeFormat
from spotfleet.interruptions.imds import ACTION_PATH, MAINTENANCE_PATH, REBALANCE_PATH, ImdsSource
from spotfleet.model import Notice
from tests.providers.local.test_local_imds import NOW, Scripted


@pytest.fixture
def scripted() -> Iterator:
    servers = []

    def start(answers: dict[str, tuple[int, str]]) -> Scripted:
        servers.append(Scripted(answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


# ---- planned maintenance


def planned(code: str, in_s: float, state: str = "active") -> dict[str, str]:
    return {"Code": code, "NotBefore": formatdate(NOW + in_s, usegmt=True).partition(", ")[2], "State": state,
            "EventId": "instance-event-1", "Description": "scheduled reboot"}


def told(scripted, *events: dict[str, str], rebalance: tuple[int, str] = (404, "")) -> Notice | None:
    answers = {MAINTENANCE_PATH: (200, json.dumps(events)), REBALANCE_PATH: rebalance}
    return ImdsSource(scripted(answers).url, now=lambda: NOW).poll()


@pytest.mark.parametrize("code", ["system-reboot", "instance-reboot", "instance-stop", "instance-retirement"])
def test_maintenance_that_ends_a_machine_is_a_hint_until_it_is_near_and_then_a_notice_with_its_seconds(scripted, code):
    far = told(scripted, planned(code, 86_400.0))
    assert (far.kind, far.why) == ("maintenance", f"maintenance of the cloud: {code} at 2027-01-16 08:00 UTC")
    assert told(scripted, planned(code, 601.0)).kind == "maintenance"
    assert told(scripted, planned(code, 600.0)) == Notice(
        600.0, "terminate", why=f"maintenance of the cloud: {code} at 2027-01-15 08:10 UTC")
    assert told(scripted, planned(code, -60.0)).seconds_left == 0.0


def test_maintenance_that_ends_no_machine_or_is_unknown_stays_a_hint(scripted):
    assert told(scripted, planned("system-maintenance", 60.0)).kind == "maintenance"
    assert told(scripted, planned("something-new", 60.0)).kind == "maintenance"


@pytest.mark.parametrize("state", ["canceled", "completed"])
def test_maintenance_that_is_over_or_called_off_is_none(scripted, state):
    assert told(scripted, planned("instance-stop", 60.0, state)) is None
    assert told(scripted, planned("instance-stop", 60.0, state), planned("system-reboot", 300.0)).seconds_left == 300.0
    assert told(scripted) is None


def test_the_nearest_end_counts_and_a_recommendation_goes_before_a_hint_but_not_before_a_notice(scripted):
    hint = (200, '{"noticeTime": "2027-01-15T08:00:00Z"}')
    both = planned("system-maintenance", 10.0), planned("instance-stop", 500.0), planned("system-reboot", 300.0)
    assert told(scripted, *both, rebalance=hint).seconds_left == 300.0
    assert told(scripted, planned("instance-stop", 5_000.0), rebalance=hint).kind == "rebalance"


def test_maintenance_called_off_withdraws_its_notice_at_the_next_look(scripted, monkeypatch):
    server = scripted({MAINTENANCE_PATH: (200, json.dumps([planned("instance-stop", 60.0)]))})
    source = ImdsSource(server.url, now=lambda: NOW)
    assert source.poll().kind == "interruption"
    server.answers[MAINTENANCE_PATH] = (200, json.dumps([planned("instance-stop", 60.0, "canceled")]))
    assert source.poll().kind == "interruption" and server.asked.count(MAINTENANCE_PATH) == 1
    monkeypatch.setattr("spotfleet.interruptions.imds.MAINTENANCE_S", 0.0)
    source._planned_until = 0.0
    assert source.poll() is None


@pytest.mark.parametrize("answer", [(500, ""), (200, "{}"), (200, "[1]"), (200, '[{"NotBefore": "soon"}]'),
                                    (200, '[{"NotBefore": "32 Jan 2019 09:00:43 GMT"}]'), (200, "<html>")])
def test_maintenance_that_cannot_be_read_hides_no_interruption_and_is_said_once_in_a_while(scripted, answer):
    server = scripted({MAINTENANCE_PATH: answer})
    source = ImdsSource(server.url, now=lambda: NOW)
    with pytest.raises(NoticeFormat):
        source.poll()
    assert source.poll() is None
    server.answers[ACTION_PATH] = (200, '{"action": "terminate", "time": "2027-01-15T08:02:00Z"}')
    source._planned_until = 0.0
    assert source.poll().seconds_left == 120.0


def test_the_legacy_termination_time_is_not_even_asked(scripted):
    server = scripted({"/latest/meta-data/spot/termination-time": (200, "2015-01-05T18:02:00Z")})
    assert ImdsSource(server.url, now=lambda: NOW).poll() is None
    assert not [path for path in server.asked if "termination-time" in path]
