"""Messages of the controller's protocol to and from values of merkle."""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

from merkle.limits import PEERS_MAX, TEXT_CHARACTERS_MAX
from merkle.outcome import COUNTERS, Evidence, PeerOutcome, RepairCounters, RepairReport, Verdict
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import BlockId
from protos import controller_pb2 as pb

# A UUID has 36 characters, a host name 253 at most; whatever is longer is neither.
NAME_CHARACTERS_MAX = 300
# What is kept of one order's end; the rest is in the agent's own log.
EVIDENCE_MAX = 1_000
CLAIMED_MAX = 10_000
# Far beyond what a container holds, and so far below what a message can say that the
# sum over all rounds and datanodes of a job fits one: a false counter must not keep its
# job, and every list of jobs, from being shown.
_COUNTER_MAX = 1 << 48
# The years 1 and 10000, in seconds since the epoch, and a rate that nothing has.
_SECONDS_FIRST, _SECONDS_END, _RATE_END = -62_135_596_800.0, 253_402_300_800.0, 2.0**63
# The counters that travel: those that the message has a field for.
_SENT = tuple(name for name in COUNTERS if name in pb.ReconcileProgress.DESCRIPTOR.fields_by_name)


def seconds_from(value: float) -> float:
    """A time since the epoch, or an age, in seconds.

    Raises:
        ValueError: it is no number, or no time that a date can say.
    """
    # NaN is between no numbers.
    if not _SECONDS_FIRST <= value < _SECONDS_END:
        raise ValueError(f"{value} is not a time")
    return value


def rate_from(value: float) -> float:
    """A number per second.

    Raises:
        ValueError: it is no number, or none that was measured.
    """
    if not 0 <= value < _RATE_END:
        raise ValueError(f"{value} is not a rate")
    return value


def _set_counters(message: pb.ReconcileProgress, counters: RepairCounters) -> None:
    """Fill the message's counters."""
    for name in _SENT:
        setattr(message, name, getattr(counters, name))


def _counters_from(message: pb.ReconcileProgress) -> RepairCounters:
    """The message's counters, each at most _COUNTER_MAX."""
    return RepairCounters(**{name: min(getattr(message, name), _COUNTER_MAX) for name in _SENT})


def replica_to(replica: ContainerReplica) -> pb.ReplicaReport:
    """The message of one replica, without its datanode."""
    return pb.ReplicaReport(
        container_id=replica.container_id,
        state=replica.state.value,
        # None leaves the field out: an unknown root is not the root of an empty tree.
        data_checksum=replica.data_checksum,
        bcs_id=replica.bcs_id,
        used_bytes=replica.used_bytes,
        block_count=replica.block_count,
        replica_index=replica.replica_index,
        data_scan_timestamp=replica.data_scan_timestamp_ms,
        read_only=replica.read_only,
        fingerprint=replica.fingerprint,
    )


def set_report(message: pb.ReconcileProgress, report: RepairReport, *, brief: bool = False) -> None:
    """Fill the message with a report; `brief` leaves out its lists, which can be
    long.
    """
    _set_counters(message, report)
    message.verdict = report.verdict.value if report.verdict else ""
    message.error_code = report.error_code
    message.message = report.message
    message.limit_bytes_per_second = report.limit_bytes_per_second
    if brief:
        return
    message.claimed_deleted_block_ids.extend(report.claimed_deleted)
    _add_evidence(message, report.evidence)
    _add_peers(message, report.peers)


def report_from(message: pb.ReconcileProgress) -> RepairReport:
    """The message's report; lists and texts are cut to their limits.

    Raises:
        ValueError: the verdict is invalid.
    """
    return RepairReport(
        **asdict(_counters_from(message)),
        verdict=Verdict(message.verdict) if message.verdict else None,
        error_code=message.error_code[:TEXT_CHARACTERS_MAX],
        message=message.message[:TEXT_CHARACTERS_MAX],
        limit_bytes_per_second=min(message.limit_bytes_per_second, _COUNTER_MAX),
        evidence=_evidence_from(message),
        claimed_deleted=tuple(
            BlockId(number) for number in islice(message.claimed_deleted_block_ids, CLAIMED_MAX)
        ),
        peers=_peers_from(message),
    )


def _add_evidence(message: pb.ReconcileProgress, evidence: Iterable[Evidence]) -> None:
    """Append evidence to the message."""
    for one in evidence:
        message.evidence.add(
            kind=one.kind, block_id=one.block_id, offset=one.offset, detail=one.detail
        )


def _evidence_from(message: pb.ReconcileProgress) -> tuple[Evidence, ...]:
    """The message's evidence: at most EVIDENCE_MAX, texts cut short."""
    return tuple(
        Evidence(
            one.kind[:TEXT_CHARACTERS_MAX],
            BlockId(one.block_id) if one.HasField("block_id") else None,
            one.offset if one.HasField("offset") else None,
            one.detail[:TEXT_CHARACTERS_MAX],
        )
        for one in islice(message.evidence, EVIDENCE_MAX)
    )


def _add_peers(message: pb.ReconcileProgress, peers: Iterable[PeerOutcome]) -> None:
    """Append what the repair got from each peer to the message."""
    for peer in peers:
        message.peers.add(
            datanode_id=peer.peer, outcome=peer.outcome, bytes_fetched=peer.bytes_fetched
        )


def _peers_from(message: pb.ReconcileProgress) -> tuple[PeerOutcome, ...]:
    """The message's peers: at most PEERS_MAX, texts cut to their limits."""
    return tuple(
        PeerOutcome(
            PeerId(peer.datanode_id[:NAME_CHARACTERS_MAX]),
            peer.outcome[:TEXT_CHARACTERS_MAX],
            min(peer.bytes_fetched, _COUNTER_MAX),
        )
        for peer in islice(message.peers, PEERS_MAX)
    )
