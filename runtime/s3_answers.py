"""Answers of an S3 store: values, errors and XML documents.

A store reports a refusal by its HTTP status, by an error document, or by such a
document after status 200 where the work outlasted the head of the answer. What matters
to a caller is whether the request may have been carried out: the classes say so.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from merkle.errors import ReconcileError

# Answers by which a store says that it did nothing, and would like to be asked later.
_NOT_PROCESSED = {429, 503}
_NOT_PROCESSED_CODES = {"SlowDown", "Throttling", "ThrottlingException", "ServiceUnavailable"}
# Answers after which the request may have been carried out.
_UNKNOWN = {500, 502, 504}
_UNKNOWN_CODES = {"InternalError", "RequestTimeout"}
_ERROR_BYTES_MAX = 64 << 10
# Names for answers without a document: those to HEAD have none.
_CODES = {
    301: "PermanentRedirect",
    304: "NotModified",
    400: "BadRequest",
    403: "AccessDenied",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    412: "PreconditionFailed",
    416: "InvalidRange",
}
_HINTS = {
    "AccessDenied": "These credentials may not do this. Ask the bucket's owner for the right.",
    "AuthorizationHeaderMalformed": "Name the bucket's region: ?region=NAME.",
    "InvalidAccessKeyId": "Check the access key, or choose another profile: ?profile=NAME.",
    "NoSuchBucket": "Check the bucket's name and the endpoint.",
    "PermanentRedirect": "The bucket is in another region. Name it: ?region=NAME.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "SignatureDoesNotMatch": "Check the secret key of these credentials.",
}

# Behind white space, which keeps the connection alive while the store works.
_ERROR_DOCUMENT = re.compile(rb"\s*(<\?xml[^>]*\?>)?\s*<Error[\s>]")


class S3Error(ReconcileError):
    """An S3 store refused a request. `facts` has `status`, `s3_code` and `request`."""

    code = "s3_failed"

    @property
    def status(self) -> int:
        """The HTTP status, 0 where there was no answer."""
        status = self.facts.get("status", 0)
        assert isinstance(status, int)
        return status

    @property
    def s3_code(self) -> str:
        """The store's name for the error, such as NoSuchKey; empty if it gave none."""
        return str(self.facts.get("s3_code", ""))


class S3UnavailableError(S3Error):
    """An S3 store was not reached or asked to be called later; it has done nothing."""

    code = "s3_unavailable"
    retryable = True
    exit_status = 7


class S3OutcomeUnknownError(S3Error):
    """An S3 store failed in the middle of a request, or its answer did not arrive: it
    may have carried the request out.
    """

    code = "s3_outcome_unknown"
    retryable = True
    exit_status = 7


class S3ProtocolError(S3Error):
    """The answer of an S3 store is invalid."""

    code = "s3_protocol"


@dataclass(frozen=True, slots=True)
class S3Answer:
    """One answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def raise_for(answer: S3Answer, request: str) -> None:
    """Raise the error that an answer is; `request` names the request.

    Raises:
        S3Error: or its subclass by what is known of the request's effect.
    """
    if answer.status >= 300 or _ERROR_DOCUMENT.match(answer.body):
        raise error_of(answer, request)


def error_of(answer: S3Answer, request: str) -> S3Error:
    """The error for an answer that is none of success."""
    status, s3_code, text = answer.status, "", ""
    try:
        root = parse_document(answer.body[:_ERROR_BYTES_MAX], "Error")
        s3_code = (root.findtext("Code") or "").strip()
        text = (root.findtext("Message") or "").strip()
    except S3ProtocolError:
        text = answer.body[:200].decode("utf-8", "replace")
    s3_code = s3_code or _CODES.get(status, "")
    kind: type[S3Error] = S3Error
    if status in _NOT_PROCESSED or s3_code in _NOT_PROCESSED_CODES:
        kind = S3UnavailableError
    elif status in _UNKNOWN or s3_code in _UNKNOWN_CODES:
        kind = S3OutcomeUnknownError
    said = ": ".join(part for part in (s3_code, text) if part)
    return kind(
        f"{request}: {status} {said}".rstrip(),
        hint=_HINTS.get(s3_code, ""),
        status=status,
        s3_code=s3_code,
        request=request,
        request_id=answer.headers.get("x-amz-request-id", ""),
        region=answer.headers.get("x-amz-bucket-region", ""),
    )


def parse_document(body: bytes, *roots: str) -> ElementTree.Element:
    """The root of an XML answer without its namespaces; one of `roots` by name.

    Raises:
        S3ProtocolError: it is no such document, or declares a document type: no store
            does, and entities are an attack.
    """
    try:
        text = body.decode("utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise S3ProtocolError("the store sent a document type in XML")
        root = ElementTree.fromstring(text.strip().removeprefix("\ufeff").encode())
    except (UnicodeDecodeError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise S3ProtocolError(f"the store sent invalid XML: {error}") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag not in roots:
        raise S3ProtocolError(f"the store sent {root.tag}, not {' or '.join(roots)}")
    return root
