"""Every parser of what a bucket's far side or disk can say: messages of comparisons and
verifiers, answers of S3, indexes, ledgers, receipts. See fuzz_targets.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import numpy as np
from click.testing import CliRunner
from google.protobuf.message import Message

from admin.cli import treefold
from proof.answers import TargetAnswers
from proof.comparison import BucketComparison, SourceComparison
from proof.index import WHOLE
from proof.item import ID_BYTES, KEY_HASH_BYTES, ItemId
from proof.messages import AnswerMessage, NamesQuestion, QuestionMessage
from proof.receipts import ReceiptChain, verify_chain
from proof.spans import SPAN_ITEMS, SpanSums
from proof.stored_index import StoredIndex
from proof.symbols import ids_to_bytes
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from replicator.stores import s3_documents as documents
from replicator.stores.port import ObjectFacts
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket
from replicator.stores.s3_objects import S3Reader
from replicator.verifier import state
from runtime.disk import Disk
from runtime.s3 import S3Client, S3Stream
from runtime.s3_answers import S3Answer, error_of
from tests.support import proof_messages, verifier_messages
from tests.support.damaged_databases import DATABASES
from tests.support.fuzz_targets import Target, of_bytes, of_json, parsed_message
from tests.support.memory_index import PROFILE, no_windows
from tests.support.mutation import mutated_bytes, mutated_json
from tests.support.receipts import TRUSTED, chain_of
from tests.support.stored_indexes import fit, open_index, stamped

JOB = b"job of 8"


def bucket_targets() -> list[Target]:
    """The parsers of messages and documents."""
    return [*_proof(), *_verifier(), *_documents(), *_heads()]


def _proof() -> Iterator[Target]:
    def spans(raw: bytes) -> None:
        assert SpanSums.from_bytes(raw).to_bytes() == raw

    asked, answered = proof_messages.questions(), proof_messages.answers()
    yield Target("question", of_bytes(*asked), proof_messages.accept_question)
    yield Target("answer", of_bytes(*answered), proof_messages.accept_answer)
    stored = SpanSums()
    for number in range(3 * SPAN_ITEMS):
        stored.change(f"é{number}", None, ItemId(number.to_bytes(ID_BYTES, "big")))
    stored.rebalance(
        split=lambda whole, parts: [f"é{n}" for n in (2, 5, 7)],
        read_ids=lambda part: np.zeros((2, 2), np.uint64),
    )
    yield Target("span sums", of_bytes(stored.to_bytes()), spans)


def _verifier() -> Iterator[Target]:
    for one in verifier_messages.accepted():
        kind = type(one.seed)

        def accept(
            raw: bytes,
            accept: Callable[[Message], object] = one.accept,
            kind: type[Message] = kind,
        ) -> None:
            accept(parsed_message(kind, raw))

        name = f"verifier's {one.name}"
        yield Target(name, of_bytes(one.seed.SerializeToString(), kind=kind), accept)


def _sides(scratch: Path) -> tuple[StoredIndex, StoredIndex]:
    """Indexes of two buckets that differ, on disk."""
    sides = []
    for name, numbers in (("source", range(60)), ("target", range(10, 75))):
        index = open_index(scratch / name, profile=PROFILE)
        index.apply([(f"{number}", stamped(f"{number}")) for number in numbers])
        # A journal to rewind.
        index.apply([(f"{number}", stamped(f"{number}", 1)) for number in (10, 74)])
        sides.append(index)
    return sides[0], sides[1]


def _asked(scratch: Path) -> Target:
    """What a syncer asks a verifier."""
    _, index = _sides(scratch)
    far = TargetAnswers(index, PROFILE, no_windows)
    with index.snapshot() as now:
        ids = ids_to_bytes(now.ids(WHOLE))
        hashes = b"".join(ids[at : at + KEY_HASH_BYTES] for at in (0, ID_BYTES, 2 * ID_BYTES))
        names = NamesQuestion(now.position, hashes)

    def accept(raw: bytes) -> None:
        decode_answer(encode_answer(far.answer(decode_question(raw))))

    named = encode_question(QuestionMessage(JOB, 0, PROFILE.digest, names))
    return Target(
        "question to a verifier", of_bytes(*proof_messages.questions(), *[named] * 3), accept
    )


def _answered(scratch: Path) -> Target:
    """What a verifier answers a syncer."""
    source, target = _sides(scratch)
    far = TargetAnswers(target, PROFILE, no_windows)
    answered = map(encode_answer, _compared(source, far, None)[1])

    def accept(raw: bytes) -> None:
        """Sides that differ are never equal, whatever is said."""
        assert not _compared(source, far, decode_answer(raw))[0].is_equal

    return Target("answer to a syncer", of_bytes(*answered), accept)


def _compared(
    source: StoredIndex, far: TargetAnswers, lie: AnswerMessage | None
) -> tuple[BucketComparison, list[AnswerMessage]]:
    """What a comparison finds, and all its answers; `lie` is the one to the question of
    its number.
    """
    side, all_answers = SourceComparison(source, PROFILE, JOB), list[AnswerMessage]()
    questions = side.start()
    while questions:
        answers = [
            lie if lie and lie.number == one.number else far.answer(one) for one in questions
        ]
        all_answers += answers
        questions = side.step(answers)
    assert side.outcome is not None
    return side.outcome, all_answers


_LISTING = (
    '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>true'
    "</IsTruncated><EncodingType>url</EncodingType><NextContinuationToken>t"
    "</NextContinuationToken><Contents><Key>a%20b</Key><LastModified>2026-11-23T12:00:00.123Z"
    "</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size></Contents></ListBucketResult>"
)
_VERSIONS = (
    "<ListVersionsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
    "<DeleteMarker><Key>k</Key><VersionId>1</VersionId><IsLatest>true</IsLatest>"
    "<LastModified>2026-11-23T12:00:00Z</LastModified></DeleteMarker><Version><Key>j</Key>"
    "<VersionId>2</VersionId><LastModified>2026-11-23T12:00:00Z</LastModified><ETag>e</ETag>"
    "<Size>5</Size></Version></ListVersionsResult>"
)
_UPLOADS = (
    "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated><Upload><Key>k</Key>"
    "<UploadId>u</UploadId><Initiated>2026-11-23T12:00:00Z</Initiated></Upload>"
    "</ListMultipartUploadsResult>"
)
_PARTS = (
    "<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>1"
    "</NextPartNumberMarker><Part><PartNumber>1</PartNumber><Size>5</Size><ETag>e</ETag></Part>"
    "</ListPartsResult>"
)
_ACL = (
    "<AccessControlPolicy><Owner><ID>o</ID></Owner><AccessControlList><Grant><Grantee>"
    "<URI>u</URI></Grantee><Permission>READ</Permission></Grant></AccessControlList>"
    "</AccessControlPolicy>"
)
_DOCUMENTS: tuple[tuple[str, str, Callable[[bytes], object]], ...] = (
    ("listing", _LISTING, lambda raw: fit(documents.parse_listing(raw).objects)),
    ("versions", _VERSIONS, lambda raw: fit(documents.parse_versions(raw).versions)),
    ("uploads", _UPLOADS, documents.parse_uploads),
    ("parts", _PARTS, documents.parse_parts),
    ("grants", _ACL, documents.parse_grants),
    ("owner", _ACL, documents.parse_owner),
    (
        "tags",
        "<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>",
        documents.parse_tags,
    ),
    (
        "versioning",
        "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>",
        documents.parse_versioning,
    ),
    (
        "begun upload",
        "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
        documents.parse_upload_id,
    ),
    (
        "copied part",
        "<CopyPartResult><ETag>&quot;e&quot;</ETag></CopyPartResult>",
        documents.parse_copied_etag,
    ),
    (
        "completed upload",
        "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
        documents.parse_completed_etag,
    ),
    (
        "deletion",
        "<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>",
        documents.parse_delete_failures,
    ),
)
_ERROR = "<Error><Code>SlowDown</Code><Message>m</Message></Error>"
# What stands in answers of stores, in forms that none of them should have.
_TEXTS = (
    "", " ", "0", "-1", "+7", "\u0667", "7.0", "9" * 17, "9" * 19, "9" * 5000, "x" * 70_000,
    "true", "TRUE", "%", "%FF", "%00", '"', '""', 'W/"x"', '"a"b"', "0001-01-01T00:00:00+23:59",
    "0001-01-01", "9999-12-31T23:59:59-23:59", "2026-13-40T99:99", "1", "rot13", "\ufffe",
)  # fmt: skip


def _documents() -> Iterator[Target]:
    for name, sample, parse in _DOCUMENTS:
        yield Target(f"S3 {name}", _xml(sample), parse)
    yield Target("S3 error", _xml(_ERROR), _error, refuses=False)


def _error(raw: bytes) -> None:
    found = error_of(S3Answer(503, {}, raw), "GET b/k")
    assert found.status == 503
    assert found.retryable


def _xml(sample: str) -> Callable[[random.Random], bytes]:
    """The document damaged as bytes, or with elements of other text or place."""

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutated_bytes(rng, sample.encode(), [_ERROR.encode(), sample.encode()])
        root = ElementTree.fromstring(sample)
        for _ in range(rng.choice((1, 1, 2, 5))):
            parents = [one for one in root.iter() if len(one)]
            if not 0 < len(parents) < 100:
                break
            parent = rng.choice(parents)
            child = rng.choice(list(parent))
            match rng.randrange(5):
                case 0:
                    parent.remove(child)
                case 1:
                    parent.extend([copy.deepcopy(child) for _ in range(rng.choice((1, 3, 200)))])
                case 2 if len(child):
                    child.append(copy.deepcopy(root))
                case 3:
                    child.tag = rng.choice([one.tag for one in root.iter()])
                case _:
                    child.text = rng.choice(_TEXTS)
        return ElementTree.tostring(root)

    return make


@dataclass(frozen=True)
class _OneAnswer:
    """A client of S3 that gets one answer to everything."""

    status: int
    headers: Mapping[str, str]

    def request(self, *_: object, **__: object) -> S3Answer:
        return S3Answer(self.status, self.headers, b"")

    @contextmanager
    def stream(self, *_: object, **__: object) -> Iterator[S3Stream]:
        yield S3Stream(self.status, self.headers, iter((b"1234", b"567")))


_MD5 = "0cc175b9c0f1b6a831c399e269772661"
_HEAD = {
    "etag": f'"{_MD5}"',
    "content-length": "7",
    "content-range": "bytes 0-6/20",
    "last-modified": "Mon, 23 Nov 2026 12:00:00 GMT",
    "x-amz-version-id": "v",
    "x-amz-checksum-type": "FULL_OBJECT",
    "x-amz-checksum-crc32c": "yZRlqg==",
    "x-amz-meta-name": "value",
    "content-encoding": "gzip,aws-chunked",
}
_HEADERS = (
    *_TEXTS, _MD5, f'"{_MD5}-3"', f'W/"{_MD5}"', "bytes 0-6/*", "bytes */20", "bytes 1-7/20",
    "bytes 0-6", "items 0-6/20", "Mon, 23 Nov 2026 12:00:00 +99999999999999999999",
    "Mon, 23 Nov 0000 12:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 +2359", "Mon, 23 Nov 2026",
    "Fri, 31 Dec 9999 23:59:59 -2359", "yZRl", "====", "COMPOSITE", "\xff\xfe",
)  # fmt: skip


def _heads() -> Iterator[Target]:
    """Heads of answers: of one object, and of a range of it."""

    def make(rng: random.Random) -> bytes:
        headers = dict(_HEAD)
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice(list(_HEAD))
            headers[name] = rng.choice((*_HEADERS, _HEAD[name] * 2, _HEAD[name][:-1]))
            if rng.random() < 0.2:
                del headers[name]
        status = rng.choice((200, 206, 206, 206, 204))
        return json.dumps({"status": status, "headers": headers}).encode()

    def bucket(raw: bytes) -> S3Bucket:
        client = cast(S3Client, _OneAnswer(**json.loads(raw)))
        made = S3Bucket(client, "b", "", "b")
        made.behaviour = S3Behaviour(keeps_versions=True, etag_is_md5=True, keeps_headers=True)
        return made

    def head(raw: bytes) -> None:
        reader = S3Reader(bucket(raw))
        facts = reader.facts("k")
        assert facts is not None
        fit([facts])
        fit([replace(facts, hashes=facts.hashes[1:])])
        reader.properties("k")

    def part(raw: bytes) -> None:
        facts = ObjectFacts("k", 20, _MD5, 0, "v")
        with S3Reader(bucket(raw)).read(facts, first=0, end=7) as pieces:
            assert b"".join(pieces) == b"1234567"
        # What was read said that it is this range, or nothing of it.
        said = json.loads(raw)["headers"].get("content-range")
        assert not said or said.startswith("bytes 0-6/")

    yield Target("S3 head", make, head)
    yield Target("S3 range", make, part)


def _receipts(scratch: Path) -> Target:
    """The file of receipts: verified, continued, and shown."""
    lines, _ = chain_of(3)
    path, runner = scratch / "receipts.jsonl", CliRunner()

    def make(rng: random.Random) -> bytes:
        changed = list(lines)
        at = rng.randrange(len(lines))
        if rng.random() < 0.3:
            changed[at] = mutated_bytes(rng, lines[at], lines)
        else:
            document = mutated_json(rng, json.loads(lines[at]))
            # In the one form of a record, as far as it still is one.
            text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
            changed[at] = text.encode(errors="surrogatepass") + b"\n"
        return b"".join(changed)

    def accept(raw: bytes) -> None:
        report = verify_chain(raw, trusted=TRUSTED)
        assert report.broken is not None or raw == b"".join(lines[: report.head.records])
        path.write_bytes(raw)
        for flags in ((), ("--json",)):
            shown = runner.invoke(treefold, ["bucket", "receipts", "show", str(path), *flags])
            assert shown.exit_code in (0, 3), shown.exception
        chain = ReceiptChain(path, Disk())
        assert chain.head.records <= len(lines)

    return Target("receipts", make, accept)


def _profile(scratch: Path) -> Target:
    """The profile of a verifier's state folder."""
    kept = {"bucket": "local:/b", "secret": "07" * 32, "algorithm": "blake3"}
    document = {**kept, "properties": list(PROFILE.properties)}
    folder = scratch / "state"
    folder.mkdir()

    def accept(raw: bytes) -> None:
        (folder / "profile.json").write_bytes(raw)
        found = state._profile(folder, Disk(), "local:/b", None, ())
        assert len(found.digest) == ID_BYTES

    return Target("verifier's profile", of_json(document), accept)


# The parsers of files, and of what is answered from them, which are made in a folder.
BUCKET_FILES: Mapping[str, Callable[[Path], Target]] = {
    "question to a verifier": _asked,
    "answer to a syncer": _answered,
    "receipts": _receipts,
    "verifier's profile": _profile,
    **DATABASES,
}
