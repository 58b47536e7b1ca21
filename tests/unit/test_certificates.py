"""What a certificate says of its bearer, whatever else stands in it."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

from runtime.certificates import described

# One name, an ediPartyName, which has no reader.
_EDI_PARTY = bytes.fromhex("3004a5023000")


def test_a_name_of_a_kind_that_nobody_reads_is_no_name() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    since = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    alternatives = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, _EDI_PARTY)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, since, since.replace(year=2036))
        .add_extension(alternatives, critical=False)
        .sign(key, hashes.SHA256())
    )
    found = described(certificate.public_bytes(serialization.Encoding.PEM))
    assert (found.common_name, found.uris) == ("somebody", ())
