"""The pinned authority of a fleet, over real TLS handshakes."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest

from spotfleet.transport.certs import FleetCertificates, client_context, make, server_context


def handshake(folder: Path, server: FleetCertificates, ca: str) -> None:
    """A TLS handshake in memory between a dispatcher with `server` and a client that pins `ca`."""
    (folder / "cert").write_text(server.cert)
    (folder / "key").write_text(server.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client_context(ca).wrap_bio(to_client, to_server),
            server_context(folder / "cert", folder / "key").wrap_bio(to_server, to_client, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_a_client_that_pins_the_authority_trusts_the_dispatcher(tmp_path):
    made = make("digits", time.time())
    handshake(tmp_path, made, made.ca)


def test_the_dispatcher_of_another_fleet_is_not_trusted(tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, make("digits", time.time()), make("digits", time.time()).ca)


def test_a_clock_that_is_hours_behind_still_trusts(tmp_path):
    made = make("digits", time.time() + 12 * 3600)
    handshake(tmp_path, made, made.ca)


def test_the_key_is_in_no_printed_form():
    made = make("digits", 0)
    assert "PRIVATE" in made.key and "PRIVATE" not in repr(made)
