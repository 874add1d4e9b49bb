"""The commands `page` and `metrics` where they cannot show anything."""

from __future__ import annotations

import pytest

from tests.support.cli.cli_user import FILE


@pytest.mark.parametrize(("command", "without"), [("page --no-browser", "the page"), ("metrics", "metrics")])
def test_a_dispatcher_of_an_earlier_release_is_named_before_anything_is_opened(user, command, without):
    user.write("fleet.yaml", FILE)
    user.ok("up fleet.yaml -y")
    said = user.fails(command)
    assert f"dispatcher is of a release without {without}" in said.err and said.out == ""


@pytest.mark.parametrize("command", ["page --no-browser", "metrics"])
def test_without_a_fleet_the_next_command_is_named(user, command):
    said = user.fails(command)
    assert "spotfleet up FILE" in said.err and said.out == ""
