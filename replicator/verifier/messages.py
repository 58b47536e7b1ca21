"""The verifier's messages to and from values, checked on the way in."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from proof.index import EvidenceCounts
from proof.item import (
    HASHES_BYTES,
    ID_BYTES,
    KEY_HASH_BYTES,
    SECRET_BYTES,
    ContentHash,
    HashAlgorithm,
    ItemId,
    Profile,
)
from proof.root import SetRoot
from protos import verifier_pb2 as pb
from replicator.refresh import DAMAGED_MAX
from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition
from replicator.verifier.values import (
    BATCH_BYTES_MAX,
    BLAKE3_BYTES,
    BODY_BYTES_MAX,
    DELETES_MAX,
    PATCH_BYTES_MAX,
    RUN_BYTES,
    WRITES_MAX,
    BatchResult,
    DeleteAnswer,
    DeleteRefusal,
    Description,
    IndexState,
    KeyWrite,
    PatchOrder,
    RangePatch,
    RunName,
    Write,
    WriteOutcome,
)
from runtime.errors import RemoteProtocolError, UsageError

# S3's limits for a key, for all metadata of an object, and for its tags.
KEY_BYTES_MAX = 1_024
# In one request for facts.
KEYS_MAX = 1_000
_PAIRS_MAX = 1_000
_PROPERTIES_BYTES_MAX = 64 << 10
_COUNT_MAX = 1 << 48
_EPOCH_MAX = (1 << 63) - 1
_TEXT_MAX = 1_000


def write_to(write: Write) -> pb.Write:
    """The message of a write."""
    message = pb.Write(key=write.key, blake3=write.blake3, replaced_id=write.replaced_id or b"")
    if write.body is not None:
        message.body = write.body
    else:
        message.properties_only = True
    _set_properties(message.properties, write.properties)
    return message


def writes_from(message: pb.WriteBatch) -> list[Write]:
    """The writes of a batch.

    Raises:
        UsageError: the batch or one of its writes is invalid.
    """
    if len(message.writes) > WRITES_MAX:
        raise UsageError(f"{len(message.writes)} writes in a batch; the limit is {WRITES_MAX}")
    if sum(len(write.body) for write in message.writes) > BATCH_BYTES_MAX:
        raise UsageError(f"a batch has over {BATCH_BYTES_MAX} bytes of objects")
    writes = [_write_from(write) for write in message.writes]
    if len({write.key for write in writes}) != len(writes):
        raise UsageError("a batch writes one key twice")
    return writes


def _write_from(message: pb.Write) -> Write:
    key, replaced = _key_from(message.key), _id_from(message.replaced_id)
    match message.WhichOneof("change"):
        case "properties_only" if message.properties_only:
            if replaced is None:
                raise UsageError("new properties must name the item that they are for")
            properties = _properties_from(message.properties)
            return Write(key, None, properties, b"", replaced)
        case "body" if len(message.body) <= BODY_BYTES_MAX:
            if len(message.blake3) != BLAKE3_BYTES:
                raise UsageError("a write has no BLAKE3 of its body")
            properties = _properties_from(message.properties)
            return Write(key, message.body, properties, message.blake3, replaced)
        case "body":
            raise UsageError(f"an object in a batch has over {BODY_BYTES_MAX} bytes")
        case _:
            raise UsageError("a write has no body, and is no other change either")


def delete_request_to(ids: Sequence[ItemId], profile_digest: bytes) -> pb.DeleteRequest:
    """The message that asks to delete these items."""
    items = b"".join(item_id[:HASHES_BYTES] for item_id in ids)
    return pb.DeleteRequest(profile_digest=profile_digest, items=items)


def deletes_from(message: pb.DeleteRequest) -> list[bytes]:
    """The items to delete, by HASHES_BYTES of their IDs each.

    Raises:
        UsageError: there are too many, one is cut short, or named twice.
    """
    data = message.items
    if len(data) > HASHES_BYTES * DELETES_MAX:
        raise UsageError(f"a request deletes over {DELETES_MAX} items")
    if len(data) % HASHES_BYTES:
        raise UsageError(f"an item to delete has {HASHES_BYTES} bytes")
    found = [data[at : at + HASHES_BYTES] for at in range(0, len(data), HASHES_BYTES)]
    if len(set(found)) != len(found):
        raise UsageError("a request deletes one item twice")
    return found


def delete_response_to(deletes: int, result: DeleteAnswer) -> pb.DeleteResponse:
    """The message that answers a request to delete so many items."""
    return pb.DeleteResponse(
        deleted=deletes - len(result.refusals),
        refused=[
            pb.DeleteRefusal(item=one.place, error=one.error, reason=one.reason)
            for one in result.refusals
        ],
        items=result.root.count,
        total=total_to(result.root),
    )


def delete_answer_from(message: pb.DeleteResponse, *, deletes: int) -> DeleteAnswer:
    """What became of a request to delete so many items.

    Raises:
        RemoteProtocolError: the answer is not about these.
    """
    places = [one.item for one in message.refused]
    is_ours = len(set(places)) == len(places) and all(place < deletes for place in places)
    if not is_ours or message.deleted + len(places) != deletes:
        raise RemoteProtocolError("the verifier did not say what it deleted")
    refusals = [
        # An error has a code, whatever was sent.
        DeleteRefusal(one.item, one.error[:_TEXT_MAX] or StoreError.code, one.reason[:_TEXT_MAX])
        for one in message.refused
    ]
    return DeleteAnswer(tuple(refusals), root_from(message.items, message.total))


def patch_order_to(order: PatchOrder, profile_digest: bytes) -> pb.PatchHeader:
    """The message of an order to patch."""
    message = pb.PatchHeader(
        profile_digest=profile_digest,
        key=order.key,
        result_size_bytes=order.result_size_bytes,
        result_blake3=order.result_blake3,
    )
    if isinstance(order.base, ObjectFacts):
        message.base.CopyFrom(facts_to(order.base))
    else:
        message.base_id = order.base
    _set_properties(message.properties, order.properties)
    return message


def patch_order_from(message: pb.PatchHeader) -> PatchOrder:
    """The order to patch in a message.

    Raises:
        UsageError: it is invalid.
    """
    base: ItemId | ObjectFacts | None = _id_from(message.base_id)
    if base is None and message.HasField("base"):
        base = replace(facts_from(message.base), key=message.key)
    if base is None:
        raise UsageError("a patch must name the item that it changes")
    if len(message.result_blake3) != BLAKE3_BYTES:
        raise UsageError("a patch has no BLAKE3 of its result")
    return PatchOrder(
        key=_key_from(message.key),
        base=base,
        result_size_bytes=min(message.result_size_bytes, _COUNT_MAX),
        result_blake3=message.result_blake3,
        properties=_properties_from(message.properties),
    )


def patch_to(patch: RangePatch) -> pb.Patch:
    """The message of a patch."""
    return pb.Patch(offset=patch.offset, old_bytes=patch.old_bytes, data=patch.data)


def patch_from(message: pb.Patch) -> RangePatch:
    """The patch in a message.

    Raises:
        UsageError: it has too many bytes.
    """
    if len(message.data) > PATCH_BYTES_MAX:
        raise UsageError(f"a patch has over {PATCH_BYTES_MAX} bytes")
    return RangePatch(message.offset, message.old_bytes, message.data)


def batch_result_to(result: BatchResult) -> pb.BatchResult:
    """The message of a batch's result."""
    return pb.BatchResult(
        batch=result.number,
        results=map(_outcome_to, result.results),
        items=result.root.count,
        total=total_to(result.root),
    )


def batch_result_from(message: pb.BatchResult, *, number: int, writes: int) -> BatchResult:
    """The result of batch `number`, which had `writes` writes.

    Raises:
        RemoteProtocolError: it is another's.
    """
    if message.batch != number or len(message.results) != writes:
        raise RemoteProtocolError("the verifier's answer belongs to another batch")
    results = tuple(map(_outcome_from, message.results))
    return BatchResult(number, results, root_from(message.items, message.total))


def key_writes_to(writes: Sequence[KeyWrite], profile_digest: bytes) -> pb.WriteKeysRequest:
    """The message of changes of different keys."""
    message = pb.WriteKeysRequest(profile_digest=profile_digest)
    for write in writes:
        added = message.writes.add(key=write.key)
        if write.deletes:
            added.delete = True
            continue
        _set_properties(added.properties, write.properties)
        if write.body is not None:
            condition = write.condition
            added.body, added.blake3 = write.body, write.blake3
            added.absent, added.etag = condition.absent, condition.etag
        elif write.replaced is not None:
            added.properties_only, added.tags_only = True, write.tags_only
            added.replaced.CopyFrom(facts_to(replace(write.replaced, key="", hashes=())))
    return message


def key_writes_from(message: pb.WriteKeysRequest) -> list[KeyWrite]:
    """The changes of a request.

    Raises:
        UsageError: the request or one of its changes is invalid.
    """
    if len(message.writes) > WRITES_MAX:
        raise UsageError(f"{len(message.writes)} writes in a request; the limit is {WRITES_MAX}")
    if sum(len(write.body) for write in message.writes) > BATCH_BYTES_MAX:
        raise UsageError(f"a request has over {BATCH_BYTES_MAX} bytes of objects")
    writes = [_key_write_from(write) for write in message.writes]
    if len({write.key for write in writes}) != len(writes):
        raise UsageError("a request writes one key twice")
    return writes


def _key_write_from(message: pb.KeyWrite) -> KeyWrite:
    key, properties = _key_from(message.key), _properties_from(message.properties)
    match message.WhichOneof("change"):
        case "delete" if message.delete:
            return KeyWrite(key)
        case "properties_only" if message.properties_only and message.HasField("replaced"):
            replaced = replace(facts_from(message.replaced), key=key, hashes=())
            return KeyWrite(
                key, properties=properties, replaced=replaced, tags_only=message.tags_only
            )
        case "body" if len(message.body) <= BODY_BYTES_MAX:
            if len(message.blake3) != BLAKE3_BYTES:
                raise UsageError("a write has no BLAKE3 of its body")
            condition = WriteCondition(message.absent, message.etag[:_TEXT_MAX])
            return KeyWrite(key, message.body, properties, message.blake3, condition)
        case "body":
            raise UsageError(f"an object in a request has over {BODY_BYTES_MAX} bytes")
        case _:
            raise UsageError("a change has no body, and is no other change either")


def key_results_to(results: Sequence[WriteOutcome]) -> pb.WriteKeysResponse:
    """The message of what became of changes."""
    return pb.WriteKeysResponse(results=map(_outcome_to, results))


def key_results_from(message: pb.WriteKeysResponse, *, writes: int) -> list[WriteOutcome]:
    """What became of so many changes.

    Raises:
        RemoteProtocolError: the answer is not about these.
    """
    if len(message.results) != writes:
        raise RemoteProtocolError("the verifier did not say what became of each change")
    return list(map(_outcome_from, message.results))


def _outcome_to(outcome: WriteOutcome) -> pb.WriteResult:
    return pb.WriteResult(
        error=outcome.error,
        reason=outcome.reason,
        etag=outcome.etag,
        modified_ms=outcome.modified_ms,
        version=outcome.version,
    )


def _outcome_from(message: pb.WriteResult) -> WriteOutcome:
    return WriteOutcome(
        message.error[:_TEXT_MAX],
        message.reason[:_TEXT_MAX],
        message.etag[:_TEXT_MAX],
        min(message.modified_ms, _COUNT_MAX),
        message.version[:_TEXT_MAX],
    )


def facts_to(facts: ObjectFacts) -> pb.Facts:
    """The message of an object's facts."""
    return pb.Facts(
        key=facts.key,
        size_bytes=facts.size_bytes,
        etag=facts.etag,
        modified_ms=facts.modified_ms,
        version=facts.version,
        is_delete_marker=facts.is_delete_marker,
        hashes=[
            pb.ContentHash(algorithm=known.algorithm.value, digest=known.digest)
            for known in facts.hashes
        ],
    )


def facts_from(message: pb.Facts) -> ObjectFacts:
    """The facts in a message; hashes by algorithms unknown here are left out."""
    known = {algorithm.value: algorithm for algorithm in HashAlgorithm}
    return ObjectFacts(
        key=message.key,
        size_bytes=min(message.size_bytes, _COUNT_MAX),
        etag=message.etag[:_TEXT_MAX],
        modified_ms=min(message.modified_ms, _COUNT_MAX),
        version=message.version[:_TEXT_MAX],
        is_delete_marker=message.is_delete_marker,
        hashes=tuple(
            ContentHash(known[sent.algorithm], sent.digest)
            for sent in message.hashes
            if sent.algorithm in known
        ),
    )


def keys_from(message: pb.GetFactsRequest) -> list[str]:
    """The keys whose facts are wanted.

    Raises:
        UsageError: there are too many, or one is invalid.
    """
    if len(message.keys) > KEYS_MAX:
        raise UsageError(f"{len(message.keys)} keys in a request; the limit is {KEYS_MAX}")
    return [_key_from(key) for key in message.keys]


def total_to(root: SetRoot) -> bytes:
    """The sum of a root's IDs as 16 bytes."""
    return root.total.to_bytes(ID_BYTES, "big")


def root_from(items: int, total: bytes) -> SetRoot:
    """The root with this many items.

    Raises:
        RemoteProtocolError: its sum has not 16 bytes.
    """
    if len(total) != ID_BYTES:
        raise RemoteProtocolError("the verifier sent an invalid root")
    return SetRoot(min(items, _COUNT_MAX), int.from_bytes(total, "big"))


def description_to(description: Description) -> pb.DescribeResponse:
    """The message of a verifier's description."""
    profile = description.profile
    return pb.DescribeResponse(
        address=description.address,
        writes=description.takes_writes,
        index=index_state_to(description.index),
        profile=pb.Profile(
            secret=profile.secret,
            algorithm=profile.algorithm.value if profile.algorithm else "",
            properties=profile.properties,
        ),
        lists_all_keys=description.lists_all_keys,
        roles_enforced=description.roles_enforced,
    )


def description_from(message: pb.DescribeResponse) -> Description:
    """The description in a message.

    Raises:
        RemoteProtocolError: its profile is invalid, or from a newer version.
    """
    sent = message.profile
    try:
        algorithm = HashAlgorithm(sent.algorithm) if sent.algorithm else None
    except ValueError as error:
        raise RemoteProtocolError("the verifier uses an unknown hash algorithm") from error
    properties = tuple(sent.properties)
    if len(sent.secret) != SECRET_BYTES or list(properties) != sorted(set(properties)):
        raise RemoteProtocolError("the verifier sent an invalid profile")
    return Description(
        message.address[:_TEXT_MAX],
        message.writes,
        Profile(sent.secret, algorithm, properties),
        index_state_from(message.index),
        message.lists_all_keys,
        message.roles_enforced,
    )


def run_to(run: RunName) -> pb.Run:
    """The message of a run's name."""
    return pb.Run(pair=run.pair, run=run.run, epoch=run.epoch)


def run_from(message: pb.Run) -> RunName:
    """The run in a message.

    Raises:
        UsageError: a name has another length.
    """
    if len(message.pair) != RUN_BYTES or len(message.run) != RUN_BYTES:
        raise UsageError(f"the name of a run has twice {RUN_BYTES} bytes")
    return RunName(message.pair, message.run, min(message.epoch, _EPOCH_MAX))


def index_state_to(state: IndexState) -> pb.IndexState:
    """The message of an index's state."""
    evidence = state.evidence
    return pb.IndexState(
        position=state.position,
        listed=evidence.listed,
        recorded=evidence.recorded,
        read=evidence.read,
        listed_at_ms=1000 * (state.listed_at_s or 0),
        oldest_read_ms=1000 * (evidence.oldest_read_at_s or 0),
        settled_items=state.settled.count if state.settled else 0,
        settled_total=total_to(state.settled) if state.settled else b"",
        damaged=b"".join(sorted(state.damaged)),
        unsettled=state.unsettled,
    )


def index_state_from(message: pb.IndexState) -> IndexState:
    """The index's state in a message.

    Raises:
        RemoteProtocolError: a root in it is invalid, or a hash.
    """
    evidence = EvidenceCounts(
        listed=min(message.listed, _COUNT_MAX),
        recorded=min(message.recorded, _COUNT_MAX),
        read=min(message.read, _COUNT_MAX),
        oldest_read_at_s=message.oldest_read_ms // 1000 or None,
    )
    settled = None
    if message.settled_total:
        settled = root_from(message.settled_items, message.settled_total)
    hashes, step = message.damaged, KEY_HASH_BYTES
    if len(hashes) % step or len(hashes) > DAMAGED_MAX * step:
        raise RemoteProtocolError("the verifier named damaged keys by other than hashes")
    damaged = frozenset(hashes[at : at + step] for at in range(0, len(hashes), step))
    listed_at_s = message.listed_at_ms // 1000 or None
    unsettled = min(message.unsettled, _COUNT_MAX) if message.HasField("unsettled") else None
    return IndexState(message.position, evidence, listed_at_s, settled, damaged, unsettled)


def _key_from(key: str) -> str:
    if not 0 < len(key.encode()) <= KEY_BYTES_MAX:
        raise UsageError(f"a key has 1 to {KEY_BYTES_MAX} bytes")
    return key


def _id_from(raw: bytes) -> ItemId | None:
    if len(raw) not in (0, ID_BYTES):
        raise UsageError(f"an ID has {ID_BYTES} bytes")
    return ItemId(raw) if raw else None


def _set_properties(message: pb.Properties, properties: ObjectProperties) -> None:
    for field, pairs in (
        (message.metadata, properties.metadata),
        (message.tags, properties.tags),
        (message.headers, properties.headers),
        (message.acl, properties.acl),
    ):
        field.extend(pb.Pair(name=name, value=value) for name, value in pairs)


def _properties_from(message: pb.Properties) -> ObjectProperties:
    if message.ByteSize() > _PROPERTIES_BYTES_MAX:
        raise UsageError("an object's properties are too large", limit=_PROPERTIES_BYTES_MAX)
    return ObjectProperties(
        _pairs_from(message.metadata),
        _pairs_from(message.tags),
        _pairs_from(message.headers),
        _pairs_from(message.acl),
    )


def _pairs_from(pairs: Iterable[pb.Pair]) -> tuple[tuple[str, str], ...]:
    found = tuple((pair.name, pair.value) for pair in pairs)
    if len(found) > _PAIRS_MAX or list(found) != sorted(found):
        raise UsageError("an object's properties are not sorted by name")
    return found
