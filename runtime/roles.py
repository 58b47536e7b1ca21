"""Who may call what: from a caller's certificate to its role, from the role to methods.

Whoever holds a certificate of the cluster's authority gets a connection, and may ask
for health. What else it may call depends on the one identity that its certificate
bears: a URI such as `treefold:operator/alice` among its alternative names, or an entry
of the configuration for certificates that were made elsewhere. `METHOD_ROLES` has every
method of every service; what is not in it, nobody may call.

All of this is pure. `runtime.access` reads certificates of calls, and refuses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# Before an identity in a URI among the alternative names of a certificate.
URI_PREFIX = "treefold:"
# No name has a slash, a space or a control character: names are printed and logged.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# An attribute of a subject as RFC 2253 writes it, where a comma in a value is escaped.
_ATTRIBUTE = re.compile(r"([A-Za-z0-9.-]+)=((?:\\.|[^,+\\])*)(?:[,+]|$)")
# Characters of a certificate's text in a message; an authority may sign longer ones.
_SHOWN_MAX = 80


class Role(StrEnum):
    """What the bearer of a certificate is in the cluster."""

    # An agent: speaks for its datanode, and reads from other agents for repairs.
    DATANODE = "datanode"
    CONTROLLER = "controller"
    # A person, or a job that runs for one.
    OPERATOR = "operator"
    VERIFIER = "verifier"
    # A process that replicates buckets, and the one that tells it which.
    SYNCER = "syncer"
    REPLICATION_MASTER = "replication-master"
    # A service of Ozone itself, which reads at Ozone's own port.
    OZONE = "ozone"


@dataclass(frozen=True, slots=True)
class Identity:
    """A role and who has it; a datanode's name is its UUID."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role.value}/{self.name}"


@dataclass(frozen=True, slots=True)
class NoRole:
    """A certificate without a role, and why it has none."""

    reason: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a caller's certificate says; TLS has verified its authority and dates.

    `subject` is as RFC 2253 writes it, `fingerprint` the SHA-256 of the certificate in
    hexadecimal digits.
    """

    uris: tuple[str, ...]
    common_name: str
    subject: str
    fingerprint: str

    def __str__(self) -> str:
        subject = self.subject[:_SHOWN_MAX]
        return f"{subject or 'without a subject'} (SHA-256 {self.fingerprint[:16]}...)"


@dataclass(frozen=True, slots=True)
class RoleTable:
    """The configuration's identities of certificates that bear none themselves.

    With `ozone_cluster`, the ID of an Ozone cluster, certificates that Ozone's
    authority made for that cluster have the role `ozone`.
    """

    fingerprints: Mapping[str, Identity] = field(default_factory=dict)
    common_names: Mapping[str, Identity] = field(default_factory=dict)
    ozone_cluster: str = ""


_AGENT = "/treefold.agent.v1.Agent/"
_CONTROLLER = "/treefold.controller.v1.Controller/"
_VERIFIER = "/treefold.verifier.v1.Verifier/"
_MASTER = "/treefold.replication.v1.ReplicationMaster/"
_HEALTH = "/grpc.health.v1.Health/"
_OPERATOR = frozenset({Role.OPERATOR})
_DATANODE = frozenset({Role.DATANODE})
_SERVERS = frozenset({Role.OPERATOR, Role.CONTROLLER})
# A controller shows trees on its page.
_TREE_READERS = frozenset({Role.OPERATOR, Role.DATANODE, Role.CONTROLLER})
_SYNCER = frozenset({Role.SYNCER})
_BUCKET_READERS = frozenset({Role.OPERATOR, Role.VERIFIER, Role.SYNCER})
_BUCKET_WRITERS = frozenset({Role.OPERATOR, Role.SYNCER})

# The roles that may call each method.
METHOD_ROLES: Mapping[str, frozenset[Role]] = {
    _AGENT + "GetContainerHashes": _TREE_READERS,
    _AGENT + "GetContainerHashPages": _TREE_READERS,
    # Names and bytes of users' objects: for repairs only.
    _AGENT + "GetBlockRecords": _DATANODE,
    _AGENT + "ReadWindows": _DATANODE,
    _AGENT + "ScanContainer": _SERVERS,
    _AGENT + "GetStatus": _SERVERS,
    _AGENT + "PlanRepair": _OPERATOR,
    _AGENT + "UndoJob": _OPERATOR,
    # It has no requests but reads.
    "/hadoop.hdds.datanode.XceiverClientProtocolService/send": frozenset(
        {Role.DATANODE, Role.OZONE}
    ),
    _CONTROLLER + "Heartbeat": _DATANODE,
    _CONTROLLER + "ListContainers": _OPERATOR,
    _CONTROLLER + "GetContainers": _OPERATOR,
    _CONTROLLER + "Reconcile": _OPERATOR,
    _CONTROLLER + "ListJobs": _OPERATOR,
    _CONTROLLER + "GetJob": _OPERATOR,
    _CONTROLLER + "CancelJob": _OPERATOR,
    _CONTROLLER + "PauseJob": _OPERATOR,
    _CONTROLLER + "ResumeJob": _OPERATOR,
    _CONTROLLER + "ThrottleJob": _OPERATOR,
    _CONTROLLER + "GetStatus": _OPERATOR,
    _CONTROLLER + "ListDatanodes": _OPERATOR,
    _CONTROLLER + "Scan": _OPERATOR,
    # The answer has the secret of the profile, without which nothing can be compared.
    _VERIFIER + "Describe": _BUCKET_READERS,
    _VERIFIER + "Prove": _BUCKET_READERS,
    _VERIFIER + "Refresh": _BUCKET_READERS,
    _VERIFIER + "GetFacts": _BUCKET_READERS,
    _VERIFIER + "WriteBatches": _BUCKET_WRITERS,
    _VERIFIER + "DeleteItems": _BUCKET_WRITERS,
    _VERIFIER + "PatchObject": _BUCKET_WRITERS,
    _VERIFIER + "BeginRun": _BUCKET_WRITERS,
    _VERIFIER + "WriteKeys": _BUCKET_WRITERS,
    _MASTER + "Register": _SYNCER,
    _MASTER + "Heartbeat": _SYNCER,
    _MASTER + "SaveReport": _SYNCER,
    _MASTER + "Release": _SYNCER,
    _MASTER + "AddPolicy": _OPERATOR,
    _MASTER + "DeletePolicy": _OPERATOR,
    _MASTER + "SetDesiredState": _OPERATOR,
    _MASTER + "SetOptions": _OPERATOR,
    _MASTER + "SetPrefixes": _OPERATOR,
    _MASTER + "SetEnabled": _OPERATOR,
    _MASTER + "ListReplications": _OPERATOR,
    _MASTER + "GetReplication": _OPERATOR,
    _MASTER + "GetStatus": _OPERATOR,
    _MASTER + "Failover": _OPERATOR,
    _MASTER + "EndFailover": _OPERATOR,
}
# Whoever has a certificate may call these, also without a role.
OPEN_METHODS = frozenset({_HEALTH + "Check", _HEALTH + "List", _HEALTH + "Watch"})


def parse_identity(text: str) -> Identity:
    """The identity that `ROLE/NAME` names.

    Raises:
        ValueError: there is no such role, or the name is invalid; a datanode's must be
            its UUID.
    """
    role_name, _, name = text.partition("/")
    shown = text[:_SHOWN_MAX]
    known = ", ".join(role.value for role in Role)
    try:
        role = Role(role_name)
    except ValueError:
        raise ValueError(f"expected ROLE/NAME, with a role of {known}, found {shown!r}") from None
    if role is Role.DATANODE:
        name = name.lower()
        if not _UUID.fullmatch(name):
            raise ValueError(f"expected datanode/UUID, found {shown!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected a name of 1 to 128 letters, digits, '.', '_', '@' or '-', found {shown!r}"
        )
    return Identity(role, name)


def identity_of(certificate: Certificate, table: RoleTable) -> Identity | NoRole:
    """Whose certificate this is.

    An entry by fingerprint comes first, since it can mean no other certificate. Then
    the certificate's own URI counts; an entry by common name is for those without.
    URIs of Ozone's certificates do not count: its services ask for their own names.
    """
    if known := table.fingerprints.get(certificate.fingerprint):
        return known
    ozone_name = _ozone_name(certificate.subject, table.ozone_cluster)
    # In any case of letters: a name that is nearly ours must not be passed over.
    uris = {uri for uri in certificate.uris if uri.lower().startswith(URI_PREFIX)}
    if ozone_name:
        uris = set()
    if len(uris) > 1:
        return NoRole(f"it bears {len(uris)} URIs of {URI_PREFIX} and may bear one")
    for uri in uris:
        try:
            return parse_identity(uri.removeprefix(URI_PREFIX))
        except ValueError as error:
            return NoRole(f"its URI is invalid: {error}")
    if known := table.common_names.get(certificate.common_name):
        return known
    if ozone_name:
        return Identity(Role.OZONE, ozone_name)
    return NoRole(f"it bears no URI of {URI_PREFIX}, and [roles] does not list it")


def bears(bearer: Identity | NoRole, wanted: Role | Identity) -> bool:
    """Whether the bearer of a certificate is who is wanted: anyone of a role, or one
    identity.
    """
    if isinstance(bearer, NoRole):
        return False
    return bearer.role is wanted if isinstance(wanted, Role) else bearer == wanted


def role_fault(certificate: Certificate, bearer: Identity | NoRole, wanted: Role | Identity) -> str:
    """Why the bearer of a certificate is not who is wanted, as a sentence."""
    role = wanted.value if isinstance(wanted, Role) else str(wanted)
    return f"the role {role} is needed; {_description(bearer, certificate)}"


def may_call(
    method: str,
    caller: Identity | NoRole,
    methods: Mapping[str, frozenset[Role]] = METHOD_ROLES,
) -> bool:
    """Whether the caller may call this method, `/SERVICE/METHOD`."""
    if method in OPEN_METHODS:
        return True
    return isinstance(caller, Identity) and caller.role in methods.get(method, frozenset())


def speaks_for(caller: Identity | NoRole, datanode_id: str) -> bool:
    """Whether the caller is the agent of this datanode, as Ozone writes its ID: in
    another case it would be another datanode, and one agent many.
    """
    return caller == Identity(Role.DATANODE, datanode_id)


def method_refusal(
    method: str,
    caller: Identity | NoRole,
    certificate: Certificate,
    methods: Mapping[str, frozenset[Role]] = METHOD_ROLES,
) -> str:
    """Why the caller may not call this method, as a sentence: which role is needed, and
    which certificate came.
    """
    needed = " or ".join(sorted(role.value for role in methods.get(method, ())))
    name = method.rpartition("/")[2]
    wanted = f"{name} needs the role {needed}" if needed else f"no role may call {name}"
    return f"{wanted}; {_description(caller, certificate)}"


def datanode_refusal(datanode_id: str, caller: Identity | NoRole, certificate: Certificate) -> str:
    """Why the caller may not speak for this datanode, as `method_refusal`."""
    shown = datanode_id if _NAME.fullmatch(datanode_id) else "with an invalid ID"
    wanted = f"to speak for datanode {shown} needs the role datanode/{shown}"
    return f"{wanted}; {_description(caller, certificate)}"


def _description(caller: Identity | NoRole, certificate: Certificate) -> str:
    if isinstance(caller, Identity):
        return f"the certificate {certificate} has the role {caller}"
    return f"the certificate {certificate} has no role: {caller.reason}"


def _ozone_name(subject: str, cluster: str) -> str:
    """The common name of a certificate that Ozone's authority made for a service of
    this cluster; empty if it is another's, or `cluster` is empty. Ozone writes the
    cluster's ID as the organisation and that of the SCM as its unit.
    """
    found: list[tuple[str, str]] = _ATTRIBUTE.findall(subject)
    values = dict(found)
    is_ozones = values.get("O") == cluster and "OU" in values and len(found) == len(values)
    name = values.get("CN", "")
    return name if cluster and is_ozones and _NAME.fullmatch(name) else ""
