"""How addresses are written and read, IPv4, IPv6 and names, and which of them no peer can use."""

from __future__ import annotations

import pytest

from spotfleet.addresses import host_of, is_loopback, is_number, joined, plain, split, unfit, url


@pytest.mark.parametrize("address, port, text", [
    ("10.0.0.7", 5, "10.0.0.7:5"), ("2001:db8::7", 65535, "[2001:db8::7]:65535"), ("head", 80, "head:80")])
def test_what_is_joined_is_split_again(address, port, text):
    assert joined(address, port) == text
    assert split(text) == (address, port)
    assert host_of(text) == host_of(url(address, port)) == host_of(f"{url(address, port)}/v1/agent") == address


@pytest.mark.parametrize("text", ["", "10.0.0.7", "[::1]", "[::1]:", "::1:x"])
def test_what_has_no_port_is_not_split(text):
    with pytest.raises(ValueError):
        split(text)


@pytest.mark.parametrize("text, host", [
    ("", ""), ("https://[fd00::1]", "fd00::1"), ("https://head", "head"), ("https://10.0.0.7:1", "10.0.0.7")])
def test_a_url_names_its_host_with_a_port_or_without(text, host):
    assert host_of(text) == host


@pytest.mark.parametrize("written, same", [
    ("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:DB8:0:0::7", "2001:db8::7"),
    ("[2001:db8::7]", "2001:db8::7"), ("fe80::1%eth0", "fe80::1"), ("head.example", "head.example")])
def test_an_address_is_written_in_one_way(written, same):
    assert plain(written) == same


def test_a_name_is_no_address():
    assert [is_number(a) for a in ("head", "10.0.0.7", "::1", "10.0.0")] == [False, True, True, False]
    assert [is_loopback(a) for a in ("127.9.9.9", "::1", "10.0.0.1", "localhost")] == [True, True, False, False]


@pytest.mark.parametrize("advertised, dispatcher, words", [
    ("10.0.0.7", "10.0.0.1", ""),
    ("fd00::7", "10.0.0.1", ""),
    ("127.0.3.7", "127.0.0.1", ""),  # provider local: one machine
    ("127.0.0.1", "10.0.0.1", "127.0.0.1, which every machine takes for itself"),
    ("::1", "fd00::1", "::1, which every machine takes for itself"),
    ("fe80::1%eth0", "fd00::1", "fe80::1, which means nothing beyond one link"),
    ("fe80::1", "fe80::2", "fe80::1, which means nothing beyond one link"),
    ("169.254.3.3", "10.0.0.1", "169.254.3.3, which means nothing beyond one link"),
    ("169.254.3.3", "169.254.0.1", ""),  # a cable between them
    ("0.0.0.0", "10.0.0.1", "0.0.0.0, which is no machine's address"),
    ("127.0.0.1", "head.example", ""), ("", "10.0.0.1", "")])
def test_an_address_that_no_peer_can_use_is_told_with_the_fix(advertised, dispatcher, words):
    told = unfit(advertised, dispatcher)
    assert words in told
    assert bool(told) is bool(words) is ("`address` in section `ssh`" in told)
