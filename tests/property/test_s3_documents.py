"""Documents of S3: what is written is read back, and no other bytes are understood."""

from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.stores import s3_documents as documents
from replicator.stores.port import ObjectProperties, UploadedPart
from replicator.stores.s3_documents import fits_xml
from replicator.stores.s3_properties import content_headers_of, headers_of, metadata_of
from runtime.s3_answers import S3ProtocolError, parse_document

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ENTRY = (
    "<Contents><Key>{key}</Key><LastModified>2026-11-23T12:00:00.123Z</LastModified>"
    "<ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>"
)
LISTING = (
    '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    "<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>{entries}</ListBucketResult>"
)


@given(st.lists(KEYS, max_size=5))
def test_encoded_keys_are_read_as_they_were(keys: list[str]) -> None:
    entries = "".join(ENTRY.format(key=quote(key, safe="")) for key in keys)
    page = documents.parse_listing(LISTING.format(entries=entries).encode())
    assert [facts.key for facts in page.objects] == keys
    assert {facts.etag for facts in page.objects} <= {"e"}
    assert {facts.modified_ms % 1000 for facts in page.objects} <= {123}


@given(st.lists(st.tuples(KEYS.filter(fits_xml), st.sampled_from(["", "v&1"])), max_size=5))
def test_keys_to_delete_survive_a_parser(objects: list[tuple[str, str]]) -> None:
    root = parse_document(documents.delete_document(objects), "Delete")
    found = [
        (entry.findtext("Key"), entry.findtext("VersionId") or "")
        for entry in root.iterfind("Object")
    ]
    assert found == objects
    assert root.findtext("Quiet") == "true"


@given(st.dictionaries(KEYS.filter(fits_xml), st.text().filter(fits_xml), max_size=5))
def test_tags_are_read_as_they_were_written(tags: dict[str, str]) -> None:
    wanted = sorted((a.replace("\r", "\n"), b.replace("\r", "\n")) for a, b in tags.items())
    found = documents.parse_tags(documents.tags_document(sorted(tags.items())))
    assert sorted((a.replace("\r", "\n"), b.replace("\r", "\n")) for a, b in found) == wanted


@given(
    st.dictionaries(st.from_regex(r"[a-z0-9._-]{1,9}", fullmatch=True), st.text("!a ~", max_size=5))
)
def test_metadata_is_read_as_it_was_sent(metadata: dict[str, str]) -> None:
    given_pairs = tuple(sorted(metadata.items()))
    properties = ObjectProperties(metadata=given_pairs, tags=(("a", "b"),))
    headers = headers_of(properties, with_tags=False)
    assert metadata_of(headers) == given_pairs
    assert len(headers) == len(metadata)
    assert headers_of(properties, with_tags=True)["x-amz-tagging"] == "a=b"
    assert content_headers_of(headers) == ()


@pytest.mark.parametrize(
    "broken",
    [
        LISTING.format(entries=ENTRY.format(key="k").replace("7", "-7")),
        LISTING.format(entries=ENTRY.format(key="k").replace("7", "\u0667")),
        LISTING.format(entries=ENTRY.format(key="k").replace("7", "9" * 16)),
        LISTING.format(entries=ENTRY.format(key="k").replace("2026", "noon")),
        LISTING.format(entries=ENTRY.format(key="k").replace("2026", "1969")),
        LISTING.format(entries=ENTRY.format(key="")),
        LISTING.format(entries=ENTRY.format(key="%FF")),
        LISTING.format(entries=ENTRY.format(key="k")).replace("url", "rot13"),
        LISTING.format(entries="").replace("false", "true"),
        LISTING.format(entries="").replace("false", "maybe"),
    ],
)
def test_a_listing_that_is_half_understood_is_an_error(broken: str) -> None:
    with pytest.raises(S3ProtocolError):
        documents.parse_listing(broken.encode())


def test_a_missing_object_counts_as_deleted_and_others_are_named() -> None:
    said = "".join(
        f"<Error><Key>{escape(key)}</Key><Code>{code}</Code><Message>m</Message></Error>"
        for key, code in (("a&b", "AccessDenied"), ("gone", "NoSuchKey"))
    )
    (failure,) = documents.parse_delete_failures(f"<DeleteResult>{said}</DeleteResult>".encode())
    assert (failure.key, failure.reason) == ("a&b", "AccessDenied: m")


@pytest.mark.parametrize(
    ("sent", "etag"),
    [("<ETag>&quot;e-2&quot;</ETag>", "e-2"), ('<ETag>"e"</ETag>', "e"), ("<ETag/>", ""), ("", "")],
)
def test_a_completed_upload_has_an_etag_or_none(sent: str, etag: str) -> None:
    body = f"<CompleteMultipartUploadResult>{sent}</CompleteMultipartUploadResult>"
    assert documents.parse_completed_etag(body.encode()) == etag


def test_parts_are_named_in_order() -> None:
    body = documents.complete_document([UploadedPart(1, 5, "a"), UploadedPart(3, 5, 'b"')])
    root = parse_document(body, "CompleteMultipartUpload")
    assert [part.findtext("PartNumber") for part in root] == ["1", "3"]
    assert [part.findtext("ETag") for part in root] == ["a", 'b"']


def test_the_owners_own_grant_is_no_property() -> None:
    grant = "<Grant><Grantee><ID>{}</ID></Grantee><Permission>{}</Permission></Grant>"
    grants = grant.format("o", "FULL_CONTROL") + grant.format("o", "READ")
    body = (
        "<AccessControlPolicy><Owner><ID>o</ID></Owner>"
        f"<AccessControlList>{grants}</AccessControlList></AccessControlPolicy>"
    )
    assert documents.parse_grants(body.encode()) == (('id="o"', "READ"),)
    assert documents.parse_owner(body.encode()) == "o"
