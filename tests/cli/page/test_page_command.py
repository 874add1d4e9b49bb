"""The commands `page` and `metrics` where they cannot show anything."""

from __future__ import annotations

from tests.support.cli.cli_user import FILE


def test_without_a_fleet_or_with_a_dispatcher_of_an_earlier_release_the_reason_is_named_and_nothing_opened(user):
    for command in ("page --no-browser", "metrics"):
        said = user.fails(command)
        assert "spotfleet up FILE" in said.err and said.out == ""
    user.write("fleet.yaml", FILE)
    user.ok("up fleet.yaml -y")
    for command, without in (("page --no-browser", "the page"), ("metrics", "metrics")):
        said = user.fails(command)
        assert f"dispatcher is of a release without {without}" in said.err and said.out == ""
