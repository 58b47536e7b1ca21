"""What a rule of the master decides: records to write if nothing changed meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from replicator.master.errors import PolicyNotFoundError
from replicator.master.records import (
    Holder,
    Leaving,
    PolicyRecord,
    Record,
    RecordKey,
    ReplicationState,
    StoredState,
    SyncerRecord,
)
from replicator.replication import PolicyId

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Transition(Generic[AnswerT]):
    """Records to write and remove, and what to answer once that is done. It holds while
    the records it changes, and those it `depends_on`, have the versions that were read.
    """

    answer: AnswerT
    records: tuple[Record, ...] = ()
    removed: tuple[RecordKey, ...] = ()
    depends_on: frozenset[RecordKey] = frozenset()

    def __post_init__(self) -> None:
        keys = [record.key for record in self.records] + list(self.removed)
        assert len(set(keys)) == len(keys)

    @property
    def is_change(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.records or self.removed)

    def expected(self, state: StoredState) -> Mapping[RecordKey, int]:
        """The versions that must not have changed since `state` was read."""
        changed = {record.key for record in self.records} | set(self.removed)
        return {key: state.version(key) for key in changed | self.depends_on}


def known_policy(state: StoredState, policy_id: PolicyId) -> tuple[PolicyRecord, ReplicationState]:
    """A policy and how its replication is.

    Raises:
        PolicyNotFoundError: there is none.
    """
    policy, found = state.policy(policy_id), state.state(policy_id)
    if policy is None or found is None:
        raise PolicyNotFoundError(f"there is no replication {policy_id}", policy_id=policy_id)
    return policy, found


def taken_from_living(
    state: ReplicationState, syncer: SyncerRecord | None, now_ms: int
) -> ReplicationState:
    """The state once a replication is taken from its holder, who may not know yet: what
    it was last answered lets it work for as long as a lease lasts. That its lease has
    ended by the clock of the database, which may have jumped, proves nothing.
    """
    if state.holder is None:
        return state
    if syncer is None or syncer.session != state.holder.session:
        return given_up(state, now_ms)
    leaving = Leaving(state.holder, state.epoch, now_ms, now_ms + syncer.lease.duration_ms)
    return replace(state, holder=None, leaving=leaving, waiting_since_ms=now_ms)


def given_up(state: ReplicationState, now_ms: int) -> ReplicationState:
    """The state once nobody has the replication, and nobody can still work on it."""
    return replace(state, holder=None, leaving=None, waiting_since_ms=now_ms)


def given_to(
    state: ReplicationState, syncer: SyncerRecord, epoch: int, now_ms: int
) -> ReplicationState:
    """The state once a syncer gets a free replication; its epoch is a new round's."""
    assert state.is_free
    assert state.epoch < epoch
    holder = Holder(syncer.syncer_id, syncer.session, syncer.host, now_ms)
    return replace(state, epoch=epoch, holder=holder, sequence=0, was_given=True)
