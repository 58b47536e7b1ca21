"""Signature version 4 once more, as its specification says: what arrived is signed anew
and compared. Written from the text, not from the code under test.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>[^,]+),\s*"
    r"SignedHeaders=(?P<names>[^,]+),\s*Signature=(?P<signature>[0-9a-f]{64})"
)


def is_signed(
    method: str, target: str, headers: Mapping[str, str], body: bytes, secret: str
) -> bool:
    """Whether a request, as it arrived, has the right signature and payload hash; names
    of headers are in lower case.
    """
    found = _AUTHORIZATION.fullmatch(headers["authorization"])
    assert found is not None, headers["authorization"]
    declared = headers["x-amz-content-sha256"]
    if declared not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
        return False
    path, _, query = target.partition("?")
    pairs = sorted(
        "=".join(quote(unquote(text), safe="-_.~") for text in (name, value))
        for name, _, value in (part.partition("=") for part in query.split("&") if part)
    )
    names = found["names"].split(";")
    assert names == sorted(names)
    # Every x-amz header that was sent must be signed.
    assert {name for name in headers if name.startswith("x-amz-")} | {"host"} <= set(names)
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in names]
    request = "\n".join(
        [
            method,
            quote(unquote(path), safe="/-_.~"),
            "&".join(pairs),
            *lines,
            "",
            found["names"],
            declared,
        ]
    )
    text = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            headers["x-amz-date"],
            found["scope"],
            hashlib.sha256(request.encode()).hexdigest(),
        ]
    )
    key = b"AWS4" + secret.encode()
    for step in found["scope"].split("/"):
        key = hmac.digest(key, step.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex() == found["signature"]
