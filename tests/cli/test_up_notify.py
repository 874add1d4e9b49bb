"""`notify` from the fleet file to the dispatcher, and what of it stays on the laptop."""

from __future__ import annotations

from tests.support.cli.cli_user import FILE

SECRET = "T0/very-secret"
URL = f"https://hooks.slack.com/services/{SECRET}"


def test_the_webhooks_address_goes_to_the_dispatcher_alone_and_is_forgotten_at_the_end(user, monkeypatch):
    monkeypatch.setenv("HOOK", URL)
    user.write("fleet.yaml", FILE + "notify: {webhook: $HOOK, events: [failed]}\n")
    said = user.ok("up fleet.yaml -y")
    boot = user.dispatcher.boot
    assert boot["webhook"] == URL and boot["spec"]["notify"]["events"] == ["failed"]
    holding = [p.name for p in user.home.rglob("*") if p.is_file() and SECRET in p.read_text(errors="replace")]
    assert holding == ["keys.json"] and SECRET not in str(boot["spec"]) + said.out + said.err

    monkeypatch.setenv("HOOK", URL + "-other")
    said = user.ok("up fleet.yaml -y")
    assert "changed at once: notify" in said.out + said.err and "notifications are changed" in said.err
    assert user.dispatcher.notify["webhook"] == URL + "-other" and SECRET not in said.out + said.err
    assert user.dispatcher.notify["notify"]["events"] == ["failed"]
    user.dispatcher.notify = {}
    assert "notif" not in user.ok("up fleet.yaml -y").err and user.dispatcher.notify == {}

    user.ok("down -y")
    assert not [p.name for p in user.home.rglob("*") if p.is_file() and SECRET in p.read_text(errors="replace")]
