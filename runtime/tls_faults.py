"""Why a connection by mutual TLS fails, in words.

gRPC says of each such failure that the peer is unavailable. A second handshake, with
Python's `ssl`, tells them apart. The checks of files need no peer.
"""

import socket
import ssl
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from runtime.config import split_address
from runtime.errors import ConfigError
from runtime.rpc import Tls

_HANDSHAKE_S = 5.0
# A server that refuses our certificate says so after its side of the handshake.
_ANSWER_S = 2.0


def connection_fault(address: str, tls: Tls | None) -> str:
    """What is wrong between us and the process at `host:port`, as a sentence without a
    full stop; empty if nobody listens there, or nothing is wrong with TLS.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), _HANDSHAKE_S) as connection:
            return _plain_fault(connection) if tls is None else _tls_fault(connection, host, tls)
    except (OSError, ConfigError):
        return ""


def check_files(tls: Tls, now_s: float | None = None) -> None:
    """Check that the files can serve: readable, the key that of the certificate, and
    the certificate valid now.

    Raises:
        ConfigError: they cannot; the message has the file and what is wrong with it.
    """
    cert = _certificate(tls.cert)
    _certificate(tls.ca)
    try:
        key = load_pem_private_key(_read(tls.key), None)
    except (ValueError, TypeError) as error:
        raise _bad(tls.key, f"is not a private key without a password: {error}") from error
    encoding = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*encoding) != cert.public_key().public_bytes(*encoding):
        raise _bad(tls.key, f"is not the key of {tls.cert}")
    now_s = time.time() if now_s is None else now_s
    if cert.not_valid_after_utc.timestamp() < now_s:
        raise _bad(tls.cert, f"has expired on {cert.not_valid_after_utc:%Y-%m-%d}")
    if cert.not_valid_before_utc.timestamp() > now_s:
        raise _bad(tls.cert, f"is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on")


def _plain_fault(connection: socket.socket) -> str:
    """We have no TLS: does the peer?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except (ssl.SSLError, OSError) as error:
        # An alert is an answer by TLS.
        if "ALERT" not in str(error).upper():
            return ""
    return "it wants TLS, and no certificate was given"


def _tls_fault(connection: socket.socket, host: str, tls: Tls) -> str:
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    try:
        wrapped = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate does not hold by {tls.ca}: {error.verify_message}"
    except ssl.SSLError as error:
        return _refusal(error, tls) or "it does not speak TLS"
    except OSError:
        return "it does not speak TLS"
    try:
        wrapped.settimeout(_ANSWER_S)
        # A server of HTTP/2 speaks first. Nothing is sent to it: if it has closed the
        # connection, its reset would take the alert away.
        answer = wrapped.recv(1)
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return _refusal(error, tls)
    except OSError:
        answer = b""
    finally:
        wrapped.close()
    return "" if answer else f"it ends the connection once it has our certificate {tls.cert}"


def _refusal(error: ssl.SSLError, tls: Tls) -> str:
    alert = _alert(error)
    return f"it refuses our certificate {tls.cert}: {alert}" if alert else ""


def _alert(error: ssl.SSLError) -> str:
    """The alert that the peer sent, for people; empty if it sent none."""
    reason = error.reason or ""
    return reason.partition("ALERT_")[2].lower().replace("_", " ") if "ALERT_" in reason else ""


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise _bad(path, f"is not a certificate: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error


def _bad(path: Path, text: str) -> ConfigError:
    return ConfigError(f"{path}: {text}", path=str(path))
