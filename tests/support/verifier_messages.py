"""A message of each kind that crosses between a syncer and a verifier, and what takes
it in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from google.protobuf.message import Message

from proof.index import EvidenceCounts
from proof.item import ContentHash, HashAlgorithm, ItemId, Profile
from proof.root import SetRoot
from protos import verifier_pb2 as pb
from replicator.hashing import blake3_of
from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition
from replicator.verifier.messages import (
    batch_result_from,
    batch_result_to,
    delete_answer_from,
    delete_request_to,
    delete_response_to,
    deletes_from,
    description_from,
    description_to,
    facts_from,
    facts_to,
    index_state_from,
    index_state_to,
    key_results_from,
    key_results_to,
    key_writes_from,
    key_writes_to,
    keys_from,
    patch_from,
    patch_order_from,
    patch_order_to,
    patch_to,
    root_from,
    run_from,
    run_to,
    write_to,
    writes_from,
)
from replicator.verifier.values import (
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

ID = ItemId(bytes(range(16)))
PROPERTIES = ObjectProperties(
    metadata=(("a", "1"), ("b", "é")),
    tags=(("t", ""),),
    headers=(("content-type", "text/plain"),),
    acl=(("owner", "FULL_CONTROL"),),
)
WRITES = (
    Write("a", b"body", PROPERTIES, blake3_of(b"body"), ID),
    Write("b", b"", PROPERTIES, blake3_of(b""), None),
    Write("é", None, PROPERTIES, b"", ID),
)
RUN = RunName(b"pair-one", b"run-1234", 7)
KEY_WRITES = (
    KeyWrite("a", b"body", PROPERTIES, blake3_of(b"body"), WriteCondition(etag="e")),
    KeyWrite("b", b"", PROPERTIES, blake3_of(b""), WriteCondition(absent=True)),
    KeyWrite("é", properties=PROPERTIES, replaced=ObjectFacts("é", 7, "e", 5), tags_only=True),
    KeyWrite("gone"),
)
DELETES = (ID, ItemId(bytes(range(1, 17))))
DELETED = DeleteAnswer((DeleteRefusal(1, "precondition_failed", "no"),), SetRoot(8, 1))
ORDER = PatchOrder("k", ID, 5 << 20, b"h" * 32, PROPERTIES)
FACTS = ObjectFacts(
    "k", 7, "etag", 1_700_000_000_000, "v1", hashes=(ContentHash(HashAlgorithm.MD5, b"m" * 16),)
)
RESULT = BatchResult(
    3,
    (WriteOutcome(etag="e", modified_ms=5, version="1"), WriteOutcome("precondition_failed", "no")),
    SetRoot(9, 2**128 - 1),
)
DESCRIPTION = Description(
    "local:/b",
    True,
    Profile(b"s" * 32, HashAlgorithm.BLAKE3),
    IndexState(7, EvidenceCounts(1, 2, 3, 4000), 1_700_000_000),
    lists_all_keys=True,
    roles_enforced=True,
)


@dataclass(frozen=True)
class Accepted:
    """A kind of message: a valid one, and what its receiver does with it."""

    name: str
    seed: Message
    accept: Callable[[Message], object]


def accepted() -> Iterator[Accepted]:
    """Every kind of message that has a content."""
    batch = pb.WriteBatch(
        profile_digest=b"p" * 16, batch=3, writes=[write_to(write) for write in WRITES]
    )
    yield Accepted("batch", batch, _batch)
    yield Accepted("key writes", key_writes_to(KEY_WRITES, b"p" * 16), _key_writes)
    yield Accepted("key results", key_results_to(RESULT.results), _key_results)
    yield Accepted("run", run_to(RUN), _run)
    by_facts = replace(ORDER, base=replace(FACTS, key=ORDER.key))
    yield Accepted("patch order by facts", patch_order_to(by_facts, b"p" * 16), _order)
    yield Accepted("deletes", delete_request_to(DELETES, b"p" * 16), _deletes)
    yield Accepted("delete response", delete_response_to(2, DELETED), _deleted)
    yield Accepted("patch order", patch_order_to(ORDER, b"p" * 16), _order)
    yield Accepted("patch", patch_to(RangePatch(5, 2, b"data")), _patch)
    yield Accepted("keys", pb.GetFactsRequest(keys=["a", "é"]), _keys)
    yield Accepted("facts", facts_to(FACTS), _facts)
    yield Accepted("batch result", batch_result_to(RESULT), _result)
    yield Accepted("description", description_to(DESCRIPTION), _description)
    yield Accepted("index state", index_state_to(DESCRIPTION.index), _state)


def _batch(message: Message) -> None:
    assert isinstance(message, pb.WriteBatch)
    found = writes_from(message)
    assert writes_from(pb.WriteBatch(writes=[write_to(write) for write in found])) == found


def _key_writes(message: Message) -> None:
    assert isinstance(message, pb.WriteKeysRequest)
    found = key_writes_from(message)
    assert key_writes_from(key_writes_to(found, b"")) == found


def _key_results(message: Message) -> None:
    assert isinstance(message, pb.WriteKeysResponse)
    found = key_results_from(message, writes=2)
    assert key_results_from(key_results_to(found), writes=2) == found


def _run(message: Message) -> None:
    assert isinstance(message, pb.Run)
    found = run_from(message)
    assert run_from(run_to(found)) == found


def _deletes(message: Message) -> None:
    assert isinstance(message, pb.DeleteRequest)
    found = deletes_from(message)
    assert b"".join(found) == message.items


def _deleted(message: Message) -> None:
    assert isinstance(message, pb.DeleteResponse)
    found = delete_answer_from(message, deletes=2)
    assert delete_answer_from(delete_response_to(2, found), deletes=2) == found


def _order(message: Message) -> None:
    assert isinstance(message, pb.PatchHeader)
    found = patch_order_from(message)
    assert patch_order_from(patch_order_to(found, b"")) == found


def _patch(message: Message) -> None:
    assert isinstance(message, pb.Patch)
    found = patch_from(message)
    assert patch_from(patch_to(found)) == found


def _keys(message: Message) -> None:
    assert isinstance(message, pb.GetFactsRequest)
    assert all(keys_from(message))


def _facts(message: Message) -> None:
    assert isinstance(message, pb.Facts)
    found = facts_from(message)
    assert facts_from(facts_to(found)) == found


def _result(message: Message) -> None:
    assert isinstance(message, pb.BatchResult)
    found = batch_result_from(message, number=3, writes=2)
    assert root_from(message.items, message.total) == found.root
    assert batch_result_from(batch_result_to(found), number=3, writes=2) == found


def _description(message: Message) -> None:
    assert isinstance(message, pb.DescribeResponse)
    found = description_from(message)
    assert description_from(description_to(found)) == found


def _state(message: Message) -> None:
    assert isinstance(message, pb.IndexState)
    found = index_state_from(message)
    assert index_state_from(index_state_to(found)) == found
