"""Certificates with identities, and a server without."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from runtime.access import Access
from runtime.roles import URI_PREFIX, RoleTable
from runtime.tls_files import Tls

# As a server without TLS.
ANYBODY = Access(RoleTable(), is_enforced=False)


def certificate(
    authority: trustme.CA,
    folder: Path,
    name: str,
    *identities: str,
    organization: tuple[str, str] = ("", ""),
    dns_names: tuple[str, ...] = (),
) -> Path:
    """cert.pem, key.pem and ca.pem for one process on loopback, in a folder of its own.

    `identities` become URIs; `organization` is the subject's organisation and its unit.
    """
    cert, key = issued(
        authority,
        "127.0.0.1",
        *identities,
        subject=(*organization, name),
        dns_names=dns_names,
    )
    place = folder / name
    place.mkdir(parents=True)
    (place / "cert.pem").write_bytes(cert)
    (place / "key.pem").write_bytes(key)
    authority.cert_pem.write_to_path(place / "ca.pem")
    return place


def issued(
    authority: trustme.CA,
    host: str,
    *identities: str,
    subject: tuple[str, str, str] = ("", "", ""),
    dns_names: tuple[str, ...] = (),
    not_before: datetime | None = None,
    not_after: datetime | None = None,
) -> tuple[bytes, bytes]:
    """A certificate and its key, as PEM. `host` is an address or a name, `identities`
    become URIs, and `subject` is the organisation, its unit and the common name.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    issuer_key = load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    oids = NameOID.ORGANIZATION_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME, NameOID.COMMON_NAME
    values = zip(oids, subject, strict=True)
    try:
        reached: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        reached = x509.DNSName(host)
    names = [
        reached,
        *map(x509.DNSName, dns_names),
        *(x509.UniformResourceIdentifier(URI_PREFIX + one) for one in identities if one),
    ]
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(oid, value) for oid, value in values if value]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before or min(now, not_after or now) - timedelta(days=1))
        .not_valid_after(not_after or now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM), pem


def tls_in(place: Path) -> Tls:
    """The files of `certificate`."""
    return Tls(place / "cert.pem", place / "key.pem", place / "ca.pem")
