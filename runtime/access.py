"""Who may call the methods of one server, by the certificate of each call.

Without TLS there are no certificates, and so no roles: whoever reaches the port may
call everything, as `Access.is_enforced` says. With TLS the interceptor of
`runtime.rpc` asks here before each call, and before it reads the request. Only whose
datanode a message speaks for is asked by the service, which knows the message.
"""

import hashlib
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import grpc

from merkle.errors import ReconcileError
from runtime.errors import AccessDeniedError, ConfigError, PeerRefusedError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, ProcessMetrics
from runtime.roles import (
    METHOD_ROLES,
    URI_PREFIX,
    Certificate,
    Identity,
    NoRole,
    Role,
    RoleTable,
    datanode_refusal,
    identity_of,
    may_call,
    method_refusal,
)
from runtime.roles import speaks_for as is_agent_of

# Refusals of one certificate and method are told apart for so long.
_WINDOW_S = 60.0
# Certificates and methods whose refusals are counted, and certificates that were read;
# beyond, the oldest are forgotten.
_COUNTED_MAX = 1_024
_HINT = (
    f"Use a certificate with the URI {URI_PREFIX}ROLE/NAME among its alternative names, or list"
    " this one in [roles] of the server's configuration."
)
_log = get_logger("access")


class RefusalSink(Protocol):
    """Records a call that was refused."""

    def __call__(self, *, who: str, what: str, why: str) -> None:
        """`who` is the identity of the certificate, or its SHA-256, `what` the method.

        Raises:
            ReconcileError: it is not on record; the call is refused all the same.
        """


class RefusalCounts:
    """Counts refusals, and says which ones are logged: the 1st, 2nd, 4th, 8th and so
    on within a minute. A client that asks for ever must not fill a disk. Not
    thread-safe.
    """

    def __init__(self) -> None:
        # When the minute began, and the refusals in it.
        self._counts: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def note(self, fingerprint: str, method: str, now_s: float) -> int | None:
        """Count a refusal; returns how many there were if this one is logged."""
        key = fingerprint, method
        begun_s, count = self._counts.get(key, (now_s, 0))
        if now_s - begun_s >= _WINDOW_S:
            begun_s, count = now_s, 0
        count += 1
        self._counts[key] = begun_s, count
        if len(self._counts) > _COUNTED_MAX:
            self._counts.popitem(last=False)
        return count if count & (count - 1) == 0 else None


class CallRefusedError(AccessDeniedError):
    """We refuse a call. One that another process refused us is its base class."""


class Access:
    """Who may call what on one server. Thread-safe."""

    def __init__(
        self,
        table: RoleTable,
        *,
        is_enforced: bool,
        on_refusal: RefusalSink | None = None,
        metrics: Metrics | None = None,
        names: ProcessMetrics | None = None,
        methods: Mapping[str, frozenset[Role]] = METHOD_ROLES,
    ) -> None:
        """`is_enforced` is whether the server has TLS. `on_refusal` records a refusal;
        the log has it in any case. `names` has the metric that counts refusals, with
        the label `role`, that of the caller or "none".
        """
        self.is_enforced = is_enforced
        self._table = table
        self._on_refusal = on_refusal
        self._methods = methods
        self._metrics = metrics
        self._names = names
        # From 0 on, so that an increase shows from the first refusal.
        for role in ("none", *Role):
            self._count(role, 0)
        self._counts = RefusalCounts()
        self._lock = threading.Lock()

    def guard(self, thread: str) -> ThreadGuard:
        """Names the errors of a thread of the server, and counts them where refusals
        are counted.
        """
        if self._metrics is None or self._names is None:
            return ThreadGuard(thread)
        return ThreadGuard(thread, self._metrics, self._names.thread_failures)

    @contextmanager
    def admitted(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Handle a call of `/SERVICE/METHOD` inside.

        Raises:
            CallRefusedError: the caller may not call it, or the service found that it
                may not send this message. The refusal is on record.
            PeerRefusedError: another process refused ours, which acted for the caller.
        """
        try:
            if self.is_enforced:
                self._check_method(method, context)
            yield
        except CallRefusedError as error:
            self._report(method, context, error)
            raise
        except AccessDeniedError as error:
            raise PeerRefusedError(
                f"another process refused this one: {error.message}",
                hint=error.hint,
                result=error.code,
            ) from error

    def check_datanode(self, context: grpc.ServicerContext, datanode_id: str) -> None:
        """Check that the caller is the agent of the datanode that its message is of.

        Raises:
            CallRefusedError: it is another's.
        """
        if not self.is_enforced:
            return
        certificate = _certificate_of(context)
        caller = identity_of(certificate, self._table)
        if not is_agent_of(caller, datanode_id):
            raise CallRefusedError(datanode_refusal(datanode_id, caller, certificate), hint=_HINT)

    def requester(self, context: grpc.ServicerContext, claimed: str) -> str:
        """Who calls, for records: as the certificate says, or without TLS as the client
        does, marked as unproven.
        """
        if not self.is_enforced:
            return f"{claimed} (unproven)" if claimed else ""
        caller = identity_of(_certificate_of(context), self._table)
        assert isinstance(caller, Identity)
        return str(caller)

    def _check_method(self, method: str, context: grpc.ServicerContext) -> None:
        certificate = _certificate_of(context)
        caller = identity_of(certificate, self._table)
        if not may_call(method, caller, self._methods):
            text = method_refusal(method, caller, certificate, self._methods)
            raise CallRefusedError(text, hint=_HINT)

    def _count(self, role: str, amount: float) -> None:
        if self._metrics is not None and self._names is not None:
            self._metrics.count(self._names.calls_refused, amount, role=role)

    def _report(self, method: str, context: grpc.ServicerContext, error: CallRefusedError) -> None:
        certificate = _certificate_of(context)
        caller = identity_of(certificate, self._table)
        name = "" if isinstance(caller, NoRole) else str(caller)
        what = method.lstrip("/")
        self._count("none" if isinstance(caller, NoRole) else caller.role, 1)
        with self._lock:
            count = self._counts.note(certificate.fingerprint, method, time.monotonic())
        if count is not None:
            _log.warning(
                "call_refused",
                method=what,
                caller=name,
                certificate=str(certificate),
                peer=str(context.peer()),
                reason=error.message,
                count=count,
            )
        if self._on_refusal is None:
            return
        try:
            who = name or f"certificate {certificate.fingerprint}"
            self._on_refusal(who=who, what=what, why=error.message)
        except ReconcileError as failure:
            # The call stays refused, whatever becomes of the record.
            _log.error("refusal_unrecorded", **error_fields(failure))


def _certificate_of(context: grpc.ServicerContext) -> Certificate:
    # The stubs have one value, where there are several.
    values: Iterable[object] = context.auth_context().get("x509_pem_cert", ())
    pem = next((value for value in values if isinstance(value, bytes)), b"")
    return _described(pem)


@lru_cache(maxsize=_COUNTED_MAX)
def _described(pem: bytes) -> Certificate:
    """What a certificate says. Not by gRPC's own properties of it: these end at a NUL,
    so that another name would be taken for the one before it.
    """
    fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode()) if pem else b"")
    nameless = Certificate((), "", "", fingerprint.hexdigest())
    if not pem:
        return nameless
    # Imported here: cryptography takes time, and without TLS nobody needs it.
    from runtime.certificates import described

    try:
        return described(pem)
    except ConfigError:
        return nameless
