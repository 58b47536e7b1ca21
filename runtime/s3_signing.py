"""Signature version 4, as S3 has it: which headers prove who sends a request, and what.

The key of a day is derived once. The path is signed as it is sent, which is the rule of
S3 alone.
"""

import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from merkle.checksum import Buffer

UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"
# The digest of the body is signed, too: where the body is not, it stands for it.
_SIGNED = {"host", "content-type", "content-md5"}
# Keys of a few days, regions and sets of credentials.
_KEYS_MAX = 64


class AccessKeys(Protocol):
    """Credentials at one moment, as botocore freezes them."""

    @property
    def access_key(self) -> str:
        """The public name of the key."""

    @property
    def secret_key(self) -> str:
        """What nobody else knows."""

    @property
    def token(self) -> str | None:
        """Of credentials that end; it is sent along."""


def payload_digest(body: Buffer) -> str:
    """The SHA-256 of a body, as the signature takes it."""
    return hashlib.sha256(body).hexdigest()


def signed_headers(
    method: str,
    target: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    keys: AccessKeys,
    region: str,
    at_s: float,
) -> dict[str, str]:
    """All headers of a request, which has `host` already, with those of its signature.

    `target` is path and query as they are sent, percent-encoded and sorted by name.
    `payload` is the SHA-256 of the body as text, or UNSIGNED. Names are in lower case.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
    day = stamp[:8]
    sent = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if keys.token:
        sent["x-amz-security-token"] = keys.token
    names = sorted(name for name in sent if name in _SIGNED or name.startswith("x-amz-"))
    path, _, query = target.partition("?")
    # Each name has its `=`, also where it is sent without.
    pairs = sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)
    lines = "".join(f"{name}:{' '.join(sent[name].split())}\n" for name in names)
    joined = ";".join(names)
    request = f"{method}\n{path}\n{'&'.join(pairs)}\n{lines}\n{joined}\n{payload}"
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    signature = hmac.digest(_key(keys.secret_key, day, region), text.encode(), "sha256").hex()
    sent["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={joined},"
        f" Signature={signature}"
    )
    return sent


@lru_cache(maxsize=_KEYS_MAX)
def _key(secret: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for step in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, step.encode(), "sha256")
    return key
