"""A TCP relay on loopback that plays the link between two regions; tests/support/wan.py
starts and commands it.

It adds one-way delay and a limit of bandwidth in each direction, counts every byte that
enters the link, and attributes the bytes of plain HTTP/1.1 to the kind of request that
moved them. It can cut the link: connections are reset, and new ones too, until it is
mended.

    python -m tests.support.wan_proxy --to 127.0.0.1:8101 --delay-ms 45 --mbit 200

It prints its port, then answers each line of its standard input with a line of JSON,
and ends when that input does. Lines: `stats`, `reset`, `cut`, `mend`, `shape DELAY_MS
MBIT`.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

_METHODS = (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE", b"OPTIONS")
# Sub-resources that make another kind of request; the first that is present counts.
_SUBRESOURCES = (
    "versions",
    "uploadId",
    "uploads",
    "tagging",
    "acl",
    "versioning",
    "attributes",
    "delete",
    "list-type",
)
# A longer head of a request is none.
_HEAD_BYTES_MAX = 64 << 10
_READ_BYTES = 64 << 10
# Pieces that are on the link of one connection; more wait at the sender.
_PIECES_MAX = 256
OPAQUE = "other"


def request_kind(head: bytes) -> str:
    """The kind of request that a head opens: method, what it is about, sub-resource.

    For example `GET object`, `PUT object?uploadId copy` or `GET /admin/log?type=data`.
    """
    line, *fields = head.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    target = urlsplit(rest.rpartition(" ")[0])
    query = parse_qs(target.query, keep_blank_values=True)
    if target.path.startswith("/admin/"):
        kind = "/".join(target.path.split("/")[:3])
        return f"{method} {kind}" + (f"?type={query['type'][0]}" if "type" in query else "")
    bucket, _, key = target.path.lstrip("/").partition("/")
    kind = "object" if key else "bucket" if bucket else "service"
    kind += next((f"?{name}" for name in _SUBRESOURCES if name in query), "")
    names = {field.partition(":")[0].lower() for field in fields}
    return f"{method} {kind}" + (" copy" if "x-amz-copy-source" in names else "")


class RequestParser:
    """Tells the requests of one connection apart; bytes in, kinds of request out.

    What is not HTTP/1.1 is of the kind OPAQUE for the rest of the connection.
    """

    def __init__(self) -> None:
        self.kind = OPAQUE
        self._gathered = b""
        self._body_bytes = 0
        self._is_chunked = False
        self._is_opaque = False

    def feed(self, data: bytes) -> Iterator[tuple[str, int, bool]]:
        """Kind and count of the bytes in each part of `data`, and whether a request
        begins with them. The bytes of an incomplete head come with its end.
        """
        while data:
            if self._is_opaque:
                yield self.kind, len(data), False
                return
            if self._body_bytes:
                count = min(self._body_bytes, len(data))
                self._body_bytes -= count
                data = data[count:]
                yield self.kind, count, False
                continue
            data, self._gathered = self._gathered + data, b""
            end = b"\r\n" if self._is_chunked else b"\r\n\r\n"
            text, found, rest = data.partition(end)
            begins = not self._is_chunked
            if found and self._begins(text):
                yield self.kind, len(text) + len(end), begins
                data = rest
            elif not found and self._may_go_on(text):
                self._gathered = data
                return
            else:
                self._is_opaque, self.kind = True, OPAQUE

    def _may_go_on(self, text: bytes) -> bool:
        """Whether this may be the beginning of a head, or of the line of a chunk."""
        method = text.partition(b" ")[0]
        is_request = any(name.startswith(method) for name in _METHODS)
        return (self._is_chunked or is_request) and len(text) <= _HEAD_BYTES_MAX

    def _begins(self, text: bytes) -> bool:
        """Take in a head, or the line of a chunk; False if it is neither."""
        try:
            if self._is_chunked:
                self._begin_chunk(text)
            elif text.partition(b" ")[0] in _METHODS:
                self._begin_request(text)
            else:
                return False
        except ValueError:
            return False
        return True

    def _begin_request(self, head: bytes) -> None:
        self.kind = request_kind(head)
        fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        values = {name.lower(): value.strip() for name, _, value in fields}
        self._is_chunked = values.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._body_bytes = 0 if self._is_chunked else int(values.get(b"content-length", b"0"))

    def _begin_chunk(self, line: bytes) -> None:
        size = int(line.partition(b";")[0] or b"0", 16)
        # A last chunk of no bytes ends the body; its empty line counts as data.
        self._is_chunked = size > 0
        self._body_bytes = size + len(b"\r\n")


class Direction:
    """One direction of the link; all connections share its rate."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._free_at = 0.0

    def due(self, length_bytes: int, now: float) -> float:
        """When the last of so many bytes has left, in seconds of the loop's clock."""
        if not self.bytes_per_s:
            return now
        self._free_at = max(self._free_at, now) + length_bytes / self.bytes_per_s
        return self._free_at


@dataclass(slots=True)
class Count:
    """What requests of one kind moved, in bytes."""

    requests: int = 0
    bytes_to: int = 0
    bytes_from: int = 0


class Proxy:
    """The relay; `to` is host and port of the server."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._up, self._down = Direction(), Direction()
        self._delay_s = 0.0
        self._is_cut = False
        self._writers = set[asyncio.StreamWriter]()
        self._connections = 0
        self._counts = defaultdict[str, Count](Count)

    def command(self, line: str) -> dict[str, object]:
        """Do what a line says, and answer."""
        match line.split():
            case ["stats"]:
                kinds = {
                    kind: [count.requests, count.bytes_to, count.bytes_from]
                    for kind, count in self._counts.items()
                }
                return {"connections": self._connections, "kinds": kinds}
            case ["reset"]:
                self._connections = 0
                self._counts.clear()
            case ["cut"]:
                self._is_cut = True
                for writer in self._writers:
                    writer.transport.abort()
            case ["mend"]:
                self._is_cut = False
            case ["shape", delay_ms, mbit]:
                self._delay_s = float(delay_ms) / 1000
                self._up.bytes_per_s = self._down.bytes_per_s = float(mbit) * 1e6 / 8
            case _:
                return {"error": f"unknown command: {line}"}
        return {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until both sides have ended it."""
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        self._connections += 1
        both = {writer, to_server}
        self._writers |= both
        parser = RequestParser()
        try:
            await asyncio.gather(
                self._relay(reader, to_server, self._up, parser, is_request=True),
                self._relay(from_server, writer, self._down, parser, is_request=False),
            )
        finally:
            self._writers -= both
            for one in both:
                one.close()

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
        parser: RequestParser,
        *,
        is_request: bool,
    ) -> None:
        clock = asyncio.get_running_loop()
        pieces = asyncio.Queue[tuple[float, bytes]](_PIECES_MAX)
        sender = asyncio.create_task(_send(pieces, writer))
        try:
            while data := await reader.read(_READ_BYTES):
                if is_request:
                    for kind, count, begins in parser.feed(data):
                        self._counts[kind].requests += begins
                        self._counts[kind].bytes_to += count
                else:
                    self._counts[parser.kind].bytes_from += len(data)
                await pieces.put((direction.due(len(data), clock.time()) + self._delay_s, data))
        except OSError:
            writer.transport.abort()
        finally:
            await pieces.put((clock.time() + self._delay_s, b""))
            await sender


async def _send(pieces: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
    """Send each piece when it is due; an empty one is the end."""
    clock = asyncio.get_running_loop()
    is_lost = False
    while (piece := await pieces.get())[1]:
        # After a loss too: whoever puts pieces in waits for room.
        if is_lost:
            continue
        await asyncio.sleep(piece[0] - clock.time())
        try:
            writer.write(piece[1])
            await writer.drain()
        except OSError:
            is_lost = True
            writer.transport.abort()
    if not is_lost:
        await asyncio.sleep(piece[0] - clock.time())
        # The receiver may be gone by now, which no end has to be told to.
        with contextlib.suppress(OSError):
            if writer.can_write_eof() and not writer.transport.is_closing():
                writer.write_eof()


async def _run(proxy: Proxy) -> None:
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    # By a thread: not everything that may be our input tells when it can be read.
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(proxy.command(line)), flush=True)
    server.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--to", required=True, help="HOST:PORT to relay to")
    options.add_argument("--delay-ms", default="0", help="one way; a round trip takes twice this")
    options.add_argument("--mbit", default="0", help="megabit/s in each direction, 0: no limit")
    given = options.parse_args()
    started = Proxy(given.to)
    started.command(f"shape {given.delay_ms} {given.mbit}")
    asyncio.run(_run(started))
