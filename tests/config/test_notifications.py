"""Section `notify` of the fleet file."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.codec import to_json
from spotfleet.config import parse
from spotfleet.model import NOTIFY_ON, NotifySpec
from tests.config.test_fleet_file import problems

URL = "https://hooks.slack.com/services/T0/very-secret"


def test_the_webhooks_address_is_kept_apart_and_a_change_of_it_is_seen():
    file = parse("name: a\nnotify: {webhook: $HOOK, events: [failed, budget]}", Path("a.yaml"), {"HOOK": URL})
    same = parse(f"name: a\nnotify: {{webhook: '{URL}', events: [failed, budget]}}", Path("a.yaml"), {})
    other = parse("name: a\nnotify: {webhook: $HOOK, events: [failed, budget]}", Path("a.yaml"), {"HOOK": URL + "2"})
    assert file.webhook == same.webhook == URL and file.spec == same.spec
    assert file.spec.notify.events == ("failed", "budget")
    assert "secret" not in str(to_json(file.spec)) + repr(file)
    assert other.spec.notify != file.spec.notify


def test_a_command_alone_is_enough_and_all_events_are_notified_unless_chosen():
    assert parse("name: a\nnotify: {command: ./page-me}", Path("a.yaml"), {}).spec.notify == NotifySpec(
        NOTIFY_ON, "./page-me")
    assert parse("name: a", Path("a.yaml"), {}).spec.notify == NotifySpec()


@pytest.mark.parametrize(("text", "said"), [
    ("notify: {webhook: very-secret}", "1: notify.webhook: expected an address such as https://hooks.slack.com/"
                                       "services/..., or $NAME of a variable that holds it"),
    ("notify: {webhook: $NONE}", "1: notify.webhook: NONE has no value in your environment; `export NONE=...`"),
    ("notify: {command: x, events: [fail]}", "1: notify.events: expected some of preempted, failed, succeeded, budget, "
                                             "got 'fail'; did you mean 'failed'?"),
    ("notify: {command: x, events: []}", "1: notify.events: expected a list of preempted, failed, succeeded, budget, "
                                         "got []"),
    ("notify: {events: [failed]}", "1: notify: needs `webhook`, `command` or both"),
    ("notify: {command: x, slack: y}", "1: notify.slack: unknown key; expected one of webhook, command, events"),
])
def test_what_does_not_fit_is_named_with_the_way_out_and_never_repeats_the_address(text, said):
    (found,) = problems(text)
    assert found.endswith(said)
