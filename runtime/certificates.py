"""Whether the certificate, key and authority of a process can serve, without a peer."""

import time
from datetime import datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from runtime.errors import ConfigError
from runtime.roles import Certificate, Identity, Role, bears, identity_of, role_fault
from runtime.tls_files import TlsBytes

_SUBJECT_KEY = Encoding.DER, PublicFormat.SubjectPublicKeyInfo


def check_pair(found: TlsBytes) -> None:
    """Check that the files hold what they should, and that the key is that of the
    certificate.

    Raises:
        ConfigError: the message has the file and what is wrong with it.
    """
    certificate = _certificates(found.files.cert, found.cert)[0]
    _certificates(found.files.ca, found.ca)
    path = found.files.key
    try:
        key = load_pem_private_key(found.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        text = f"{path}: is not a private key without a password"
        raise ConfigError(text, path=str(path)) from error
    ours = certificate.public_key().public_bytes(*_SUBJECT_KEY)
    if key.public_key().public_bytes(*_SUBJECT_KEY) != ours:
        raise ConfigError(f"{path}: is not the key of {found.files.cert}", path=str(path))


def check_usable(found: TlsBytes, now_s: float | None = None) -> None:
    """Check what `check_pair` does, and that others would believe the certificate: it
    is valid at `now_s`, in seconds since the epoch, and signed by the authority.

    Raises:
        ConfigError: the message has the file and what is wrong with it.
    """
    check_pair(found)
    if fault := validity_fault(found, time.time() if now_s is None else now_s):
        raise ConfigError(fault, hint="Once it is renewed it is read again, without a restart.")
    if not is_signed(found):
        raise ConfigError(
            f"{found.files.cert}: is not signed by {found.files.ca}, so others would refuse it",
            hint="Take both of the same cluster. A file may have several authorities.",
        )


def check_name(found: TlsBytes, host: str) -> None:
    """Check that who connects to this host would believe the certificate.

    Raises:
        ConfigError: it is for others, which the message has.
    """
    alternatives = _alternatives(_certificates(found.files.cert, found.cert)[0])
    names = alternatives.get_values_for_type(x509.DNSName)
    addresses = alternatives.get_values_for_type(x509.IPAddress)
    try:
        matches = ip_address(host) in addresses
    except ValueError:
        matches = any(_covers(name.lower(), host.lower()) for name in names)
    if not matches:
        known = ", ".join([*names, *map(str, addresses)]) or "no host"
        raise ConfigError(
            f"{found.files.cert}: is not for {host}, by which others reach us, but for {known}",
            hint="Have it issued with that host as a subject alternative name.",
        )


def check_own_role(found: TlsBytes, wanted: Role | Identity) -> None:
    """Check that our certificate says what we are, by itself or by the table of our
    settings; otherwise others would refuse us.

    Raises:
        ConfigError: it says something else, or nothing.
    """
    certificate = described(found.cert)
    bearer = identity_of(certificate, found.files.roles)
    if not bears(bearer, wanted):
        raise ConfigError(
            f"{found.files.cert}: is not ours: {role_fault(certificate, bearer, wanted)}",
            hint="Have one issued with that role as a URI (deploy/certificates.sh), or list this"
            " one in [roles] here and at whoever is called.",
            path=str(found.files.cert),
        )


def check_same_role(found: TlsBytes, before: TlsBytes) -> None:
    """Check that a renewed certificate says what the one before said, if that had a
    role: others would refuse a process that suddenly is something else.

    Raises:
        ConfigError: it says something else, or nothing.
    """
    known = identity_of(described(before.cert), before.files.roles)
    if isinstance(known, Identity):
        check_own_role(found, known if known.role is Role.DATANODE else known.role)


def described(pem: bytes) -> Certificate:
    """What the first certificate in these bytes says of its bearer, as a server of ours
    reads it from a call.

    Raises:
        ConfigError: it is no certificate.
    """
    certificate = _certificates("the certificate", pem)[0]
    try:
        subject = certificate.subject
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as error:
        raise ConfigError(f"the certificate has a subject that is no text: {error}") from error
    uris = _alternatives(certificate).get_values_for_type(x509.UniformResourceIdentifier)
    return Certificate(
        uris=tuple(uris),
        common_name=str(names[0].value) if names else "",
        subject=subject.rfc4514_string(),
        fingerprint=certificate.fingerprint(SHA256()).hex(),
    )


def validity_fault(found: TlsBytes, now_s: float) -> str:
    """Why our certificate is not valid at `now_s`, in seconds since the epoch; empty if
    it is.
    """
    certificate = _certificates(found.files.cert, found.cert)[0]
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if until.timestamp() < now_s:
        return f"{found.files.cert}: has expired on {_minute(until)}"
    if since.timestamp() > now_s:
        return f"{found.files.cert}: is valid from {_minute(since)} on"
    return ""


def valid_until(found: TlsBytes) -> str:
    """When our certificate expires, for people."""
    return _minute(_certificates(found.files.cert, found.cert)[0].not_valid_after_utc)


def is_signed(found: TlsBytes) -> bool:
    """Whether our authority signed our certificate, maybe by others in its file."""
    authorities = _certificates(found.files.ca, found.ca)
    certificate, *between = _certificates(found.files.cert, found.cert)
    # Each of them once: they may have signed each other.
    for _ in range(len(between) + 1):
        if certificate in authorities or any(_issued(certificate, one) for one in authorities):
            return True
        issuers = [one for one in between if one != certificate and _issued(certificate, one)]
        if not issuers:
            return False
        certificate = issuers[0]
    return False


def _certificates(path: object, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path}: is not a certificate", path=str(path)) from error


def _alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """The alternative names of a certificate; none if they cannot be read."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ):
        return x509.SubjectAlternativeName([])
    return extension.value


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    # Another name, another kind of key, or another key.
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _covers(name: str, host: str) -> bool:
    """Whether the DNS name of a certificate is that of a host; `*` is one label."""
    return host.partition(".")[2] == name[2:] if name.startswith("*.") else name == host


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
