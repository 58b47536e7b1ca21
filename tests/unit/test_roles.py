"""From a certificate to an identity, and from a role to the methods it may call."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

import protos
from dnagent.config import AgentConfig
from replicator.verifier.config import VerifierConfig
from runtime.config import Settings, load
from runtime.errors import ConfigError
from runtime.roles import (
    METHOD_ROLES,
    OPEN_METHODS,
    Certificate,
    Identity,
    NoRole,
    Role,
    RoleTable,
    identity_of,
    may_call,
    method_refusal,
    parse_identity,
    speaks_for,
)
from scm.config import ControllerConfig
from tests.support.long_running import LONG_RUNNING

UUID = "5f0e1d2c-0000-4000-8000-0123456789ab"
FINGERPRINT = "ab" * 32
ALICE, BOB = Identity(Role.OPERATOR, "alice"), Identity(Role.OPERATOR, "bob")


# A service of Ozone that no process of ours serves.
ONLY_CALLED = {"hadoop.ozone.OzoneManagerService"}


def service_methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Path and descriptor of every method of every service that a process serves."""
    folder = Path(next(iter(protos.__path__)))
    modules = [import_module(f"protos.{path.stem}") for path in sorted(folder.glob("*_pb2.py"))]
    for module in (*modules, health_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in () if service.full_name in ONLY_CALLED else service.methods:
                yield f"/{service.full_name}/{method.name}", method


def of(
    *uris: str, common_name: str = "", subject: str = "", fingerprint: str = FINGERPRINT
) -> Certificate:
    return Certificate(uris, common_name, subject or f"CN={common_name}", fingerprint)


def test_every_method_of_every_service_has_its_roles_and_there_are_no_others() -> None:
    assert {path for path, _ in service_methods()} == METHOD_ROLES.keys() | OPEN_METHODS
    assert not METHOD_ROLES.keys() & OPEN_METHODS
    assert all(METHOD_ROLES.values())


def test_a_uri_names_a_role_and_who_has_it() -> None:
    for uri, identity in (
        (f"treefold:datanode/{UUID.upper()}", Identity(Role.DATANODE, UUID)),
        ("treefold:operator/alice", ALICE),
        ("treefold:controller/scm-1.example.org", Identity(Role.CONTROLLER, "scm-1.example.org")),
        ("treefold:verifier/photos", Identity(Role.VERIFIER, "photos")),
    ):
        assert identity_of(of("spiffe://elsewhere/x", uri), RoleTable()) == identity


@pytest.mark.parametrize(
    ("uris", "reason"),
    [
        ((), "it bears no URI of treefold:, and [roles] does not list it"),
        (("https://treefold:operator/alice",), "it bears no URI of treefold:, and [roles]"),
        (("treefold:operator/alice", "treefold:operator/bob"), "it bears 2 URIs"),
        (("treefold:root/alice",), "its URI is invalid: expected ROLE/NAME, with a role of datan"),
        (("treefold:operator/",), "its URI is invalid: expected a name of 1 to 128"),
        (("treefold:operator/a/b",), "its URI is invalid: expected a name"),
        (("treefold:operator/al ice",), "its URI is invalid: expected a name"),
        (("treefold:operator/alice\n",), "its URI is invalid: expected a name"),
        (("treefold:datanode/dn1",), "its URI is invalid: expected datanode/UUID, found 'datano"),
        (("TREEFOLD:operator/alice",), "its URI is invalid: expected ROLE/NAME"),
    ],
)
def test_a_certificate_without_one_valid_identity_has_no_role(
    uris: tuple[str, ...], reason: str
) -> None:
    found = identity_of(of(*uris), RoleTable())
    assert isinstance(found, NoRole)
    assert found.reason.startswith(reason)


def test_a_fingerprint_counts_before_a_uri_and_a_uri_before_a_common_name() -> None:
    table = RoleTable({FINGERPRINT: BOB}, {"dn1": ALICE})
    assert identity_of(of("treefold:verifier/v", common_name="dn1"), table) == BOB
    other = "cd" * 32
    assert identity_of(of("treefold:verifier/v", common_name="dn1", fingerprint=other), table) == (
        Identity(Role.VERIFIER, "v")
    )
    assert identity_of(of(common_name="dn1", fingerprint=other), table) == ALICE
    # What its authority wrote does not hold: no guess from another field.
    invalid = of("treefold:operator/", common_name="dn1", fingerprint=other)
    assert isinstance(identity_of(invalid, table), NoRole)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("CN=hdds@dn1.example.org,OU=9f-scm,O=CID-1", "hdds@dn1.example.org"),
        ("CN=hdds@dn1,OU=9f-scm,O=CID-2", None),
        ("CN=hdds@dn1,O=CID-1", None),
        ("CN=x\\,OU=9f-scm\\,O=CID-1", None),
        ("CN=hdds@dn1\\,O=CID-1,OU=a,O=CID-2", None),
        ("CN=hdds@dn1,OU=a,O=CID-1,O=CID-2", None),
        ("CN=hdds@dn1,OU=a,O=CID-2,O=CID-1", None),
        ("OU=9f-scm,O=CID-1", None),
    ],
)
def test_a_certificate_of_ozone_is_known_by_its_cluster(subject: str, name: str | None) -> None:
    found = identity_of(of(subject=subject), RoleTable(ozone_cluster="CID-1"))
    assert found == Identity(Role.OZONE, name) if name else isinstance(found, NoRole)
    assert isinstance(identity_of(of(subject=subject), RoleTable()), NoRole)


def test_a_certificate_of_ozone_is_no_more_than_the_configuration_says() -> None:
    subject = "CN=hdds@dn1,OU=9f-scm,O=CID-1"
    sly = of("treefold:operator/alice", common_name="hdds@dn1", subject=subject)
    table = RoleTable(ozone_cluster="CID-1")
    assert identity_of(sly, table) == Identity(Role.OZONE, "hdds@dn1")
    agent = Identity(Role.DATANODE, UUID)
    # An agent that has its datanode's own certificate.
    table = RoleTable(common_names={"hdds@dn1": agent}, ozone_cluster="CID-1")
    assert identity_of(sly, table) == agent


def load_roles(folder: Path, text: str) -> RoleTable:
    path = folder / "controller.toml"
    path.write_text(f'[tls]\ncert = "c"\nkey = "k"\nca = "a"\n[roles]\n{text}')
    return load(path, ControllerConfig).roles.table


def test_the_table_of_the_configuration_lists_certificates_made_elsewhere(tmp_path: Path) -> None:
    """A fingerprint as openssl prints it, or without colons."""
    colons = ":".join(["AB"] * 32)
    text = f'common_names = {{ "hdds@dn1" = "datanode/{UUID}" }}\n'
    found = load_roles(tmp_path, f'{text}fingerprints = {{ "{colons}" = "operator/alice" }}')
    assert found == RoleTable({FINGERPRINT: ALICE}, {"hdds@dn1": Identity(Role.DATANODE, UUID)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('common_names = { x = "root/x" }', "roles.common_names: x: expected ROLE/NAME, with a"),
        ('common_names = { x = "datanode/dn1" }', "roles.common_names: x: expected datanode/UUID"),
        ('common_names = { "" = "operator/x" }', "roles.common_names: expected a name"),
        ('fingerprints = { ab = "operator/x" }', "roles.fingerprints: expected the 64 hexadec"),
        (
            f'fingerprints = {{ "{FINGERPRINT}" = "operator/x",'
            f' "{FINGERPRINT.upper()}" = "operator/x" }}',
            "roles.fingerprints: one certificate is listed twice",
        ),
        ("common_names = { x = 1 }", "roles.common_names.x: "),
        ('names = { x = "operator/x" }', "roles.names: unknown key"),
    ],
)
def test_an_invalid_table_is_refused_by_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_roles(tmp_path, text)
    assert says in refused.value.message


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_every_process_that_serves_has_roles(command: str) -> None:
    assert {"tls", "roles", "insecure"} <= LONG_RUNNING[command].settings.model_fields.keys()


@pytest.mark.parametrize(
    ("model", "required"),
    [
        (ControllerConfig, ""),
        (VerifierConfig, 'bucket = "local:/b"\n'),
        (AgentConfig, 'state_folder = "/s"\nvolumes = [{ path = "/v" }]\n'),
    ],
)
def test_roles_without_tls_are_refused(
    tmp_path: Path, model: type[Settings], required: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'{required}[roles]\ncommon_names = {{ x = "operator/x" }}')
    with pytest.raises(ConfigError, match=r"roles: without \[tls\] no caller has a certificate"):
        load(path, model)


def test_only_the_agent_of_a_datanode_speaks_for_it() -> None:
    assert not speaks_for(Identity(Role.DATANODE, UUID), UUID.upper())
    for other in (Identity(Role.DATANODE, "0" + UUID[1:]), Identity(Role.CONTROLLER, UUID)):
        assert not speaks_for(other, UUID)


def test_a_method_without_a_rule_is_nobodys() -> None:
    assert not may_call("/new.Service/Method", ALICE)
    text = method_refusal("/new.Service/Method", ALICE, of(common_name="alice"))
    assert text.startswith("no role may call Method; the certificate CN=alice (SHA-256 abababab")
    assert text.endswith("...) has the role operator/alice")


def test_an_identity_reads_as_it_is_written() -> None:
    assert str(parse_identity("operator/alice")) == "operator/alice"
    with pytest.raises(ValueError, match="expected ROLE/NAME"):
        parse_identity("alice")
