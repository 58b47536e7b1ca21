"""Whatever a certificate says: it has the role that its authority or the operator of
the server gave it, and calls nothing else.
"""

from cryptography import x509
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from runtime.roles import (
    METHOD_ROLES,
    OPEN_METHODS,
    URI_PREFIX,
    Certificate,
    Identity,
    NoRole,
    Role,
    RoleTable,
    identity_of,
    may_call,
    parse_identity,
    speaks_for,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,20}", fullmatch=True)
IDENTITIES = st.one_of(
    st.builds(Identity, st.sampled_from([role for role in Role if role != Role.DATANODE]), NAMES),
    st.builds(Identity, st.just(Role.DATANODE), st.uuids().map(str)),
)
FINGERPRINTS = st.sampled_from(["00" * 32, "ff" * 32])
COMMON_NAMES = st.sampled_from(["", "dn1", "alice"])
# Letters of which names of roles are made, and some that no name may have.
TEXTS = st.text("acdeilnoprtvyz0-/:@ \né", max_size=20)
URIS = st.one_of(TEXTS, TEXTS.map(URI_PREFIX.__add__)) | (
    IDENTITIES.map(lambda identity: f"{URI_PREFIX}{identity}")
)
SUBJECT_PARTS = st.text(st.sampled_from('CNO=,+\\"#; ab1-'), min_size=1, max_size=12)
CERTIFICATES = st.builds(
    Certificate,
    st.lists(URIS, max_size=3).map(tuple),
    COMMON_NAMES,
    TEXTS,
    FINGERPRINTS,
)
TABLES = st.builds(
    RoleTable,
    st.dictionaries(FINGERPRINTS, IDENTITIES),
    st.dictionaries(st.sampled_from(["dn1", "alice"]), IDENTITIES),
    st.sampled_from(["", "CID-1"]),
)
METHODS = st.one_of(st.sampled_from(sorted(METHOD_ROLES.keys() | OPEN_METHODS)), TEXTS)


@given(CERTIFICATES, TABLES, METHODS)
def test_a_call_is_allowed_by_health_or_by_a_role_that_somebody_gave(
    certificate: Certificate, table: RoleTable, method: str
) -> None:
    caller = identity_of(certificate, table)
    if may_call(method, caller) and method not in OPEN_METHODS:
        assert isinstance(caller, Identity)
        assert caller.role in METHOD_ROLES[method]
        is_given = (
            table.fingerprints.get(certificate.fingerprint),
            table.common_names.get(certificate.common_name),
        )
        uris = {parse_or_none(uri) for uri in certificate.uris}
        assert caller in (*is_given, *uris) or caller.role is Role.OZONE


def parse_or_none(uri: str) -> Identity | None:
    try:
        return parse_identity(uri.removeprefix(URI_PREFIX)) if uri.startswith(URI_PREFIX) else None
    except ValueError:
        return None


@given(CERTIFICATES, IDENTITIES, IDENTITIES)
def test_a_second_identity_takes_the_first_away(
    certificate: Certificate, one: Identity, other: Identity
) -> None:
    uris = tuple(f"{URI_PREFIX}{identity}" for identity in (one, other))
    found = identity_of(Certificate(uris, "", "", certificate.fingerprint), RoleTable())
    assert found == one if one == other else isinstance(found, NoRole)


@given(METHODS)
def test_without_a_role_there_is_health_and_nothing_else(method: str) -> None:
    assert may_call(method, NoRole("none")) is (method in OPEN_METHODS)


@given(IDENTITIES)
def test_an_identity_reads_as_it_is_written(identity: Identity) -> None:
    assert parse_identity(str(identity)) == identity


@given(IDENTITIES, st.uuids().map(str))
def test_an_agent_speaks_for_its_own_datanode(caller: Identity, datanode_id: str) -> None:
    assert not speaks_for(caller, datanode_id) or caller == Identity(Role.DATANODE, datanode_id)
    assert speaks_for(caller, caller.name) is (caller.role is Role.DATANODE)


@given(st.lists(st.tuples(st.sampled_from(["CN", "OU", "O"]), SUBJECT_PARTS), max_size=4))
def test_no_text_in_a_subject_stands_for_ozones_cluster(parts: list[tuple[str, str]]) -> None:
    """Only an organisation that is the cluster's ID does, as the authority wrote it."""
    oids = {
        "CN": NameOID.COMMON_NAME,
        "OU": NameOID.ORGANIZATIONAL_UNIT_NAME,
        "O": NameOID.ORGANIZATION_NAME,
    }
    subject = x509.Name([x509.NameAttribute(oids[key], value) for key, value in parts])
    certificate = Certificate((), "", subject.rfc4514_string(), "00" * 32)
    found = identity_of(certificate, RoleTable(ozone_cluster="CID-1"))
    values = [value for key, value in parts if key == "O"]
    assert isinstance(found, NoRole) or values == ["CID-1"]
