"""A verifier beside a bucket: what it proves, and what it writes."""

import random
import threading
from contextlib import closing
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from proof.comparison import BucketComparison, SourceComparison
from proof.index import AppliedPositions, EvidenceCounts, KeyRange, Position
from proof.item import HashAlgorithm, Profile
from proof.messages import Answer, QuestionMessage, WindowsAnswer, WindowsQuestion
from proof.naming import ItemDifferenceKind
from proof.root import SetRoot
from protos import verifier_pb2 as pb
from replicator.hashing import blake3_of
from replicator.proving import level_text
from replicator.refresh import prefix_range
from replicator.verifier.client import VerifierClient
from replicator.verifier.messages import index_state_from, run_from
from replicator.verifier.process import VerifierProcess
from replicator.verifier.run_fence import RunFence, RunSupersededError
from replicator.verifier.values import PatchOrder, RangePatch, RunName, Write
from runtime.errors import DiskError, RemoteProtocolError, UsageError
from tests.support.audit_files import audit_lines, check_folder
from tests.support.s3_servers import S3Bucket
from tests.support.stores import ANYTHING, NOTHING, current, put
from tests.support.verifiers import VerifiedPair, config_of, fill, held, verified_pair


def compare(pair: VerifiedPair, job: bytes = b"job12345") -> BucketComparison:
    """One comparison, question by question."""
    comparison = SourceComparison(pair.bucket.index, pair.profile, job)
    questions = comparison.start()
    while questions:
        questions = comparison.step([pair.client.prove(question) for question in questions])
    assert comparison.outcome is not None
    return comparison.outcome


def check_audit(pair: VerifiedPair, written: list[str]) -> None:
    """The verifier's audit file names who wrote and deleted what."""
    path = pair.folder / "verifier" / "audit.jsonl"
    put_line, *deletes = audit_lines(path)
    counts = {name: put_line[name] for name in ("kind", "objects", "replaced", "first", "last")}
    assert counts == {
        "kind": "put",
        "objects": 11,
        "replaced": 1,
        "first": min(written),
        "last": max(written),
    }
    assert str(put_line["who"]).endswith(" (unproven)")
    assert [(line["kind"], line["key"]) for line in deletes] == [("delete", "extra")]
    assert check_folder(path.parent).broken is None


def test_nothing_is_written_that_cannot_be_recorded(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        put(pair.target, "old", b"old")
        pair.client.refresh(pair.profile)
        [old] = compare(pair).differences
        before = held(pair.target)
        audit = tmp_path / "verifier" / "audit.jsonl"
        audit.unlink()
        audit.mkdir()
        write = Write("new", b"new", NOTHING, blake3_of(b"new"), None)
        with pytest.raises(DiskError, match="audit"):
            list(pair.client.write(pair.profile, [[write]]))
        assert old.theirs_id
        with pytest.raises(DiskError, match="audit"):
            pair.client.delete(pair.profile, [old.theirs_id])
        assert held(pair.target) == before


def test_an_audit_file_in_the_bucket_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    config = config_of(tmp_path / "state", f"local:{tmp_path / 'bucket'}")
    inside = {"audit_file": tmp_path / "bucket" / "audit.jsonl"}
    with pytest.raises(UsageError, match="is inside the bucket"):
        VerifierProcess(config.model_copy(update=inside))
    assert list((tmp_path / "bucket").iterdir()) == []


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
    assert pair.client.delete(pair.profile, extras).refusals == ()
    assert compare(pair, b"job12346").is_equal
    check_audit(pair, [write.key for write in writes])
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
    endpoint.set_environment(monkeypatch)
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


def test_a_prefix_ends_before_the_first_key_that_does_not_begin_so() -> None:
    for prefix, end in (
        ("", None),
        ("a/", "a0"),
        ("a\U0010ffff", "b"),
        ("\U0010ffff", None),
        ("\ud7ff", "\ue000"),
    ):
        assert prefix_range(prefix) == KeyRange(prefix, end)


@pytest.mark.parametrize(
    ("ours", "theirs", "level"),
    [
        ((0, 0, 5), (0, 0, 5), "read"),
        ((0, 1, 4), (0, 0, 5), "recorded"),
        ((0, 0, 5), (0, 5, 0), "recorded"),
        ((1, 0, 4), (0, 0, 5), "listed"),
        ((0, 0, 5), (1, 2, 2), "listed"),
        ((0, 0, 0), (0, 0, 0), "listed"),
    ],
)
def test_a_level_is_that_of_the_weakest_item(
    ours: tuple[int, int, int], theirs: tuple[int, int, int], level: str
) -> None:
    root, at = SetRoot(5, 7), Position(1)
    evidence = (EvidenceCounts(*ours), EvidenceCounts(*theirs))
    found = BucketComparison(b"j" * 8, root, root, AppliedPositions(at), at, *evidence)
    name = level if level == "listed" else f"{level}:blake3"
    assert level_text(found, Profile(b"s" * 32, HashAlgorithm.BLAKE3)) == name
    assert level_text(found, Profile(b"s" * 32)) == "listed"


def test_windows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        put(pair.target, "empty", b"")
        put(pair.target, "k", bytes(40_000))

        def asked(key: str, level: int, index: int) -> Answer:
            question = WindowsQuestion(key, "", level, index)
            message = QuestionMessage(b"job12345", 0, pair.profile.digest, question)
            return pair.client.prove(message).answer

        found = asked("k", 0, 0)
        assert isinstance(found, WindowsAnswer)
        assert len(found.checksums) == 3
        for place, code in (
            (("none", 0, 0), "object_missing"),
            (("empty", 0, 0), "usage"),
            (("k", 0, 1), "usage"),
            (("k", 2, 0), "usage"),
            (("k", 2**63, 2**63), "usage"),
        ):
            with pytest.raises(ReconcileError) as caught:
                asked(*place)
            assert caught.value.code == code


@pytest.mark.parametrize("length", [1, 5, 7, 6 * 10_001])
def test_damaged_keys_are_named_by_whole_hashes_and_not_too_many(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="damaged"):
        index_state_from(pb.IndexState(damaged=bytes(length)))


@pytest.mark.parametrize("size", [1_000_000, 20_000_000])
def test_a_run_that_another_has_followed_changes_nothing(tmp_path: Path, size: int) -> None:
    with verified_pair(tmp_path) as pair, closing(VerifierClient(pair.client.address)) as later:
        body = random.Random(7).randbytes(size)
        put(pair.target, "large", body)
        put(pair.target, "extra")
        for client in (pair.client, later):
            client.begin_run(b"one pair")
            client.refresh(pair.profile)
        pair.refresh_source()
        ids = {one.key: one.theirs_id for one in compare(pair).differences}
        before = held(pair.target)
        write = Write("new", b"new", NOTHING, blake3_of(b"new"), None)
        base, extra = ids["large"], ids["extra"]
        assert base is not None
        assert extra is not None
        patched = body[:9] + b"!" + body[10:]
        order = PatchOrder("large", base, size, blake3_of(patched), NOTHING)
        patch = [RangePatch(9, 1, b"!")]
        with pytest.raises(RunSupersededError):
            list(pair.client.write(pair.profile, [[write]]))
        with pytest.raises(RunSupersededError):
            pair.client.delete(pair.profile, [extra])
        with pytest.raises(RunSupersededError):
            pair.client.patch(pair.profile, order, patch)
        assert held(pair.target) == before
        assert not list(pair.target.upload_reader.uploads(""))
        audit = tmp_path / "verifier" / "audit.jsonl"
        assert not audit.exists() or not {"put", "patch", "delete"} & {
            line["kind"] for line in audit_lines(audit)
        }
        # A later refresh of the first does not make it the latest again.
        pair.client.refresh(pair.profile)
        [result] = later.write(pair.profile, [[write]])
        assert not result.results[0].error
        later.patch(pair.profile, order, patch)
        # Runs of other pairs go on beside it.
        pair.client.begin_run(b"2nd pair")
        pair.client.refresh(pair.profile)
        assert pair.client.delete(pair.profile, [extra]).refusals == ()
        assert later.delete(pair.profile, [extra]).refusals


@pytest.mark.parametrize(("pair", "run"), [(b"", b"x" * 8), (b"x" * 8, b"x" * 9)])
def test_a_run_has_a_name_of_its_length(pair: bytes, run: bytes) -> None:
    with pytest.raises(UsageError, match="name of a run"):
        run_from(pb.Run(pair=pair, run=run))


def test_of_many_pairs_the_latest_runs_are_known() -> None:
    fence = RunFence(threading.Lock())
    names = [number.to_bytes(8, "big") for number in range(1_100)]
    for name in names:
        fence.begin(RunName(name, b"one"))
    fence.check(RunName(names[0], b"two"))
    fence.check(None)
    with pytest.raises(RunSupersededError):
        fence.check(RunName(names[-1], b"two"))
