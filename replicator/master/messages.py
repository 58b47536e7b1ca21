"""Messages of the replication master to and from values, checked on the way in.

The same checks serve both sides: what a server gets raises UsageError, what a client
gets RemoteProtocolError (see `checked_answer`).
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from merkle.limits import TEXT_CHARACTERS_MAX
from protos import replication_pb2 as pb
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Assignment, Caller, HeldReport, Registration
from replicator.replication import (
    FAILED_KEYS_MAX,
    KEY_BYTES_MAX,
    Checkpoint,
    Condition,
    DesiredState,
    FailedKey,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationOptions,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition, SnapshotFacts
from replicator.stores.probe_memory import PROBE_CHARACTERS_MAX
from runtime.errors import RemoteProtocolError, UsageError
from runtime.setting_values import check_address

# What one syncer works on at once; its heartbeat has them all.
_HELD_MAX = 256
# Prefixes of one policy, and the bytes of all of them; S3's limit for one is 1,024.
_PREFIXES_MAX, _PREFIXES_BYTES_MAX = 100, 16 << 10
# Policies in one answer: with all their prefixes it stays far below a message's limit.
PAGE = 500
_NAME_MAX = 128
_ADDRESS_MAX = 2_048
# Why one key fails: an answer has many of them.
_KEY_MESSAGE_MAX = 200
_NUMBER_MAX = (1 << 63) - 1
# The end of the year 9999: later times cannot be written down.
_TIME_MS_MAX = 253_402_300_799_999
# Between two cycles of a replication.
_INTERVAL_S_MAX = 365 * 86_400.0
_E = TypeVar("_E", bound=Enum)


@contextmanager
def checked_answer() -> Iterator[None]:
    """What is invalid inside is the other side's mistake.

    Raises:
        RemoteProtocolError: instead of UsageError.
    """
    try:
        yield
    except UsageError as error:
        raise RemoteProtocolError(error.message) from error


def _position_to(position: FeedPosition) -> pb.Position:
    """The message of a position."""
    return pb.Position(log=position.log, index=position.index)


def _position_from(message: pb.Position) -> FeedPosition:
    return FeedPosition(_text(message.log, "log", _NAME_MAX), _number(message.index))


def _snapshot_to(snapshot: SnapshotFacts) -> pb.Snapshot:
    return pb.Snapshot(
        name=snapshot.name,
        snapshot_id=snapshot.snapshot_id,
        position=_position_to(snapshot.position) if snapshot.position else None,
        created_ms=snapshot.created_ms,
    )


def _snapshot_from(message: pb.Snapshot) -> SnapshotFacts:
    return SnapshotFacts(
        _text(message.name, "name of a snapshot", _NAME_MAX),
        _text(message.snapshot_id, "ID of a snapshot", _NAME_MAX),
        _position_from(message.position) if message.HasField("position") else None,
        time_from(message.created_ms),
    )


def _checkpoint_to(checkpoint: Checkpoint) -> pb.Checkpoint:
    """The message of a checkpoint."""
    return pb.Checkpoint(
        stage=checkpoint.stage.value,
        base=_snapshot_to(checkpoint.base) if checkpoint.base else None,
        snapshot=_snapshot_to(checkpoint.snapshot) if checkpoint.snapshot else None,
        last_key=checkpoint.last_key,
        position=_position_to(checkpoint.position) if checkpoint.position else None,
        prefixes=checkpoint.prefixes,
        compared=checkpoint.compared,
        has_failed=checkpoint.has_failed,
    )


def _checkpoint_from(message: pb.Checkpoint) -> Checkpoint:
    """The checkpoint of a message.

    Raises:
        UsageError: it is invalid.
    """
    if len(message.last_key.encode()) > KEY_BYTES_MAX:
        raise UsageError(f"the key of a checkpoint has over {KEY_BYTES_MAX} bytes")
    return Checkpoint(
        _one_of(Stage, message.stage),
        _snapshot_from(message.base) if message.HasField("base") else None,
        _snapshot_from(message.snapshot) if message.HasField("snapshot") else None,
        message.last_key,
        _position_from(message.position) if message.HasField("position") else None,
        prefixes_from(message.prefixes),
        prefixes_from(message.compared),
        message.has_failed,
    )


def report_to(report: ReplicationReport) -> pb.Report:
    """The message of a report."""
    proven = report.proven_position
    return pb.Report(
        condition=report.condition.value,
        checkpoint=_checkpoint_to(report.checkpoint),
        fault=report.fault.value if report.fault else "",
        message=_printable(report.message),
        queued=report.queued,
        applied=report.applied,
        duplicates=report.duplicates,
        failed=report.failed,
        sent_bytes=report.sent_bytes,
        proven_position=_position_to(proven) if proven else None,
        proven_ms=report.proven_ms,
        proof_level=report.proof_level,
        differences=report.differences,
        oldest_unproven_ms=report.oldest_unproven_ms,
        last_applied_ms=report.last_applied_ms,
        lag_p50_ms=report.lag_p50_ms,
        lag_p99_ms=report.lag_p99_ms,
        target_probe=report.target_probe,
        failed_keys=[
            pb.FailedKey(
                key=one.key,
                fault=one.fault.value,
                message=_printable(one.message)[:_KEY_MESSAGE_MAX],
            )
            for one in report.failed_keys
            # Of another key only the number is told.
            if len(one.key.encode()) <= KEY_BYTES_MAX
        ],
    )


def report_from(message: pb.Report) -> ReplicationReport:
    """The report of a message.

    Raises:
        UsageError: it is invalid.
    """
    proven = message.proven_position if message.HasField("proven_position") else None
    return ReplicationReport(
        _one_of(Condition, message.condition),
        _checkpoint_from(message.checkpoint),
        _one_of(ReplicationFault, message.fault) if message.fault else None,
        _text(message.message, "message", TEXT_CHARACTERS_MAX),
        queued=_number(message.queued),
        applied=_number(message.applied),
        duplicates=_number(message.duplicates),
        failed=_number(message.failed),
        sent_bytes=_number(message.sent_bytes),
        proven_position=_position_from(proven) if proven is not None else None,
        proven_ms=_known(message, "proven_ms"),
        proof_level=_text(message.proof_level, "level of a proof", _NAME_MAX),
        differences=_known(message, "differences"),
        oldest_unproven_ms=_known(message, "oldest_unproven_ms"),
        last_applied_ms=_known(message, "last_applied_ms"),
        lag_p50_ms=_known(message, "lag_p50_ms"),
        lag_p99_ms=_known(message, "lag_p99_ms"),
        target_probe=_probe_from(message.target_probe),
        failed_keys=tuple(map(_failed_key_from, message.failed_keys[:FAILED_KEYS_MAX])),
    )


def _failed_key_from(message: pb.FailedKey) -> FailedKey:
    if len(message.key.encode()) > KEY_BYTES_MAX:
        raise UsageError(f"a key that failed has over {KEY_BYTES_MAX} bytes")
    fault = _one_of(ReplicationFault, message.fault)
    return FailedKey(message.key, fault, _text(message.message, "message", _KEY_MESSAGE_MAX))


def _probe_from(text: str) -> str:
    return _text(text, "probe of the target", PROBE_CHARACTERS_MAX)


def options_to(options: ReplicationOptions) -> pb.Options:
    """The message of options."""
    return pb.Options(
        bytes_per_second=options.bytes_per_second,
        queue_entries_max=options.queue_entries_max,
        interval_s=options.interval_s,
        is_live=options.is_live,
        newest_wins=options.newest_wins,
        keeps_acls=options.keeps_acls,
        verifier=options.verifier,
    )


def options_from(message: pb.Options) -> ReplicationOptions:
    """The options of a message.

    Raises:
        UsageError: they are invalid.
    """
    interval_s = message.interval_s
    if not (math.isfinite(interval_s) and 0 < interval_s <= _INTERVAL_S_MAX):
        raise UsageError(f"interval_s: expected up to {_INTERVAL_S_MAX:.0f}, found {interval_s}")
    if not 0 < message.queue_entries_max <= _NUMBER_MAX:
        raise UsageError("queue_entries_max: expected 1 or more")
    verifier = _text(message.verifier, "verifier", _ADDRESS_MAX)
    try:
        if verifier:
            check_address(verifier)
    except ValueError as error:
        raise UsageError(f"verifier: {error}") from error
    return ReplicationOptions(
        _number(message.bytes_per_second),
        message.queue_entries_max,
        interval_s,
        message.is_live,
        message.newest_wins,
        message.keeps_acls,
        verifier,
    )


def policy_to(policy: Policy) -> pb.Policy:
    """The message of a policy."""
    return pb.Policy(
        policy_id=policy.policy_id,
        source=policy.source,
        target=policy.target,
        prefixes=policy.prefixes,
        options=options_to(policy.options),
        desired=policy.desired.value,
        revision=policy.revision,
    )


def policy_from(message: pb.Policy) -> Policy:
    """The policy of a message.

    Raises:
        UsageError: it is invalid.
    """
    if not 0 < message.revision <= _NUMBER_MAX:
        raise UsageError("the revision of a policy is 1 or more")
    return Policy(
        policy_id_from(message.policy_id),
        _text(message.source, "source", _ADDRESS_MAX, is_needed=True),
        _text(message.target, "target", _ADDRESS_MAX, is_needed=True),
        prefixes_from(message.prefixes),
        options_from(message.options),
        desired_from(message.desired),
        message.revision,
    )


def prefixes_from(given: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of a policy; none is all keys.

    Raises:
        UsageError: they are not sorted, or too many or too long.
    """
    prefixes = tuple(given)
    if list(prefixes) != sorted(set(prefixes)):
        raise UsageError("the prefixes of a policy are sorted, and none is there twice")
    size = sum(len(prefix.encode()) for prefix in prefixes)
    if len(prefixes) > _PREFIXES_MAX or size > _PREFIXES_BYTES_MAX:
        raise UsageError(
            f"a policy has at most {_PREFIXES_MAX} prefixes of {_PREFIXES_BYTES_MAX} bytes in all"
        )
    return prefixes


def policy_id_from(text: str) -> PolicyId:
    """The ID of a policy: letters, digits, '.', '_' and '-'.

    Raises:
        UsageError: it is invalid.
    """
    if not _is_name(text):
        raise UsageError(
            f"expected the ID of a replication, found {_printable(text[:_NAME_MAX])!r}",
            hint=f"It has 1 to {_NAME_MAX} letters, digits, '.', '_' and '-'.",
        )
    return PolicyId(text)


def desired_from(text: str) -> DesiredState:
    """What is wanted, by its name.

    Raises:
        UsageError: there is no such state.
    """
    return _one_of(DesiredState, text)


def caller_to(caller: Caller) -> pb.Caller:
    """The message of a caller."""
    return pb.Caller(syncer_id=caller.syncer_id, session=caller.session)


def caller_from(message: pb.Caller, owner: str) -> Caller:
    """The caller of a message, whose certificate says `owner`.

    Raises:
        UsageError: it is invalid.
    """
    for text in (message.syncer_id, message.session):
        if not _is_name(text):
            raise UsageError("a syncer and its session have IDs, such as UUIDs")
    return Caller(SyncerId(message.syncer_id), message.session, owner)


def capacity_to(capacity: SyncerCapacity) -> pb.Capacity:
    """The message of a capacity."""
    return pb.Capacity(
        replications_max=capacity.replications_max,
        free_bytes_per_second=capacity.free_bytes_per_second,
        free_disk_bytes=capacity.free_disk_bytes,
    )


def capacity_from(message: pb.Capacity) -> SyncerCapacity:
    """The capacity of a message; beyond _HELD_MAX replications there is none.

    Raises:
        UsageError: it is invalid.
    """
    return SyncerCapacity(
        min(message.replications_max, _HELD_MAX),
        _known(message, "free_bytes_per_second"),
        _known(message, "free_disk_bytes"),
    )


def registration_from(message: pb.RegisterRequest) -> Registration:
    """What a registering process says of itself.

    Raises:
        UsageError: it is invalid.
    """
    return Registration(
        _text(message.host, "host", _NAME_MAX * 2),
        time_from(message.started_ms),
        capacity_from(message.capacity),
    )


def held_to(held: HeldReport) -> pb.HeldReport:
    """The message of a held replication's report."""
    return pb.HeldReport(
        policy_id=held.policy_id,
        epoch=held.epoch,
        sequence=held.sequence,
        report=report_to(held.report),
    )


def held_from(message: pb.HeldReport) -> HeldReport:
    """The report of a message.

    Raises:
        UsageError: it is invalid.
    """
    return HeldReport(
        policy_id_from(message.policy_id),
        _number(message.epoch),
        _number(message.sequence),
        report_from(message.report),
    )


def assignment_to(assignment: Assignment, known: dict[PolicyId, int]) -> pb.Assignment:
    """The message of an assignment: without its content where the caller knows it."""
    message = pb.Assignment(
        policy_id=assignment.policy.policy_id,
        epoch=assignment.epoch,
        policy=policy_to(assignment.policy),
    )
    # Without the checkpoint: it changes all the time, by the caller's own word.
    digest = zlib.crc32(message.SerializeToString(deterministic=True))
    if known.get(assignment.policy.policy_id) == digest:
        return pb.Assignment(policy_id=assignment.policy.policy_id, digest=digest)
    message.digest = digest
    message.checkpoint.CopyFrom(_checkpoint_to(assignment.checkpoint))
    message.target_probe = assignment.target_probe
    return message


def assignment_from(message: pb.Assignment) -> Assignment | None:
    """The assignment of a message; None if only its digest came.

    Raises:
        UsageError: it is invalid.
    """
    if not message.HasField("policy"):
        return None
    policy = policy_from(message.policy)
    if policy.policy_id != message.policy_id or not message.epoch:
        raise UsageError("an assignment is of another policy, or has no epoch")
    checkpoint, probe = _checkpoint_from(message.checkpoint), _probe_from(message.target_probe)
    return Assignment(policy, _number(message.epoch), checkpoint, probe)


def known_from(message: pb.HeartbeatRequest) -> dict[PolicyId, int]:
    """The digests of the assignments that a syncer knows.

    Raises:
        UsageError: they are invalid, or too many.
    """
    if len(message.known) > _HELD_MAX or len(message.reports) > _HELD_MAX:
        raise UsageError(f"a syncer has at most {_HELD_MAX} replications")
    return {policy_id_from(one.policy_id): one.digest for one in message.known}


def check_text(text: str, what: str) -> str:
    """A reason or a name that a person wrote.

    Raises:
        UsageError: it is too long, or has control characters.
    """
    return _text(text, what, TEXT_CHARACTERS_MAX)


def _is_name(text: str) -> bool:
    return (
        0 < len(text) <= _NAME_MAX
        and text.isascii()
        and text[0].isalnum()
        and all(character.isalnum() or character in "._-" for character in text)
    )


def _text(text: str, what: str, limit: int, *, is_needed: bool = False) -> str:
    if len(text) > limit or not text.isprintable() or (is_needed and not text):
        least = "1" if is_needed else "0"
        raise UsageError(f"the {what} must be {least} to {limit} printable characters")
    return text


def _printable(text: str) -> str:
    kept = text[:TEXT_CHARACTERS_MAX]
    return "".join(c if c.isprintable() else "?" for c in kept)


def _number(value: int) -> int:
    if value > _NUMBER_MAX:
        raise UsageError(f"expected a number up to {_NUMBER_MAX}, found {value}")
    return value


def time_from(value: int) -> int:
    """A time in ms since the epoch.

    Raises:
        UsageError: it is beyond the year 9999.
    """
    if value > _TIME_MS_MAX:
        raise UsageError(f"{value} ms after 1970 is no time")
    return value


def _known(message: pb.Report | pb.Capacity, name: str) -> int | None:
    if not message.HasField(name):
        return None
    value: int = getattr(message, name)
    return time_from(value) if name.endswith("_ms") else _number(value)


def _one_of(values: type[_E], text: str) -> _E:
    try:
        return values(text)
    except ValueError as error:
        known = ", ".join(str(value.value) for value in values)
        raise UsageError(f"{_printable(text[:_NAME_MAX])!r} is not one of {known}") from error
