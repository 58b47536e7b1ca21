"""Our signatures are those of botocore, and of the specification."""

from datetime import UTC, datetime
from types import SimpleNamespace
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from runtime.s3_signing import UNSIGNED, payload_digest, signed_headers
from tests.support.sigv4 import is_signed

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
WORDS = st.text("aZ09-._~ +/=&%é😀", max_size=12)
VALUES = st.text("aZ09-._~ +/=&%é日", max_size=20).map(str.strip)
NAMES = st.sampled_from(
    ["content-type", "content-md5", "range", "if-match", "x-amz-meta-a", "x-amz-meta-b", "x-amz-z"]
)


@given(
    method=st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE"]),
    key=WORDS,
    query=st.dictionaries(st.sampled_from(["acl", "prefix", "uploadId", "list-type"]), WORDS),
    headers=st.dictionaries(NAMES, VALUES),
    body=st.none() | st.binary(max_size=50),
    token=st.none() | st.just("token/+="),
    at_s=st.integers(1_300_000_000, 4_000_000_000),
)
def test_a_signature_is_that_of_the_specification(
    method: str,
    key: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes | None,
    token: str | None,
    at_s: int,
) -> None:
    target = "/bucket/" + quote(key, safe="/~")
    parts = [name + (f"={quote(query[name], safe='~')}" if query[name] else "") for name in query]
    target += "?" + "&".join(sorted(parts)) if parts else ""
    payload = UNSIGNED if body is None else payload_digest(body)
    sent = signed_headers(
        method,
        target,
        {"host": "host:1", **headers},
        payload=payload,
        keys=ReadOnlyCredentials("AKIA", SECRET, token),
        region="eu-far-1",
        at_s=at_s,
    )
    assert is_signed(method, target, sent, body or b"", SECRET)
    assert {name: sent[name] for name in headers} == headers
    names = sent["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    # What guards the body where it is not signed must be signed itself.
    assert ("content-md5" in names) == ("content-md5" in headers)
    for changed in (method + "X", "OTHER"):
        assert not is_signed(changed, target, sent, body or b"", SECRET)


@given(key=WORDS, value=VALUES, body=st.binary(max_size=50))
def test_a_signature_is_that_of_botocore(key: str, value: str, body: bytes) -> None:
    target = "/bucket/" + quote(key, safe="/~") + "?acl&prefix=" + quote(value, safe="~")
    request = AWSRequest(
        "PUT", f"http://host:1{target}", {"x-amz-meta-a": value, "content-type": "a b"}, body
    )
    request.context["client_config"] = SimpleNamespace(s3={"payload_signing_enabled": True})
    credentials = Credentials("AKIA", SECRET, "token")
    S3SigV4Auth(credentials, "s3", "eu-far-1").add_auth(request)
    stamp = request.headers["X-Amz-Date"]
    at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    sent = signed_headers(
        "PUT",
        target,
        {"host": "host:1", "x-amz-meta-a": value, "content-type": "a b"},
        payload=payload_digest(body),
        keys=credentials.get_frozen_credentials(),
        region="eu-far-1",
        at_s=at.timestamp(),
    )
    assert sent["authorization"] == request.headers["Authorization"]
