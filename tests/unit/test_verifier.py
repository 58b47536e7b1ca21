"""A verifier beside a bucket: what it proves, and what it writes."""

from pathlib import Path

import pytest

from proof.comparison import BucketComparison, SourceComparison
from proof.naming import ItemDifferenceKind
from replicator.hashing import blake3_of
from replicator.verifier.values import PatchOrder, RangePatch, Write
from tests.support.s3_servers import S3Bucket
from tests.support.stores import ANYTHING, NOTHING, current, put
from tests.support.verifiers import VerifiedPair, fill, held, verified_pair


def compare(pair: VerifiedPair, job: bytes = b"job12345") -> BucketComparison:
    """One comparison, question by question."""
    comparison = SourceComparison(pair.bucket.index, pair.profile, job)
    questions = comparison.start()
    while questions:
        questions = comparison.step([pair.client.prove(question) for question in questions])
    assert comparison.outcome is not None
    return comparison.outcome


def check_pair(pair: VerifiedPair) -> None:
    """Differences are found, sent as writes, and gone."""
    fill(pair.source, 40)
    fill(pair.target, 30)
    put(pair.target, "extra")
    put(pair.target, "00003-é", b"other")
    pair.refresh_source()
    pair.client.refresh(pair.profile)
    found = compare(pair)
    kinds = {one.key: one.kind for one in found.differences}
    assert kinds["extra"] is ItemDifferenceKind.EXTRA
    assert kinds["00003-é"] is ItemDifferenceKind.CHANGED
    assert list(kinds.values()).count(ItemDifferenceKind.MISSING) == 10
    assert len(kinds) == 12
    writes, source = list[Write](), held(pair.source)
    for one in found.differences:
        if one.kind is not ItemDifferenceKind.EXTRA:
            body, properties = source[one.key]
            writes.append(Write(one.key, body, properties, blake3_of(body), one.theirs_id))
    [result] = pair.client.write(pair.profile, [writes])
    assert [one for one in result.results if one.error] == []
    extras = [one.theirs_id for one in found.differences if one.ours is None and one.theirs_id]
    assert pair.client.delete(pair.profile, extras) == []
    assert compare(pair, b"job12346").is_equal
    assert {k: b for k, (b, _) in held(pair.target).items()} == {
        k: b for k, (b, _) in source.items()
    }


def test_differences_are_found_and_gone_once_they_are_written(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        check_pair(pair)


def test_a_bucket_on_s3_is_proven_alike(
    tmp_path: Path, ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = ministack_bucket.endpoint
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    address = f"s3://{ministack_bucket.name}/below?endpoint_url={endpoint.url}"
    with verified_pair(tmp_path, address) as pair:
        check_pair(pair)


@pytest.mark.parametrize("size", [1_000_000, 20_000_000])
def test_a_patched_object_is_what_was_ordered(tmp_path: Path, size: int) -> None:
    with verified_pair(tmp_path) as pair:
        old = b"ab" * (size // 2)
        pair.target.writer.put("k", old, NOTHING, ANYTHING)
        new = old[:1000] + b"xyz" + old[1002:] + b"tail"
        pair.source.writer.put("k", new, NOTHING, ANYTHING)
        pair.refresh_source()
        pair.client.refresh(pair.profile)
        [one] = compare(pair).differences
        assert one.theirs_id is not None
        order = PatchOrder("k", one.theirs_id, len(new), blake3_of(new), NOTHING)
        patches = [RangePatch(1000, 2, b"xyz"), RangePatch(size, 0, b"tail")]
        facts, _ = pair.client.patch(pair.profile, order, patches)
        assert facts.size_bytes == len(new)
        assert held(pair.target)["k"] == (new, NOTHING)
        assert current(pair.target, "k").etag == facts.etag
        assert compare(pair, b"job12346").is_equal
