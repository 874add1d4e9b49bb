"""TLS of one fleet: a certificate authority that signs exactly one certificate, the dispatcher's.

The CLI makes both when the fleet is made and discards the authority's key, so that nothing else can ever be
signed by it. CLI and agents pin the authority instead of a name: a dispatcher's address is unknown before
its machine exists, and it may change.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

VALID_DAYS = 3650  # a fleet must not end because its certificate expires
SERVER_NAME = "dispatcher.spotfleet.internal"  # in each certificate, for clients that check a name, such as Prometheus
CLOCK_SKEW = timedelta(days=366)  # a machine whose clock is behind ours must accept it too; the pin is the protection


@dataclass(frozen=True)
class FleetCertificates:
    """Certificates of one fleet, as PEM. `key` is the dispatcher's and secret; the authority's key is discarded."""

    ca: str
    cert: str
    key: str = field(repr=False)


def make(fleet: str, now: float) -> FleetCertificates:
    """Make a new authority and the dispatcher's certificate for `fleet`, valid from a year before `now`."""
    from cryptography.hazmat.primitives.asymmetric import ec

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _sign(f"spotfleet {fleet} authority", f"spotfleet {fleet} authority", ca_key, ca_key, now, ca=True)
    cert = _sign(f"spotfleet {fleet} dispatcher", f"spotfleet {fleet} authority", key, ca_key, now, ca=False)
    return FleetCertificates(_pem(ca), _pem(cert), _key_pem(key))


def validity(ca: str) -> tuple[float, float]:
    """Return when the validity of `ca` (PEM) begins and ends, in Unix seconds."""
    from cryptography import x509

    found = x509.load_pem_x509_certificate(ca.encode())
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def client_context(ca: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only certificates signed by `ca` (PEM).

    Names are not checked: the authority signs nothing but the dispatcher's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca)
    return context


def server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return the TLS context of the dispatcher's listener."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert_file, key_file)
    return context


def _sign(subject: str, issuer: str, key, ca_key, now: float, *, ca: bool):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    begin = datetime.fromtimestamp(now, UTC) - CLOCK_SKEW
    name = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n[:64])]) for n in (subject, issuer)]
    usage = x509.KeyUsage(digital_signature=not ca, content_commitment=False, key_encipherment=False,
                          data_encipherment=False, key_agreement=False, key_cert_sign=ca, crl_sign=ca,
                          encipher_only=False, decipher_only=False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name[0]).issuer_name(name[1]).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin).not_valid_after(begin + timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if not ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _pem(certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
