"""`spotfleet revoke`: what it will do is shown, asked for, and done to the host that was meant."""

from __future__ import annotations


def test_revoke_says_what_it_does_and_names_the_host_by_address_too(up):
    first = next(h for h in up.cloud.hosts("digits") if "-d-" not in h.request_id)
    said = up.ok(f"revoke {first.address} -y --why", "it was seen elsewhere")
    assert f"refuse the token of {first.request_id} from now on" in said.err
    assert f"{first.request_id} is trusted no more" in said.err and said.err.endswith("events digits\n")
    assert up.dispatcher.revoked == {first.request_id: "it was seen elsewhere"}


def test_revoke_asks_first(up):
    host = up.workers()[0]
    assert "Nobody can be asked" in up.fails(f"revoke {host}", code=2).err
    assert up.dispatcher.revoked == {}


def test_neither_a_stranger_nor_the_dispatchers_machine_can_be_revoked(up):
    assert "no host 'nobody'" in up.fails("revoke nobody -y").err
    dispatcher = next(n for n in up.cloud.living() if "-d-" in n)
    assert "stays as long as the fleet" in up.fails(f"revoke {dispatcher} -y").err
    assert up.dispatcher.revoked == {}
