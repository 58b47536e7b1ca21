"""The questions of a probe are asked side by side, and leave nothing behind."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from botocore.credentials import Credentials

from proof.item import HashAlgorithm
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.probe_memory import (
    PROBE_AGE_MAX_S,
    PROBE_CHARACTERS_MAX,
    ProbeMemory,
)
from replicator.stores.s3_behaviour import CopyWay, EtagForm, S3Behaviour
from replicator.stores.s3_bucket import SCRATCH_PREFIX, S3Bucket
from replicator.stores.s3_probe import probe
from runtime.retry import Backoff
from runtime.s3 import Query, S3Client
from runtime.s3_answers import S3Answer, S3UnavailableError
from tests.support import s3_servers
from tests.support.replications import StepClock
from tests.support.stores import s3_client

_QUESTIONS = 5
_PATIENCE_S = 30
# Method, key, query and headers of a request.
Look = Callable[[str, str, Query, dict[str, str]], None]


class WatchedClient(S3Client):
    """A client whose requests somebody sees before they are sent."""

    def __init__(self, endpoint: s3_servers.S3Endpoint, look: Look) -> None:
        super().__init__(
            endpoint_url=endpoint.url,
            region=endpoint.region,
            credentials=Credentials(endpoint.access_key, endpoint.secret_key),
            backoff=Backoff(attempts_max=1),
        )
        self._look = look

    def request(self, method: str, bucket: str, key: str = "", **options: Any) -> S3Answer:
        """See S3Client."""
        self._look(method, key, options.get("query", ()), options.get("headers") or {})
        return super().request(method, bucket, key, **options)


@pytest.fixture(params=["ministack_server", "moto_server"])
def bucket(request: pytest.FixtureRequest) -> Iterator[s3_servers.S3Bucket]:
    endpoint: s3_servers.S3Endpoint = request.getfixturevalue(request.param)
    made = endpoint.fresh_bucket()
    yield made
    with endpoint.client() as client:
        assert "Contents" not in client.list_objects_v2(Bucket=made.name)
        assert "Uploads" not in client.list_multipart_uploads(Bucket=made.name)


def probed(
    bucket: s3_servers.S3Bucket, look: Look | None = None, memory: ProbeMemory | None = None
) -> S3Behaviour:
    """What a probe of this bucket finds out."""
    endpoint = bucket.endpoint
    client = s3_client(endpoint) if look is None else WatchedClient(endpoint, look)
    with closing(client):
        asked = S3Bucket(client, bucket.name, "", bucket.name)
        return probe(asked, may_write=True, memory=memory)


# One or more of each question, of which most are not what a probe begins with.
_ANSWERS = {
    "ministack_server": {
        "creates_conditionally": True,
        "put_if_match": EtagForm.QUOTED,
        "completes_conditionally": True,
        "copies_ranges": True,
        "copy_way": CopyWay.PARTS,
        "upload_crc": None,
        "declares_checksums": True,
    },
    "moto_server": {
        "creates_conditionally": True,
        "put_if_match": EtagForm.QUOTED,
        "completes_conditionally": False,
        "copies_ranges": True,
        "copy_way": CopyWay.ITSELF,
        "upload_crc": HashAlgorithm.CRC32,
        "declares_checksums": False,
    },
}


@pytest.mark.parametrize(("bucket", "answers"), _ANSWERS.items(), indirect=["bucket"])
def test_each_question_gets_its_own_answer(
    bucket: s3_servers.S3Bucket, answers: dict[str, object]
) -> None:
    """All have begun before any goes on, and each sees only its own objects."""
    asked = dict[str, set[int]]()
    all_began = threading.Barrier(_QUESTIONS)
    main, begun = threading.get_ident(), set[int]()

    def look(_method: str, key: str, _query: Query, _headers: dict[str, str]) -> None:
        thread = threading.get_ident()
        if key.startswith(SCRATCH_PREFIX):
            asked.setdefault(key, set()).add(thread)
        if thread not in {main, *begun}:
            begun.add(thread)
            all_began.wait(_PATIENCE_S)

    found = probed(bucket, look)
    assert {name: getattr(found, name) for name in answers} == answers
    assert {"upload_crc", "keeps_acls"} <= found.reasons.keys()
    assert found == probed(bucket)
    assert len(begun) == _QUESTIONS
    assert all(len(threads) == 1 for threads in asked.values())
    assert {thread for threads in asked.values() for thread in threads} == {main, *begun}


def _asks_condition(_method: str, _query: Query, headers: dict[str, str]) -> bool:
    return "if-none-match" in headers


def _asks_part(_method: str, query: Query, headers: dict[str, str]) -> bool:
    return ("partNumber", "1") in query and "x-amz-copy-source-range" in headers


def _asks_replacement(_method: str, _query: Query, headers: dict[str, str]) -> bool:
    return "x-amz-metadata-directive" in headers


def _asks_completion(method: str, query: Query, headers: dict[str, str]) -> bool:
    is_end = method == "POST" and any(name == "uploadId" for name, _ in query)
    return is_end and "x-amz-checksum-type" in headers


def _asks_checksum(method: str, query: Query, headers: dict[str, str]) -> bool:
    return method == "PUT" and not query and "x-amz-checksum-crc32c" in headers


@pytest.mark.parametrize(
    "is_asked",
    [_asks_condition, _asks_part, _asks_replacement, _asks_completion, _asks_checksum],
)
def test_an_error_of_one_question_is_that_of_the_probe(
    bucket: s3_servers.S3Bucket, is_asked: Callable[[str, Query, dict[str, str]], bool]
) -> None:
    failed = list[str]()

    def look(method: str, key: str, query: Query, headers: dict[str, str]) -> None:
        if is_asked(method, query, headers) and not failed:
            failed.append(key)
            raise S3UnavailableError("the one that failed", status=0)

    with pytest.raises(StoreUnavailableError, match="the one that failed"):
        probed(bucket, look)
    assert failed


class Questions:
    """Counts the requests that a probe sends, and those to objects."""

    def __init__(self) -> None:
        self.all = self.of_objects = 0

    def __call__(self, _method: str, key: str, _query: Query, _headers: dict[str, str]) -> None:
        self.all += 1
        self.of_objects += bool(key)


def test_what_the_last_syncer_knew_is_not_asked_again(bucket: s3_servers.S3Bucket) -> None:
    clock, asked = StepClock(), Questions()
    first = ProbeMemory(clock)
    known = probed(bucket, asked, first)
    assert asked.of_objects > 20
    assert first.text.isascii()
    assert first.text.isprintable()
    assert len(first.text) <= PROBE_CHARACTERS_MAX
    assert bucket.endpoint.secret_key not in first.text
    # The clock of another machine, which is behind.
    clock.pass_s(-60)
    second, asked = ProbeMemory(clock, first.text), Questions()
    assert probed(bucket, asked, second) == known
    # What kind of store answers, and whether it keeps versions.
    assert (asked.all, asked.of_objects) == (2, 0)
    assert second.agrees(first)
    clock.pass_s(PROBE_AGE_MAX_S + 61)
    third, asked = ProbeMemory(clock, second.text), Questions()
    assert probed(bucket, asked, third) == known
    assert asked.of_objects > 20
    assert third.text != second.text
    assert third.agrees(second)


@pytest.mark.parametrize("of", ["bucket", "versions", "account"])
def test_the_word_about_another_store_counts_for_nothing(
    bucket: s3_servers.S3Bucket, of: str
) -> None:
    clock = StepClock()
    first = ProbeMemory(clock)
    probed(bucket, memory=first)
    other = bucket
    match of:
        case "bucket":
            other = bucket.endpoint.fresh_bucket()
        case "account":
            endpoint = replace(bucket.endpoint, access_key="another")
            other = s3_servers.S3Bucket(endpoint, bucket.name)
        case "versions":
            with bucket.endpoint.client() as client:
                client.put_bucket_versioning(
                    Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
                )
    second, asked = ProbeMemory(clock, first.text), Questions()
    probed(other, asked, second)
    assert asked.of_objects > 20
    assert not second.agrees(first)
    if of == "versions":
        with bucket.endpoint.client() as client:
            client.put_bucket_versioning(
                Bucket=bucket.name, VersioningConfiguration={"Status": "Suspended"}
            )
            found = client.list_object_versions(Bucket=bucket.name)
            for one in [*found.get("Versions", []), *found.get("DeleteMarkers", [])]:
                client.delete_object(Bucket=bucket.name, Key=one["Key"], VersionId=one["VersionId"])


@pytest.mark.parametrize("text", ["", "x", "[]", '{"store":1}', '{"store":"a","probed_ms":1}'])
def test_a_text_that_is_no_record_is_asked_for_anew(bucket: s3_servers.S3Bucket, text: str) -> None:
    memory, asked = ProbeMemory(StepClock(), text), Questions()
    probed(bucket, asked, memory)
    assert asked.of_objects > 20
    assert memory.text != text


def test_a_store_that_does_other_things_now_does_not_agree(bucket: s3_servers.S3Bucket) -> None:
    first = ProbeMemory(StepClock())
    probed(bucket, memory=first)
    assert '"creates_conditionally":true' in first.text
    other = first.text.replace('"creates_conditionally":true', '"creates_conditionally":false')
    assert not ProbeMemory(StepClock(), other).agrees(first)
    assert not ProbeMemory(StepClock()).agrees(first)
