"""A target whose small writes and looks go through the verifier beside it.

Several of them go in one call, and each is answered for itself. Whatever the verifier
does not do, or refuses for another reason than its condition, is done with the store.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from merkle.checksum import Buffer
from replicator.grouped_calls import GroupedCalls
from replicator.hashing import blake3_of
from replicator.stores.errors import PreconditionFailedError
from replicator.stores.port import (
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    ObjectReader,
    Store,
    WholeObject,
    WriteCondition,
)
from replicator.syncer.target_verifier import TargetVerifier
from replicator.verifier.key_applier import checked_condition
from replicator.verifier.messages import KEYS_MAX
from replicator.verifier.values import BODY_BYTES_MAX, WRITES_MAX, KeyWrite, WriteOutcome

# Of bodies in one call: a lost one is sent again.
_CALL_BYTES = 1 << 20
# The verifier asks its store for one key after the other.
_LOOKS_MAX = min(KEYS_MAX, 100)
_PASSED_BY = WriteOutcome("passed_by", "the verifier was not asked, or has failed")


def verified_store(store: Store, verifier: TargetVerifier) -> Store:
    """The store, whose small writes go through its verifier, as far as that answers.
    `store` is fenced. Conditions are always checked: by the store, or by a look just
    before the write.
    """
    can = replace(store.capabilities, creates_conditionally=True, replaces_conditionally=True)
    return replace(
        store,
        capabilities=can,
        writer=_VerifiedWriter(store, verifier),
        reader=_VerifiedReader(store.reader, verifier),
    )


class _VerifiedWriter:
    def __init__(self, store: Store, verifier: TargetVerifier) -> None:
        self._store = store
        self._verifier = verifier
        self._calls = GroupedCalls[KeyWrite, WriteOutcome](
            self._send,
            key_of=lambda write: write.key,
            size_of=lambda write: len(write.body or b""),
            items_max=WRITES_MAX,
            bytes_max=_CALL_BYTES,
        )

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        size = len(body)
        if size <= BODY_BYTES_MAX:
            sent = bytes(body)
            write = KeyWrite(key, sent, properties, blake3_of(sent), condition)
            outcome = self._outcome(write)
            if outcome is not None:
                return _facts(key, size, outcome)
        # A store that checks no condition is looked at just before.
        checked = checked_condition(self._store, key, condition)
        return self._store.writer.put(key, body, properties, checked)

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter."""
        write = KeyWrite(facts.key, properties=properties, replaced=facts, tags_only=tags_only)
        outcome = self._outcome(write)
        if outcome is not None:
            return _facts(facts.key, facts.size_bytes, outcome)
        return self._store.writer.put_properties(facts, properties, tags_only=tags_only)

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        outcomes = self._calls.run([KeyWrite(key) for key in keys])
        left = [key for key, one in zip(keys, outcomes, strict=True) if one.error]
        return self._store.writer.delete(left) if left else []

    def _outcome(self, write: KeyWrite) -> WriteOutcome | None:
        """What the verifier has made of a write; None where the store has to do it.

        Raises:
            PreconditionFailedError: its condition does not hold.
        """
        (outcome,) = self._calls.run([write])
        if outcome.error == PreconditionFailedError.code:
            raise PreconditionFailedError(outcome.reason, key=write.key)
        return None if outcome.error else outcome

    def _send(self, writes: Sequence[KeyWrite]) -> Sequence[WriteOutcome]:
        client = self._verifier.client
        found = self._verifier.call(lambda known: client.write_keys(known.profile, writes))
        return found if found is not None else [_PASSED_BY] * len(writes)


class _VerifiedReader:
    def __init__(self, reader: ObjectReader, verifier: TargetVerifier) -> None:
        self._reader = reader
        self._verifier = verifier
        self._calls = GroupedCalls[str, tuple[ObjectFacts | None, bool]](
            self._look, key_of=str, size_of=len, items_max=_LOOKS_MAX, bytes_max=_CALL_BYTES
        )

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        if not version:
            ((facts, is_known),) = self._calls.run([key])
            if is_known:
                return facts
        return self._reader.facts(key, version=version)

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        return self._reader.properties(key, version=version)

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader."""
        return self._reader.properties_of(facts)

    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """See ObjectReader."""
        return self._reader.read(facts, first=first, end=end)

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader."""
        return self._reader.read_whole(facts, with_acl=with_acl)

    def _look(self, keys: Sequence[str]) -> Sequence[tuple[ObjectFacts | None, bool]]:
        """The facts of each key, and whether the verifier has told them."""
        client = self._verifier.client
        found = self._verifier.call(lambda known: client.facts(known.profile, keys))
        if found is None:
            return [(None, False)] * len(keys)
        return [(found.get(key), True) for key in keys]


def _facts(key: str, size_bytes: int, outcome: WriteOutcome) -> ObjectFacts:
    return ObjectFacts(key, size_bytes, outcome.etag, outcome.modified_ms, outcome.version)
