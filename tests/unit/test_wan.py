"""The link between regions: bytes are counted by kind, delayed, limited and cut."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from botocore.exceptions import BotoCoreError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.s3_servers import S3Bucket
from tests.support.wan import WanLink
from tests.support.wan_proxy import OPAQUE, RequestParser, request_kind


@contextmanager
def echo_server() -> Iterator[str]:
    """Sends back what it is sent, to one connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with closing(connection):
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def connect(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (data := connection.recv(1 << 16)):
        found += data
    return found


def test_every_byte_of_a_request_is_counted_under_its_kind(ministack_bucket: S3Bucket) -> None:
    body = bytes(100_000)
    with WanLink(ministack_bucket.endpoint.address) as link:
        with link.through(ministack_bucket.endpoint).client() as client:
            client.put_object(Bucket=ministack_bucket.name, Key="a/b", Body=body)
            assert client.get_object(Bucket=ministack_bucket.name, Key="a/b")["Body"].read() == body
            client.list_object_versions(Bucket=ministack_bucket.name)
        traffic = link.traffic()
        assert {kind: found.requests for kind, found in traffic.kinds.items()} == {
            "PUT object": 1,
            "GET object": 1,
            "GET bucket?versions": 1,
        }
        put, got = traffic.kinds["PUT object"], traffic.kinds["GET object"]
        assert len(body) < put.bytes_to < len(body) + 2000 > put.bytes_from > 0
        assert len(body) < got.bytes_from < len(body) + 2000 > got.bytes_to > 0
        assert traffic.total.length_bytes == sum(k.length_bytes for k in traffic.kinds.values())
        link.reset()
        assert link.traffic().kinds == {}


def test_what_is_not_http_crosses_too() -> None:
    with (
        echo_server() as server,
        WanLink(server) as link,
        closing(connect(link.address)) as connection,
    ):
        sent = b"PRI * HTTP/2.0\r\n\r\n" + bytes(range(256)) * 1000
        connection.sendall(sent)
        assert receive(connection, len(sent)) == sent
        found = link.traffic().kinds[OPAQUE]
        assert (found.requests, found.bytes_to, found.bytes_from) == (0, len(sent), len(sent))


def test_a_round_trip_takes_the_delay_twice() -> None:
    with (
        echo_server() as server,
        WanLink(server, delay_ms=100) as link,
        closing(connect(link.address)) as connection,
    ):
        started = time.monotonic()
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        # At least; how much more is the machine's affair.
        assert time.monotonic() - started >= 0.2


def test_bandwidth_is_shared_by_all_connections() -> None:
    with echo_server() as server, WanLink(server, mbit=8) as link:
        started = time.monotonic()
        for _ in range(2):
            with closing(connect(link.address)) as connection:
                connection.sendall(bytes(200_000))
                assert len(receive(connection, 200_000)) == 200_000
        # 400,000 bytes at 1,000,000 bytes/s; both directions overlap.
        assert time.monotonic() - started >= 0.4
        link.shape(delay_ms=0, mbit=0)


def test_a_cut_link_carries_nothing_until_it_is_mended(ministack_bucket: S3Bucket) -> None:
    bucket = ministack_bucket.name
    with WanLink(ministack_bucket.endpoint.address) as link:
        through = link.through(ministack_bucket.endpoint)
        with through.client() as client:
            client.put_object(Bucket=bucket, Key="before", Body=b"x")
            link.cut()
            with pytest.raises(BotoCoreError):
                client.put_object(Bucket=bucket, Key="meanwhile", Body=b"x")
            link.mend()
            client.put_object(Bucket=bucket, Key="after", Body=b"x")
            listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [row["Key"] for row in listed] == ["after", "before"]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("GET / HTTP/1.1", "GET service"),
        ("GET /bucket?list-type=2&prefix=a HTTP/1.1", "GET bucket?list-type"),
        ("POST /bucket/?delete HTTP/1.1", "POST bucket?delete"),
        ("PUT /bucket/a/b?partNumber=1&uploadId=u HTTP/1.1", "PUT object?uploadId"),
        (
            "PUT /bucket/key?partNumber=1&uploadId=u HTTP/1.1\r\nX-Amz-Copy-Source: /b/k",
            "PUT object?uploadId copy",
        ),
        ("GET /admin/log/?type=data&id=1 HTTP/1.1", "GET /admin/log?type=data"),
    ],
)
def test_a_kind_is_method_and_what_it_is_about(head: str, kind: str) -> None:
    assert request_kind(head.encode()) == kind


def sized(body: bytes) -> bytes:
    return b"PUT /b/k HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes) -> bytes:
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    data = b"".join(b"%x;signature=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + data + b"0\r\n\r\n"


# Bodies that look like requests.
BODIES = st.binary(max_size=40) | st.just(b"GET /b HTTP/1.1\r\n\r\n")


@given(st.lists(st.tuples(st.sampled_from([sized, chunked]), BODIES)), st.data())
def test_requests_are_told_apart_wherever_the_stream_is_cut(
    requests: list[tuple[object, bytes]], data: st.DataObject
) -> None:
    whole = [make(body) for make, body in requests]
    stream = b"".join(whole)
    parser, begun, counted = RequestParser(), 0, 0
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        for kind, count, begins in parser.feed(stream[:size]):
            assert kind == "PUT object"
            begun += begins
            counted += count
        stream = stream[size:]
    assert begun == len(whole)
    assert counted == sum(map(len, whole))


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"GET ", b"\r\n\r\n", b"POST / H"])))
def test_every_byte_is_counted_once_whatever_it_is(pieces: list[bytes]) -> None:
    """But for an incomplete head at the end, which may still become a request."""
    parser, counted = RequestParser(), 0
    for piece in pieces:
        counted += sum(count for _, count, _ in parser.feed(piece))
    rest = sum(count for _, count, _ in parser.feed(b"\0\r\n\r\n"))
    assert counted + rest == sum(map(len, pieces)) + 5
