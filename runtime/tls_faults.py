"""Why a connection by mutual TLS fails, in words.

gRPC says of each such failure that the peer is unavailable. A second handshake, with
Python's `ssl`, tells them apart.
"""

import socket
import ssl
import time

from merkle.errors import ReconcileError
from runtime.certificates import check_pair, is_signed, validity_fault
from runtime.errors import ConfigError
from runtime.setting_values import split_address
from runtime.tls_files import FAULT, Tls, TlsBytes, read_files

_HANDSHAKE_S = 3.0
# A server that refuses our certificate says so after its side of the handshake.
_ANSWER_S = 2.0
_HINT = (
    "Both sides need cert, key and ca of one cluster in [tls] of their settings; commands have"
    " client.toml and the --tls options."
)


def named_fault(error: ReconcileError, address: str, tls: Tls | None) -> ReconcileError:
    """The error with the fact `tls_fault`, and with it in its message, if gRPC did not
    reach `host:port` and TLS is why; else the error itself.
    """
    if error.facts.get("status") != "UNAVAILABLE":
        return error
    fault = connection_fault(address, tls)
    if not fault:
        return error
    named = type(error)(f"there is no connection with {address}: {fault}", hint=_HINT)
    named.facts = {**error.facts, FAULT: fault, "detail": error.message}
    return named


def connection_fault(address: str, tls: Tls | None) -> str:
    """What is wrong between us and the process at `host:port`, as a sentence without a
    full stop; empty if nobody listens there, or nothing is wrong with TLS.
    """
    try:
        host, port = split_address(address)
    # A socket of this machine has no TLS.
    except ConfigError:
        return ""
    try:
        with socket.create_connection((host, port), _HANDSHAKE_S) as connection:
            return _plain_fault(connection) if tls is None else _tls_fault(connection, host, tls)
    except ConfigError as error:
        return error.message
    # ValueError: what is no name of a host.
    except (OSError, ValueError):
        return ""


def _plain_fault(connection: socket.socket) -> str:
    """We have no TLS: does the peer?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except OSError as error:
        # An alert is an answer by TLS.
        if "ALERT" not in str(error).upper():
            return ""
    return "it wants TLS, and no certificate was given"


def _tls_fault(connection: socket.socket, host: str, tls: Tls) -> str:
    found = read_files(tls)
    check_pair(found)
    if fault := validity_fault(found, time.time()):
        return f"our certificate {fault}"
    context = ssl.create_default_context(cadata=found.ca.decode("ascii", "ignore"))
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    try:
        wrapped = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate does not hold by {tls.ca}: {error.verify_message}"
    except ssl.SSLError as error:
        return _refusal(found, _alert(error)) if _alert(error) else "it does not speak TLS"
    except TimeoutError:
        return ""
    with wrapped:
        return _answer_fault(wrapped, found)


def _answer_fault(wrapped: ssl.SSLSocket, found: TlsBytes) -> str:
    """Whether the peer goes on once it has seen our certificate."""
    wrapped.settimeout(_ANSWER_S)
    try:
        # A server of HTTP/2 speaks first. Nothing is sent to it: if it has closed the
        # connection, its reset would take an alert away.
        if wrapped.recv(1):
            return ""
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return _refusal(found, _alert(error))
    except OSError:
        pass
    # gRPC sends no alert.
    return _refusal(found, "")


def _refusal(found: TlsBytes, alert: str) -> str:
    own = str(found.files.cert)
    if not is_signed(found):
        own += f", which is not signed by {found.files.ca}"
    return f"it refuses our certificate {own}" + (f": {alert}" if alert else "")


def _alert(error: ssl.SSLError) -> str:
    """The alert that the peer sent, for people; empty if it sent none."""
    reason = error.reason or ""
    return reason.partition("ALERT_")[2].lower().replace("_", " ") if "ALERT_" in reason else ""
