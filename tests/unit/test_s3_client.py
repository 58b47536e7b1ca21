"""What the S3 client puts on the wire, and what it makes of each answer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import ClientError, CredentialRetrievalError
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.retry import Backoff
from runtime.s3 import Query, S3Client, open_client, place_request
from runtime.s3_account import CredentialSource, RenewedKeys, S3Settings
from runtime.s3_answers import (
    S3Error,
    S3OutcomeUnknownError,
    S3ProtocolError,
    S3UnavailableError,
    parse_document,
)
from runtime.traffic import Traffic
from tests.support.sigv4 import is_signed
from tests.support.wire_server import WireServer, answer, wire_server

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>"
ODD_KEYS = [
    "plain",
    "a//b",
    "//lead",
    "a/../b",
    "..",
    "./a",
    "t/",
    "?x=1&y",
    "a%25b%",
    "a+b c",
    "#;:@=",
    "😀/\uff01",
    "\x01\t\n",
    "é" * 500,
]


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as made:
        yield made


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def client(server: WireServer, waits: list[float]) -> Iterator[S3Client]:
    with closing(new_client(server, waits)) as made:
        yield made


def new_client(
    server: WireServer,
    waits: list[float],
    token: str | None = None,
    credentials: CredentialSource | None = None,
) -> S3Client:
    return S3Client(
        endpoint_url=server.url,
        region="us-east-1",
        credentials=credentials or Credentials("AKIAIOSFODNN7EXAMPLE", SECRET, token),
        backoff=Backoff(attempts_max=3),
        sleep=waits.append,
    )


def test_the_signature_of_the_tests_is_that_of_the_documentation() -> None:
    """The examples that AWS publishes for S3: GET of a range, PUT, GET ?lifecycle."""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    scope = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
    common = {
        "host": "examplebucket.s3.amazonaws.com",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": empty,
    }

    def signed(names: str, signature: str) -> dict[str, str]:
        text = f"AWS4-HMAC-SHA256 Credential={scope},SignedHeaders={names},Signature={signature}"
        return {"authorization": text}

    ranged = common | {"range": "bytes=0-9"}
    ranged |= signed(
        "host;range;x-amz-content-sha256;x-amz-date",
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    )
    assert is_signed("GET", "/test.txt", ranged, b"", SECRET)
    lifecycle = common | signed(
        "host;x-amz-content-sha256;x-amz-date",
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    )
    assert is_signed("GET", "/?lifecycle", lifecycle, b"", SECRET)
    assert not is_signed("GET", "/?lifecycle", lifecycle, b"", "other")
    assert not is_signed("GET", "/?lifecyclf", lifecycle, b"", SECRET)
    assert not is_signed("GET", "/?lifecycle", lifecycle, b"x", SECRET)


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_reaches_the_server_as_it_is_and_signed(
    server: WireServer, client: S3Client, key: str
) -> None:
    headers = {"x-amz-meta-a": "grün 日本", "content-type": "text/x", "content-md5": "x"}
    query = (("uploadId", "a/b+c=="), ("partNumber", "1"))
    client.request("PUT", "bucket", key, query=query, headers=headers, body=b"body")
    client.request("GET", "bucket", key, query=(("tagging", ""),))
    for one in server.arrived:
        path = one.target.partition("?")[0]
        assert bytes(unquoted(path)) == b"/bucket/" + key.encode()
        assert is_signed(one.method, one.target, one.headers, one.body, SECRET)
    assert server.arrived[0].body == b"body"
    assert server.arrived[0].headers["x-amz-meta-a"] == "grün 日本"
    assert server.arrived[1].target.endswith("?tagging")


def unquoted(path: str) -> Iterator[int]:
    """The bytes of a percent-encoded path; nothing else is decoded."""
    at = 0
    while at < len(path):
        if path[at] == "%":
            yield int(path[at + 1 : at + 3], 16)
            at += 3
        else:
            assert path[at] in "/-_.~" or path[at].isalnum()
            yield ord(path[at])
            at += 1


def test_a_bucket_in_the_host_keeps_keys_as_they_are() -> None:
    def placed(bucket: str, key: str, query: Query = ()) -> tuple[str, str]:
        return place_request("host:1", "", bucket=bucket, key=key, query=query, is_virtual=True)

    for key in ODD_KEYS:
        host, target = placed("bucket", key)
        assert host == "bucket.host:1"
        assert bytes(unquoted(target)) == b"/" + key.encode()
    assert placed("bucket", "", (("list-type", "2"), ("a", ""))) == (
        "bucket.host:1",
        "/?a&list-type=2",
    )
    # No certificate covers two levels.
    assert placed("with.dot", "key") == ("host:1", "/with.dot/key")


def test_only_needed_headers_are_sent(server: WireServer, client: S3Client) -> None:
    client.request("GET", "bucket", "key")
    client.request("PUT", "bucket", "key", body=bytearray(b"x" * 4096))
    common = {"host", "authorization", "x-amz-date", "x-amz-content-sha256"}
    assert set(server.arrived[0].headers) == common
    assert set(server.arrived[1].headers) == common | {"content-length"}
    assert server.arrived[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    # No TLS: the body is signed.
    assert len(server.arrived[1].headers["x-amz-content-sha256"]) == 64
    assert server.arrived[1].length_bytes - 4096 < 430
    assert server.connections == 1


def test_a_session_token_is_sent_and_signed(server: WireServer, waits: list[float]) -> None:
    with closing(new_client(server, waits, "token/+=")) as client:
        client.request("GET", "bucket", "key")
    (one,) = server.arrived
    assert one.headers["x-amz-security-token"] == "token/+="
    assert is_signed(one.method, one.target, one.headers, one.body, SECRET)


def test_a_connection_is_used_again_and_by_many_threads(
    server: WireServer, client: S3Client
) -> None:
    server.answers += [answer(404, NO_SUCH_KEY), answer(200, b"x" * 70_000)] * 5
    for _ in range(5):
        with pytest.raises(S3Error):
            client.request("PUT", "bucket", "key")
        with client.stream("bucket", "key") as stream:
            assert len(b"".join(stream.pieces)) == 70_000
    assert server.connections == 1
    threads = [
        threading.Thread(target=client.request, args=("HEAD", "bucket", str(i))) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.target for one in server.arrived[-20:]} == {f"/bucket/{i}" for i in range(20)}
    for one in server.arrived:
        assert is_signed(one.method, one.target, one.headers, one.body, SECRET)


def test_an_error_has_its_code_status_and_request(server: WireServer, client: S3Client) -> None:
    server.answers.append(answer(404, NO_SUCH_KEY, "x-amz-request-id: r1\r\n"))
    with pytest.raises(S3Error) as caught:
        client.request("GET", "bucket", "a/key", query=(("tagging", ""),))
    error = caught.value
    assert (error.status, error.s3_code) == (404, "NoSuchKey")
    assert error.facts["request"] == "GET bucket/a/key?tagging"
    assert error.facts["request_id"] == "r1"
    assert SECRET not in error.message


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (200, b"<Error><Code>InternalError</Code></Error>", S3OutcomeUnknownError, "InternalError"),
        (200, b'  \n<?xml version="1.0"?>\n<Error><Code>X</Code></Error>', S3Error, "X"),
        (200, b"<Error ><Code>SlowDown</Code></Error>", S3UnavailableError, "SlowDown"),
        (301, b"", S3Error, "PermanentRedirect"),
        (404, b"", S3Error, "NotFound"),
        (412, b"not XML", S3Error, "PreconditionFailed"),
        (500, b"<html>", S3OutcomeUnknownError, ""),
        (503, b"", S3UnavailableError, ""),
    ],
)
def test_each_failure_says_whether_it_may_have_been_done(
    server: WireServer, client: S3Client, status: int, body: bytes, kind: type[S3Error], code: str
) -> None:
    server.answers += [answer(status, body)] * 3
    with pytest.raises(S3Error) as caught:
        client.request("POST", "bucket", "key", query=(("uploadId", "u"),))
    assert type(caught.value) is kind
    assert caught.value.s3_code == code


def test_an_error_below_another_root_is_no_error_of_the_request(
    server: WireServer, client: S3Client
) -> None:
    body = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    server.answers.append(answer(200, body))
    assert client.request("POST", "bucket", query=(("delete", ""),)).body == body
    server.answers.append(answer(200, NO_SUCH_KEY))
    # The content of an object may look like anything.
    assert client.request("GET", "bucket", "key").body == NO_SUCH_KEY


def test_what_can_be_repeated_is_and_nothing_else(
    server: WireServer, client: S3Client, waits: list[float]
) -> None:
    server.answers += [answer(500), b"", answer(200, b"x")]
    assert client.request("PUT", "bucket", "key", body=b"abc").body == b"x"
    assert [one.body for one in server.arrived] == [b"abc"] * 3
    assert len(waits) == 2
    for said in (answer(500), b""):
        server.arrived.clear()
        server.answers.append(said)
        with pytest.raises(S3OutcomeUnknownError):
            client.request("POST", "bucket", "key", body=b"abc")
        assert len(server.arrived) == 1
    server.arrived.clear()
    # The store has done nothing: this may be repeated whatever it is.
    server.answers.append(answer(503))
    client.request("POST", "bucket", "key", body=b"abc")
    assert len(server.arrived) == 2
    server.answers += [answer(403)]
    server.arrived.clear()
    with pytest.raises(S3Error):
        client.request("GET", "bucket", "key")
    assert len(server.arrived) == 1


def test_requests_are_counted_with_their_bytes(server: WireServer, client: S3Client) -> None:
    assert client.traffic.read() == Traffic()
    client.request("PUT", "bucket", "key", body=bytes(1000))
    sent = client.traffic.read()
    server.answers.append(answer(200, bytes(2000)))
    client.request("GET", "bucket", "key")
    both = client.traffic.read()
    assert (sent.requests, both.requests) == (1, 2)
    assert 1000 < sent.bytes < 2000
    assert 3000 < both.bytes < 5000


def test_a_body_that_ends_early_is_an_error(server: WireServer, client: S3Client) -> None:
    server.answers.append(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\nabc")
    with client.stream("bucket", "key") as stream, pytest.raises(S3OutcomeUnknownError):
        list(stream.pieces)


def test_a_store_that_is_not_there_is_unavailable(waits: list[float]) -> None:
    with wire_server() as server:
        pass
    with closing(new_client(server, waits)) as client, pytest.raises(S3UnavailableError):
        client.request("POST", "bucket", "key")
    assert len(waits) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<a",
        b"<Other/>",
        b"\xff<ListBucketResult/>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><Known>&a;</Known>',
        b"<Known>&#1;</Known>",
        b"<Known/><Known/>",
        '<?xml version="1.0" encoding="UTF-16"?><Known/>'.encode("utf-16"),
    ],
)
def test_what_is_not_the_document_is_an_error(body: bytes) -> None:
    with pytest.raises(S3ProtocolError):
        parse_document(body, "Known")


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_no_document_is_understood_by_chance(body: bytes) -> None:
    with pytest.raises(S3ProtocolError):
        parse_document(body, "Known")


def renewed(refresh: Callable[[], dict[str, str]]) -> RenewedKeys:
    """Keys that have ended, and what is called to renew them."""
    ended = datetime(2020, 1, 1, tzinfo=UTC)
    return RenewedKeys(RefreshableCredentials("OLD", SECRET, "t", ended, refresh, "test"))


def test_keys_that_have_ended_are_renewed_before_a_request(
    server: WireServer, waits: list[float]
) -> None:
    def refresh() -> dict[str, str]:
        keys = {"access_key": "NEW", "secret_key": SECRET, "token": "new"}
        return {**keys, "expiry_time": "2999-01-01T00:00:00Z"}

    with closing(new_client(server, waits, credentials=renewed(refresh))) as client:
        client.request("GET", "bucket", "key")
    (one,) = server.arrived
    assert "Credential=NEW/" in one.headers["authorization"]
    assert is_signed(one.method, one.target, one.headers, one.body, SECRET)


def failing(error: Exception) -> Callable[[], dict[str, str]]:
    def refresh() -> dict[str, str]:
        raise error

    return refresh


def still_ended() -> dict[str, str]:
    """Keys that have ended, in place of those that have."""
    keys = {"access_key": "NEW", "secret_key": SECRET, "token": "new"}
    return {**keys, "expiry_time": "2020-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "refresh",
    [
        failing(CredentialRetrievalError(provider="sso", error_msg="the session has ended")),
        failing(ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole")),
        still_ended,
    ],
    ids=["not retrieved", "refused", "still ended"],
)
def test_keys_that_cannot_be_renewed_are_an_error_and_nothing_is_sent(
    server: WireServer, waits: list[float], refresh: Callable[[], dict[str, str]]
) -> None:
    with (
        closing(new_client(server, waits, credentials=renewed(refresh))) as client,
        pytest.raises(ConfigError, match="cannot be renewed"),
    ):
        client.request("GET", "bucket", "key")
    assert not server.arrived
    assert not waits


def test_credentials_and_region_come_from_where_they_do_for_every_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(ConfigError, match="no S3 credentials"):
        open_client(S3Settings())
    with pytest.raises(ConfigError, match="other"):
        open_client(S3Settings(profile="other"))
    with wire_server() as server:
        credentials.write_text(
            f"[far]\naws_access_key_id = FAR\naws_secret_access_key = {SECRET}\n"
        )
        config.write_text(f"[profile far]\nregion = eu-far-1\nendpoint_url = {server.url}\n")
        with closing(open_client(S3Settings(profile="far"))) as client:
            client.request("GET", "bucket", "key")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEAR")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        with closing(open_client(S3Settings(endpoint_url=server.url, region="x-1"))) as client:
            client.request("GET", "bucket", "key")
    far, near = server.arrived
    assert "Credential=FAR/" in far.headers["authorization"]
    assert "/eu-far-1/s3/" in far.headers["authorization"]
    assert "Credential=NEAR/" in near.headers["authorization"]
    assert "/x-1/s3/" in near.headers["authorization"]
    for one in server.arrived:
        assert is_signed(one.method, one.target, one.headers, one.body, SECRET)
    with closing(open_client(S3Settings(region="eu-west-3"))) as client:
        assert client.endpoint_url == "https://s3.eu-west-3.amazonaws.com"


@pytest.mark.parametrize(
    "url", ["", "host:1", "ftp://host", "http://", "http://u:p@host", "http://host:x", "http://h?q"]
)
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        S3Client(endpoint_url=url, region="r", credentials=Credentials("a", "b"))
