"""A client of Hadoop's RPC as Ozone's servers speak it: IPC version 9, without SASL.

A connection begins with a preamble and a frame that names the protocol. Each call and
each response is a frame: a length of four bytes, then messages that each begin with
their own length. Calls are pipelined. The server may answer in any order, so each
response names its call.

A server closes idle connections, and a response may never come. So a connection lives
until its first error, the next call opens another one, and all calls of one
`call_all` end within one deadline, however slowly the bytes arrive.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError, Message

from merkle.errors import ReconcileError
from merkle.limits import MESSAGE_BYTES_MAX
from ozone.errors import SecuredClusterError
from ozone.site import SECURED_HINT
from protos.hadoop_rpc_pb2 import (
    RPC_PROTOCOL_BUFFER,
    IpcConnectionContextProto,
    RequestHeaderProto,
    RpcRequestHeaderProto,
    RpcResponseHeaderProto,
    UserInformationProto,
)
from runtime.errors import (
    AccessDeniedError,
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from runtime.rpc import printable
from runtime.setting_values import split_address

# IPC version, service class, and no SASL.
_PREAMBLE = b"hrpc" + bytes([9, 0, 0])
_CONNECTION_CALL_ID = -3
# Calls in flight: a hundred of them are answered in 11 ms, and their requests of some
# 200 bytes fit any socket buffer, so that neither side waits to send.
_DEPTH = 64
# Of all responses to one `call_all`.
_RESPONSES_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
_READ_BYTES = 256 << 10
_CONNECT_S = 5.0
_FATAL = RpcResponseHeaderProto.FATAL
_SUCCESS = RpcResponseHeaderProto.SUCCESS
_CALL_HINT = "The cluster's release may differ from the supported one, Apache Ozone 2.2."

# What one call of several led to: its response, or the server's refusal.
Answer = bytes | PeerRefusedError | AccessDeniedError


class HadoopRpcClient:
    """A client of one protocol of one server. Thread-safe; calls of several threads
    follow each other.

    Calls must be safe to repeat: where the server had closed an idle connection, they
    are sent a second time.
    """

    def __init__(
        self, address: str, protocol: str, *, user: str = "treefold", deadline_s: float = 30.0
    ) -> None:
        """Connects on first use. `protocol` is the name of a Java interface, and
        `deadline_s` limits one `call_all`.

        Raises:
            ConfigError: the address is not host:port.
        """
        self.address = address
        self._host, self._port = split_address(address)
        self._protocol, self._user, self._deadline_s = protocol, user, deadline_s
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def call(self, request: Message, *, deadline_s: float = math.inf) -> bytes:
        """The response to one call, unparsed. `deadline_s` can only shorten the
        client's own deadline.

        Raises:
            PeerRefusedError: the server answered with an exception; the fact `result`
                is the exception's class without its package.
            AccessDeniedError: the cluster checks permissions, and this user has none.
            Otherwise as `call_all`.
        """
        [answer] = self.call_all([request], deadline_s=deadline_s)
        if isinstance(answer, ReconcileError):
            raise answer
        return answer

    def call_all(
        self, requests: Sequence[Message], *, deadline_s: float = math.inf
    ) -> list[Answer]:
        """The responses, unparsed, or the refusal of each call, in the order of the
        requests. `deadline_s` can only shorten the client's own deadline.

        Raises:
            PeerUnavailableError: the server cannot be reached, closed the connection,
                or did not answer all of it within the deadline.
            RemoteProtocolError: the server sent something else than Hadoop RPC, or
                more than its limits.
            SecuredClusterError: the server wants SASL.
            PeerRefusedError: the server refused the connection as a whole.
        """
        until_s = time.monotonic() + min(deadline_s, self._deadline_s)
        with self._lock:
            reused = self._connection
            if reused is not None:
                try:
                    return self._exchange(reused, requests, until_s)
                except PeerUnavailableError:
                    # The usual cause is a connection that the server closed as idle.
                    # Once a response came, it was not.
                    if reused.has_answered or time.monotonic() >= until_s:
                        raise
            return self._exchange(self._connect(until_s), requests, until_s)

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        with self._lock:
            self._disconnect()

    def _connect(self, deadline_s: float) -> "_Connection":
        wait_s = min(_CONNECT_S, max(0.001, deadline_s - time.monotonic()))
        try:
            found = socket.create_connection((self._host, self._port), wait_s)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise PeerUnavailableError(
                f"{self.address}: cannot connect: {error.strerror or error}"
            ) from error
        self._connection = _Connection(found, self.address, self._protocol)
        context = IpcConnectionContextProto(
            userInfo=UserInformationProto(effectiveUser=self._user), protocol=self._protocol
        )
        self._connection.open(context, deadline_s)
        return self._connection

    def _exchange(
        self, connection: "_Connection", requests: Sequence[Message], deadline_s: float
    ) -> list[Answer]:
        try:
            return connection.call_all(requests, deadline_s)
        except BaseException:
            # Responses of this exchange may still come: no later call may read them.
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection:
    """One connection, from its preamble to its first error."""

    def __init__(self, found: socket.socket, address: str, protocol: str) -> None:
        self._socket, self._address, self._protocol = found, address, protocol
        self._client_id = os.urandom(16)
        self._next_id = 0
        self._buffer = bytearray()
        # In the exchange that runs, or the last one.
        self.has_answered = False

    def open(self, context: IpcConnectionContextProto, deadline_s: float) -> None:
        """Send the preamble and the context, to which no response comes."""
        self._write(_PREAMBLE + _frame(self._header(_CONNECTION_CALL_ID), context), deadline_s)

    def call_all(self, requests: Sequence[Message], deadline_s: float) -> list[Answer]:
        """See HadoopRpcClient.call_all."""
        answers: dict[int, Answer] = {}
        first, sent, budget = self._next_id, 0, _RESPONSES_BYTES_MAX
        self.has_answered = False
        while len(answers) < len(requests):
            batch = requests[sent : len(answers) + _DEPTH]
            if batch:
                self._write(b"".join(map(self._call, batch)), deadline_s)
                sent += len(batch)
            frame = self._read_frame(min(budget, MESSAGE_BYTES_MAX), deadline_s)
            budget -= len(frame)
            header, body = self._parse(frame)
            if header.status == _FATAL:
                raise self._fatal(header)
            # A response of another connection's call, or a second one to the same.
            if not first <= header.callId < first + sent or header.callId in answers:
                raise self._protocol_error(f"answered call {header.callId}, which does not wait")
            self.has_answered = True
            answers[header.callId] = body if header.status == _SUCCESS else self._refusal(header)
        return [answers[first + index] for index in range(len(requests))]

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._socket.close()

    def _call(self, request: Message) -> bytes:
        # The server's IDs are of 31 bits; no connection makes so many calls.
        header, self._next_id = self._header(self._next_id), self._next_id + 1
        method = RequestHeaderProto(
            methodName="submitRequest",
            declaringClassProtocolName=self._protocol,
            clientProtocolVersion=1,
        )
        return _frame(header, method, request)

    def _header(self, call_id: int) -> RpcRequestHeaderProto:
        return RpcRequestHeaderProto(
            rpcKind=RPC_PROTOCOL_BUFFER,
            rpcOp=RpcRequestHeaderProto.RPC_FINAL_PACKET,
            callId=call_id,
            clientId=self._client_id,
            retryCount=-1 if call_id < 0 else 0,
        )

    def _write(self, raw: bytes, deadline_s: float) -> None:
        try:
            self._socket.settimeout(self._left_s(deadline_s))
            self._socket.sendall(raw)
        except OSError as error:
            raise self._unavailable(error) from error

    def _read_frame(self, length_bytes_max: int, deadline_s: float) -> bytes:
        self._fill(4, deadline_s)
        length = int.from_bytes(self._buffer[:4], "big", signed=True)
        if not 0 < length <= length_bytes_max:
            raise self._protocol_error(
                "speaks another protocol than Hadoop RPC"
                if self._is_foreign()
                else f"announced {length} bytes, where at most {length_bytes_max} are expected"
            )
        self._fill(4 + length, deadline_s)
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def _fill(self, length_bytes: int, deadline_s: float) -> None:
        """Read until the buffer has that many bytes. It grows with what arrives, not
        with what was announced.
        """
        while len(self._buffer) < length_bytes:
            try:
                self._socket.settimeout(self._left_s(deadline_s))
                part = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise self._unavailable(error) from error
            if not part:
                raise PeerUnavailableError(f"{self._address} closed the connection")
            self._buffer += part

    def _is_foreign(self) -> bool:
        # The first bytes of an HTTP server, and of one with TLS.
        return bytes(self._buffer[:4]).startswith((b"HTTP", b"\x15\x03", b"\x16\x03"))

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("deadline exceeded")
        return left_s

    def _parse(self, frame: bytes) -> tuple[RpcResponseHeaderProto, bytes]:
        parts = _delimited(frame)
        try:
            header = RpcResponseHeaderProto.FromString(next(parts))
            if not header.IsInitialized():
                raise ValueError("the header lacks a field")
            return header, next(parts) if header.status == _SUCCESS else b""
        except (DecodeError, StopIteration, ValueError) as error:
            raise self._protocol_error("sent an invalid response") from error

    def _refusal(self, header: RpcResponseHeaderProto) -> PeerRefusedError | AccessDeniedError:
        java_class = printable(header.exceptionClassName)
        name = java_class.rpartition(".")[2] or "error"
        # The first line; a stack trace follows.
        reason = printable(header.errorMsg.partition("\n")[0]).removeprefix(f"{java_class}: ")
        text = f"{self._address}: {name}: {reason}"
        if name == "AccessControlException":
            return AccessDeniedError(text)
        hint = _OF_CONNECTIONS.get(name, "")
        return PeerRefusedError(text, hint=hint, result=name, java_class=java_class)

    def _fatal(self, header: RpcResponseHeaderProto) -> ReconcileError:
        refusal = self._refusal(header)
        if (
            isinstance(refusal, AccessDeniedError)
            or header.errorDetail == RpcResponseHeaderProto.FATAL_UNAUTHORIZED
        ):
            return SecuredClusterError(refusal.message, hint=SECURED_HINT)
        return refusal

    def _unavailable(self, error: OSError) -> PeerUnavailableError:
        if isinstance(error, TimeoutError):
            return PeerUnavailableError(f"{self._address} did not answer in time")
        return PeerUnavailableError(f"{self._address}: {error.strerror or error}")

    def _protocol_error(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"{self._address} {what}", hint=f"Is it the right port? {_CALL_HINT}"
        )


# Exceptions of Hadoop that concern the port or the release, and what to do.
_OF_CONNECTIONS = {
    "RpcNoSuchProtocolException": (
        "This port serves another protocol: name SCM's client port, usually 9860."
    ),
    "RpcNoSuchMethodException": _CALL_HINT,
    "VersionMismatch": _CALL_HINT,
}


def _frame(*messages: Message) -> bytes:
    body = b"".join(
        _varint(message.ByteSize()) + message.SerializeToString() for message in messages
    )
    return len(body).to_bytes(4, "big") + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _delimited(frame: bytes) -> Iterator[bytes]:
    """The messages of a frame, each after its length.

    Raises:
        ValueError: a length is invalid or reaches beyond the frame.
    """
    at = 0
    while at < len(frame):
        length = shift = 0
        while True:
            if at >= len(frame) or shift > 28:
                raise ValueError("a length is cut off or too long")
            byte, at = frame[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + length > len(frame):
            raise ValueError("a message reaches beyond its frame")
        yield frame[at : at + length]
        at += length
