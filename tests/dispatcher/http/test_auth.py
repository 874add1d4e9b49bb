"""Whose token is it?"""

from __future__ import annotations

from spotfleet.dispatcher.http.auth import Caller, bearer, host_token, identify


def who(token: str) -> Caller | None:
    return identify(token, "admin-token", "fleet-secret")


def test_the_admin_and_each_host_are_told_apart_by_their_tokens():
    assert who("admin-token") == Caller()
    assert who(host_token("fleet-secret", "f-2")) == Caller("f-2")
    assert Caller().is_admin and not Caller("f-2").is_admin


def test_nobody_else_is_let_in():
    assert who("") is None
    assert who("admin-toke") is None
    assert who(host_token("other-secret", "f-1")) is None
    assert who(host_token("fleet-secret", "f-1").replace("f-1.", "f-2.")) is None
    assert who(host_token("fleet-secret", "")) is None
    assert who("." + "0" * 64) is None and who("f-1.") is None and who("f-1") is None
    assert who("tökén") is None and who("\udcff.\udcff") is None
    assert who("f" * 100_000 + ".0") is None
    assert identify("", "", "fleet-secret") is None and identify(".", "", "fleet-secret") is None


def test_only_a_bearer_header_holds_a_token():
    assert bearer("Bearer abc") == "abc"
    assert bearer("Basic abc") == ""
    assert bearer("") == ""
