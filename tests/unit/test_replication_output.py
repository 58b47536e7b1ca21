"""What commands say of replications, and how they end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from admin.bucket_failover import way_back_policy, why_not_back
from admin.bucket_policies import prechecked
from admin.bucket_status import backlog_json, print_backlog, status_exit
from admin.client_steps import client_steps
from admin.cluster_status import ClusterAnswer, Health, exit_status_of, health_of, problems_of
from admin.master_status import MasterAnswer, lines_of_masters, masters_json, problems_of_masters
from admin.policy_options import rate_of
from admin.replication_output import position_json, status_lines, view_json
from proof.item import EvidenceLevel
from replicator.backlog import ReplicationBacklog, read_backlog
from replicator.master.config import MasterConfig
from replicator.master.messages import checked_answer
from replicator.master.view_messages import status_from, status_to, view_from, view_to
from replicator.master.views import ReplicationView, rpo_ms
from replicator.replication import (
    FAILED_KEYS_MAX,
    Checkpoint,
    Condition,
    DesiredState,
    FailedKey,
    ReplicationFault,
    ReplicationReport,
    Stage,
)
from replicator.stores.port import FeedPosition, ObjectFacts
from replicator.verify import KeyDifferenceKind, VerifiedKey
from replicator.way_back import NAMED_MAX, way_back
from runtime.config import load
from runtime.errors import ConfigError, RemoteProtocolError, UsageError
from runtime.exit_codes import ExitCode
from tests.support.master_records import A_HOLDER, A_STATUS, A_VIEW, P1, report
from tests.support.memory_store import MemoryStore

FINE = replace(
    A_VIEW,
    record=replace(A_VIEW.record, failed_over_ms=None, returns_policy=None),
    state=replace(
        A_VIEW.state, report=replace(report(4), proven_position=FeedPosition("log", 4), proven_ms=0)
    ),
)


def with_report(view: ReplicationView, **changes: object) -> ReplicationView:
    assert view.state.report is not None
    found = replace(view.state.report, **changes)
    return replace(view, state=replace(view.state, report=found))


def test_a_view_and_a_status_cross_the_wire_whole() -> None:
    assert view_from(view_to(A_VIEW)) == A_VIEW
    assert status_from(status_to(A_STATUS)) == A_STATUS
    named = FailedKey("k", ReplicationFault.OBJECT_FAILED, "its tags are gone")
    failing = with_report(A_VIEW, failed=2, failed_keys=(named,))
    assert view_from(view_to(failing)) == failing


def test_a_time_that_cannot_be_written_down_is_refused() -> None:
    message = view_to(A_VIEW)
    message.now_ms = 1 << 60
    with pytest.raises(RemoteProtocolError), checked_answer():
        view_from(message)


def test_the_document_has_every_field_that_is_stored() -> None:
    """OZ-129, OZ-132 to OZ-136."""
    document = view_json(A_VIEW)
    assert json.loads(json.dumps(document)) == document
    assert document["syncer"] == {
        "id": "s1", "session": "session", "host": "host-1", "since": "1970-01-01T00:00:00Z",
    }  # fmt: skip
    assert (document["target"], document["epoch"], document["returns"]) == (
        "local:/copy/p1", 2, "p2",
    )  # fmt: skip
    found, error = document["report"], document["error"]
    assert isinstance(found, dict)
    assert isinstance(error, dict)
    assert found["position"] == {"log": "log", "index": "5"}
    assert found["stage"] == "LIVE"
    assert error["fault"] == "target_full"
    assert document["lastSeenAt"]


def test_an_index_of_64_bits_keeps_its_digits() -> None:
    assert position_json(FeedPosition("log", (1 << 63) - 1)) == {
        "log": "log",
        "index": "9223372036854775807",
    }


def test_status_says_up_to_where_it_is_equal() -> None:
    text = "\n".join(status_lines(with_report(FINE, oldest_unproven_ms=FINE.now_ms)))
    assert "equal up to position 4" in text
    assert "RPO 0" in text
    assert "UNKNOWN" not in text


def test_a_source_without_a_log_is_equal_at_the_time_of_a_comparison() -> None:
    """There is no position, and the last comparison does not hide the proof."""
    rounds = with_report(
        FINE,
        checkpoint=Checkpoint(prefixes=("",)),
        proven_position=None,
        proven_ms=FINE.now_ms - 120_000,
        proof_level="recorded:CRC64",
    )
    text = "\n".join(status_lines(rounds))
    assert "equal at the time of the comparison (2m ago, level recorded:CRC64)" in text
    assert "up to" not in text
    later = "\n".join(status_lines(with_report(rounds, differences=2)))
    assert "equal at the time of the comparison (2m ago" in later
    assert "the last comparison found 2 differences" in later
    assert "not proven equal yet" in "\n".join(status_lines(with_report(rounds, proven_ms=None)))


def test_what_is_not_known_is_unknown_with_reason_and_age() -> None:
    silent = replace(
        FINE, condition=Condition.UNKNOWN, reason="syncer s1 was last heard of 9 s ago"
    )
    lines = list(status_lines(replace(silent, now_ms=65_010)))
    assert lines[0] == "UNKNOWN: syncer s1 was last heard of 9 s ago"
    assert "1m ago" in lines[1]
    assert "RPO UNKNOWN" in "\n".join(lines)
    assert rpo_ms(silent) is None


@pytest.mark.parametrize(
    ("oldest_ms", "proven", "expected"),
    [(4, True, 8), (4, False, 8), (None, True, None), (None, False, None), (99, True, 0)],
)
def test_the_rpo_is_the_age_of_the_oldest_change_that_is_not_proven(
    oldest_ms: int | None, proven: bool, expected: int | None
) -> None:
    position = FeedPosition("log", 4) if proven else None
    view = with_report(FINE, oldest_unproven_ms=oldest_ms, proven_position=position)
    assert rpo_ms(view) == expected


def test_the_rpo_is_not_known_while_keys_are_compared_that_were_added() -> None:
    """OZ-161: changes there may be of any age."""
    view = with_report(FINE, oldest_unproven_ms=4, checkpoint=Checkpoint(prefixes=("a/",)))
    record = view.record
    for wanted, is_known in (
        (("a/",), True),
        (("a/b/",), True),
        (("a/", "b/"), False),
        ((), False),
    ):
        policy = replace(record.policy, prefixes=wanted)
        found = replace(view, record=replace(record, policy=policy))
        assert (rpo_ms(found) is not None) is is_known
        text = "\n".join(status_lines(found))
        assert ("compared for the first time" in text) is not is_known


@pytest.mark.parametrize(
    ("known", "wanted", "words"),
    [
        (("in/",), (), "all other keys"),
        ((), (), "all keys"),
        ((), ("out/",), "keys below out/"),
        (("in/",), ("in/", "out/", "x/"), "keys below out/, x/"),
    ],
)
def test_a_report_that_is_older_than_an_order_proves_nothing_of_other_keys(
    known: tuple[str, ...], wanted: tuple[str, ...], words: str
) -> None:
    """OZ-161."""
    at = Checkpoint(Stage.LIVE, position=FeedPosition("log", 4), prefixes=known)
    view = with_report(FINE, checkpoint=at, proof_level="recorded:CRC64", differences=0)
    policy = replace(view.record.policy, prefixes=wanted)
    view = replace(view, record=replace(view.record, policy=policy))
    text = "\n".join(status_lines(view))
    assert f"being compared for the first time: {words}" in text
    assert "not proven equal yet" in text
    assert "equal up to" not in text
    document = view_json(view)["report"]
    assert isinstance(document, dict)
    for name in ("equalUpTo", "provenAt", "proofLevel", "differences"):
        assert document[name] is None
    found = view_json(with_report(view, differences=2))["report"]
    assert isinstance(found, dict)
    assert found["differences"] == 2


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (FINE, 0),
        (replace(FINE, condition=Condition.PAUSED), 0),
        (replace(FINE, condition=Condition.ERROR), 3),
        (with_report(FINE, differences=2), 3),
        (replace(FINE, condition=Condition.UNKNOWN), 5),
        (replace(FINE, condition=Condition.UNASSIGNED), 5),
        (replace(FINE, condition=Condition.WAITING), 5),
        (replace(A_VIEW, condition=Condition.UNASSIGNED), 0),
    ],
)
def test_the_exit_status_says_how_it_is(view: ReplicationView, expected: int) -> None:
    assert status_exit([FINE, view]) == expected


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (FINE, ""),
        (replace(FINE, condition=Condition.WAITING), "WAITING"),
        (replace(FINE, condition=Condition.UNKNOWN, reason="silent"), "silent"),
        (replace(FINE, state=replace(FINE.state, report=None)), "nothing"),
        (with_report(FINE, checkpoint=Checkpoint()), "first copy"),
        (with_report(FINE, queued=1), "wait"),
        (with_report(FINE, failed=1), "failed"),
    ],
)
def test_a_way_back_is_not_compared_while_it_works(view: ReplicationView, words: str) -> None:
    why = why_not_back(view)
    assert words in why
    assert bool(words) == bool(why)


def verified(kind: KeyDifferenceKind | None, *, newer: str = "target") -> VerifiedKey:
    """A key of the failed-over target, which is the source of the comparison."""
    ours = facts_at(2_000 if newer == "target" else 1_000)
    theirs = facts_at(1_000 if newer == "target" else 2_000)
    name = kind.value if kind else "equal"
    return VerifiedKey(f"{name}-{newer}", ours, theirs, EvidenceLevel.RECORDED, kind)


def is_newer_at_source(one: VerifiedKey) -> bool:
    return one.key.endswith("-source")


def facts_at(modified_ms: int) -> ObjectFacts:
    return ObjectFacts("k", 1, "etag", modified_ms)


def test_a_way_back_ends_only_if_all_is_back_or_something_newer_is_there() -> None:
    """OZ-151: conflicts are named; what only the source has is named too, and stays."""
    fine = [
        verified(None),
        verified(KeyDifferenceKind.EXTRA),
        verified(KeyDifferenceKind.CHANGED, newer="source"),
    ]
    report = way_back(fine, is_newer_at_source)
    assert report.is_back
    assert (report.equal, report.unproven) == (1, 0)
    assert report.kept.named == ("changed-source",)
    assert report.only_at_source.named == ("extra-target",)
    for bad in (
        verified(KeyDifferenceKind.MISSING),
        verified(KeyDifferenceKind.DAMAGED),
        verified(KeyDifferenceKind.CHANGED),
        replace(verified(None), is_unsettled=True),
    ):
        lacking = way_back([*fine, bad], is_newer_at_source)
        assert not lacking.is_back
        assert lacking.lacking.named == (bad.key,)
    listed = replace(verified(None), level=EvidenceLevel.LISTED)
    assert way_back([listed], is_newer_at_source).unproven == 1


def test_of_many_keys_some_are_named_and_all_are_counted() -> None:
    keys = (verified(KeyDifferenceKind.MISSING) for _ in range(NAMED_MAX + 5))
    report = way_back(keys, is_newer_at_source)
    assert (report.lacking.count, len(report.lacking.named)) == (NAMED_MAX + 5, NAMED_MAX)


def test_file_system_clients_are_told_both_ways() -> None:
    """OZ-148: with a federation and without."""
    text = "\n".join(
        client_steps("ozone://om1:9862/vol1/photos", "ozone://om9:9862/vol9/copy?s3=http://g:9878")
    )
    assert "mount table" in text
    assert "ofs://om1:9862/vol1/photos" in text
    assert "ofs://om9:9862/vol9/copy" in text
    assert "http://g:9878" in text


def test_s3_clients_change_the_bucket_or_the_endpoint() -> None:
    """OZ-149."""
    same = client_steps("s3://a?endpoint_url=http://g", "s3://b?endpoint_url=http://g")
    assert same[0] == "S3 clients: change the bucket from a to b."
    other = "\n".join(client_steps("s3://a?endpoint_url=http://g", "s3://b?endpoint_url=http://h"))
    assert "endpoint from http://g to http://h" in other
    assert client_steps("local:/a", "local:/b")[0] == "Clients open local:/b instead of local:/a."


def reported(checkpoint: Checkpoint, **changes: object) -> ReplicationReport:
    return replace(ReplicationReport(Condition.ACTIVE, checkpoint), **changes)


def test_a_backlog_is_what_the_source_changed_since() -> None:
    memory = MemoryStore(has_feed=True)
    store = memory.store()
    assert store.feed is not None
    memory.write("a/1", b"x")
    checkpoint = reported(Checkpoint(Stage.LIVE, position=store.feed.position(), prefixes=("",)))
    assert read_backlog(store, checkpoint, (), limit=9).is_whole
    memory.write("a/2", b"x")
    memory.write("b/1", b"x")
    memory.remove("a/1")
    found = read_backlog(store, checkpoint, (), limit=9)
    assert [one.key for one in found.changes] == ["a/2", "b/1", "a/1"]
    assert [one.key for one in read_backlog(store, checkpoint, ("a/",), limit=9).changes] == [
        "a/2", "a/1",
    ]  # fmt: skip
    some = read_backlog(store, checkpoint, (), limit=2)
    assert (len(some.changes), some.is_whole) == (2, False)
    document = backlog_json(some)
    assert document["isWhole"] is False
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("known", "wanted", "changes", "words"),
    [
        (("in/",), ("in/",), {}, ""),
        (("",), ("in/",), {"failed": 1}, ""),
        (("in/",), ("in/", "out/"), {}, "keys below out/ have not been compared"),
        (("in/",), (), {}, "keys of other prefixes have not been compared"),
        ((), tuple(f"p{n:02}/" for n in range(20)), {}, "p09/, ... have not been compared"),
        (("",), (), {"differences": 3}, "found 3 differences"),
    ],
)
def test_a_backlog_is_not_whole_where_keys_may_be_missing_that_no_change_tells_of(
    known: tuple[str, ...], wanted: tuple[str, ...], changes: dict[str, object], words: str
) -> None:
    """OZ-161: a log says nothing of keys that were there before it was followed."""
    store = MemoryStore(has_feed=True).store()
    assert store.feed is not None
    at = Checkpoint(Stage.LIVE, position=store.feed.position(), prefixes=known)
    found = read_backlog(store, reported(at, **changes), wanted, limit=9)
    assert found.is_whole == (not words)
    assert words in found.reason
    begun = reported(replace(at, stage=Stage.INITIAL_BATCH))
    assert "first copy" in read_backlog(store, begun, wanted, limit=9).reason
    failed = read_backlog(store, reported(replace(at, has_failed=True)), known, limit=9)
    assert not failed.is_whole
    assert bool(failed.reason)


def test_keys_that_fail_by_themselves_are_named_and_no_more_than_a_few(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = tuple(
        FailedKey(f"k{number}", ReplicationFault.OBJECT_FAILED, "its tags are gone")
        for number in range(FAILED_KEYS_MAX)
    )
    view = with_report(FINE, failed=FAILED_KEYS_MAX + 3, failed_keys=failed)
    assert status_exit([view]) == ExitCode.FINDINGS
    lines = list(status_lines(view))
    assert "fails: 'k0': object_failed: its tags are gone" in lines
    assert "fails: 3 other keys" in lines
    document = view_json(view)["report"]
    assert isinstance(document, dict)
    assert document["failedKeys"][1] == {
        "key": "k1", "fault": "object_failed", "message": "its tags are gone",
    }  # fmt: skip
    found = ReplicationBacklog((), True, failed=failed, failed_count=FAILED_KEYS_MAX + 3)
    assert backlog_json(found)["failed"] == FAILED_KEYS_MAX + 3
    print_backlog(found)
    assert "fails: 'k19': object_failed" in capsys.readouterr().out


def test_a_key_too_long_for_a_message_is_counted_only() -> None:
    fault = ReplicationFault.OBJECT_FAILED
    long, short = (FailedKey(key, fault, "no\n" + "x" * 999) for key in ("k" * 1_025, "k"))
    view = with_report(FINE, failed=2, failed_keys=(long, short))
    report = view_from(view_to(view)).state.report
    assert report is not None
    assert report.failed == 2
    assert report.failed_keys == (FailedKey("k", fault, "no?" + "x" * 197),)


def test_a_backlog_that_cannot_be_known_says_why() -> None:
    memory = MemoryStore(has_feed=True)
    store = memory.store()
    assert "not ended" in read_backlog(store, None, (), limit=9).reason
    other = reported(Checkpoint(position=FeedPosition("another log", 1)))
    found = read_backlog(store, other, (), limit=9)
    assert (found.is_whole, bool(found.reason)) == (False, True)
    none = read_backlog(replace(store, feed=None), other, (), limit=9)
    assert "no log" in none.reason


def test_the_status_of_a_cluster_names_replications_that_need_someone() -> None:
    broken = with_report(
        replace(FINE, condition=Condition.ERROR), fault=ReplicationFault.TARGET_FULL
    )
    masters = [
        MasterAnswer("m1:1", error="silent"),
        MasterAnswer("m2:1", A_STATUS, (FINE, broken, A_VIEW)),
    ]
    problems = list(problems_of_masters(masters))
    texts = "\n".join(one.text for one in problems)
    assert "m1:1: silent" in texts
    assert "thread ticker has ended" in texts
    assert "target_full" in texts
    assert "failed over" in texts
    lines = "\n".join(lines_of_masters(masters))
    assert "replication master m1:1: UNKNOWN, silent" in lines
    assert "syncers: 0 of 1 have a lease" in lines
    assert len(masters_json(masters)) == 2
    assert (
        list(problems_of_masters([MasterAnswer("m:1", replace(A_STATUS, fault=""), (FINE,))])) == []
    )


def test_a_replication_that_waits_and_keys_that_fail_are_problems() -> None:
    view = with_report(
        replace(FINE, condition=Condition.WAITING),
        fault=ReplicationFault.TARGET_UNAVAILABLE,
        message="connection refused",
        failed=2,
    )
    master = MasterAnswer("m:1", replace(A_STATUS, fault=""), (view,))
    failed, waits = problems_of_masters([master])
    assert failed.text.endswith("2 keys cannot be copied")
    assert waits.text.endswith("waits: target_unavailable: connection refused")
    assert failed.is_known
    assert waits.is_known


def test_a_silent_master_is_unknown_and_a_disabled_one_a_problem() -> None:
    silent = ClusterAnswer(0.0, "a:1", None, "x", masters=(MasterAnswer("m:1", error="x"),))
    assert exit_status_of(health_of(problems_of(silent))) == 7
    disabled = MasterAnswer("m:1", replace(A_STATUS, fault="", is_enabled=False), (FINE,))
    found = problems_of(replace(silent, masters=(disabled,)))
    assert health_of(found) is Health.DIVERGED
    waiting = replace(FINE, condition=Condition.UNASSIGNED)
    [problem] = problems_of_masters([MasterAnswer("m:1", replace(A_STATUS, fault=""), (waiting,))])
    assert not problem.is_known
    paused = replace(
        waiting.record, policy=replace(waiting.record.policy, desired=DesiredState.PAUSED)
    )
    quiet = replace(waiting, record=paused)
    status = MasterAnswer("m:1", replace(A_STATUS, fault=""), (quiet,))
    assert list(problems_of_masters([status])) == []


def test_a_way_back_has_no_verifier_of_the_way_forth() -> None:
    """That one is beside the bucket which is the source now."""
    forth = FINE.record.policy
    options = replace(forth.options, verifier="v1:9894", bytes_per_second=5)
    back = way_back_policy(replace(forth, options=options))
    assert back.options == replace(options, verifier="", newest_wins=True)
    assert (back.source, back.target) == (forth.target, forth.source)


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("5", 5), ("2MiB/s", 2 << 20)])
def test_a_rate_is_bytes_a_second(text: str, expected: int) -> None:
    assert rate_of(text) == expected


def test_what_is_no_rate_is_refused() -> None:
    for text in ("fast", "-1", "1 2", "٣"):
        with pytest.raises(UsageError):
            rate_of(text)


def test_prechecks_change_neither_bucket(tmp_path: Path) -> None:
    """OZ-025: a target that does not exist is not made."""
    from replicator.bucket_properties import create_bucket
    from replicator.stores.bucket_facts import BucketFacts

    create_bucket(f"local:{tmp_path / 'a'}", BucketFacts())
    pair = prechecked(f"local:{tmp_path / 'a'}", f"local:{tmp_path / 'b'}", allow_nonempty=False)
    assert not pair.report.is_refused
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('database = "mysql://db"', "postgresql://USER@HOST/NAME"),
        ('database = "postgresql://u:secret@db/x"', "password"),
        ('database = "postgresql://u@db/x?password=secret"', "password"),
        ("lease_s = 0.5", "lease_s"),
        ('[assignment]\nmode = "shove"', "assignment.mode"),
        ("[assignment]\ntokens = -1", "assignment.tokens"),
        ('listen = "0.0.0.0:9895"', "insecure"),
    ],
)
def test_invalid_settings_name_the_key_and_no_secret(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "master.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path, MasterConfig)
    assert words in refused.value.message


def test_the_holder_of_a_view_is_who_has_it() -> None:
    assert A_VIEW.state.holder == A_HOLDER
    assert A_VIEW.policy_id == P1
