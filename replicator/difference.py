"""What must happen for one key, from what is known of it at both sides.

Knowledge is never filled in: where the decision depends on something that nobody has
read, the decision names it, the caller reads it, and asks again. An ETag is part of a
stamp: it says whether something changed since it was recorded, and proves no content.
"""

from dataclasses import dataclass
from enum import Enum

from proof.item import ContentHash, EvidenceLevel, HashAlgorithm
from replicator.hashing import ContentHasher
from replicator.ledger import LedgerRow
from replicator.stores.port import ObjectFacts

# All objects without bytes are equal, whatever is known of them.
_EMPTY = {one.algorithm: one.digest for one in ContentHasher().hashes()}

# Algorithms whose collisions nobody meets by accident.
_COLLISION_FREE = {HashAlgorithm.BLAKE3, HashAlgorithm.SHA256, HashAlgorithm.MD5}


class Action(Enum):
    """What to do for a key, by the name in plans."""

    NOTHING = "nothing"
    COPY = "copy"
    PATCH = "patch"
    """Send the windows that changed."""
    PROPERTIES = "properties"
    DELETE = "delete"
    LEAVE = "leave"
    """It exists at the target only, and nobody asked to delete."""


class Need(Enum):
    """What must be read before a decision."""

    SOURCE_FACTS = "source_facts"
    SOURCE_CONTENT = "source_content"
    SOURCE_PROPERTIES = "source_properties"
    TARGET_PROPERTIES = "target_properties"


@dataclass(frozen=True, slots=True)
class KeyState:
    """What is known of one key.

    `source` and `target` are as listed, None where the listing has no such key. `row`
    is the ledger's. The rest was read because a decision needed it: None is not read.
    `source_is_fresh` says that the source's facts were asked for by themselves, after
    the listing, `target_is_damaged` that a verification read other bytes from this very
    object than were recorded of it.
    """

    key: str
    source: ObjectFacts | None
    target: ObjectFacts | None
    row: LedgerRow | None = None
    source_is_fresh: bool = False
    source_content: tuple[ContentHash, ...] | None = None
    source_properties: bytes | None = None
    target_properties: bytes | None = None
    target_is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class DecisionRules:
    """What holds for all keys of a run.

    `stamps_cover_properties`: the source's stamp changes with any property that
    crosses, so that an unchanged stamp needs no reading. `reads_target_properties`:
    others set properties at the target, and its stamp does not show it. `may_delete` is
    False also where a listing was not complete. `copies_unproven`: an object of unknown
    content is copied where its time or stamp suggests that it changed. A verification
    does not, and finds no difference that it does not know. With `trusts_times` one
    that is older at the source is taken for equal; a key of which it is known that it
    was changed is not.
    """

    may_delete: bool
    stamps_cover_properties: bool
    patches: bool
    copies_unproven: bool = True
    trusts_times: bool = True
    reads_target_properties: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What must happen, or first be read. `level` says how it is known that contents
    are equal or not; `hashes` are those that are equal at both sides.
    """

    action: Action
    reason: str
    needs: Need | None = None
    level: EvidenceLevel = EvidenceLevel.LISTED
    hashes: tuple[ContentHash, ...] = ()
    properties: bytes = b""


class _Content(Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def decide(state: KeyState, rules: DecisionRules) -> Decision:
    """What must happen for a key."""
    source, target, row = state.source, state.target, state.row
    if source is None:
        return _extra(state, rules)
    if target is None:
        return Decision(Action.COPY, "missing at the target")
    if state.target_is_damaged:
        return Decision(Action.COPY, "damaged at the target", None, EvidenceLevel.RECORDED)
    target_is_known = row is not None and row.target.agrees(target)
    may_patch = rules.patches and target_is_known and row is not None and row.has_windows
    different = Action.PATCH if may_patch else Action.COPY
    if source.size_bytes != target.size_bytes:
        return Decision(different, "another size")
    source_is_known = row is not None and row.source.agrees(source)
    ours = _known(source, row if source_is_known else None, state.source_content)
    theirs = _known(target, row if target_is_known else None, None)
    verdict, common = _compare(ours, theirs)
    if verdict is _Content.DIFFERENT:
        return Decision(different, "another content", None, EvidenceLevel.RECORDED)
    if verdict is _Content.UNKNOWN:
        if may_patch:
            # The patch reads the source anyway, and finds out what changed.
            return Decision(Action.PATCH, "changed at the source")
        if theirs and state.source_content is None:
            return Decision(Action.NOTHING, "content unknown", needs=Need.SOURCE_CONTENT)
        if rules.copies_unproven and row is not None and not target_is_known:
            return Decision(Action.COPY, "changed at the target since it was copied")
        is_newer = not rules.trusts_times or target.modified_ms < source.modified_ms
        if rules.copies_unproven and is_newer:
            return Decision(Action.COPY, "newer at the source")
    level = EvidenceLevel.RECORDED if common else EvidenceLevel.LISTED
    if common and row is not None and source_is_known and target_is_known:
        level = max(level, row.level)
    return _with_properties(state, rules, Decision(Action.NOTHING, "", None, level, common))


def _extra(state: KeyState, rules: DecisionRules) -> Decision:
    """A key that the source's listing does not have."""
    if state.target is None:
        return Decision(Action.NOTHING, "gone from both sides")
    if not rules.may_delete:
        return Decision(Action.LEAVE, "exists at the target only")
    if not state.source_is_fresh:
        return Decision(Action.LEAVE, "exists at the target only", needs=Need.SOURCE_FACTS)
    return Decision(Action.DELETE, "not at the source")


def _with_properties(state: KeyState, rules: DecisionRules, equal: Decision) -> Decision:
    """The decision for a key whose content needs nothing."""
    source, target, row = state.source, state.target, state.row
    assert source is not None
    assert target is not None
    ours, theirs = state.source_properties, state.target_properties
    # A row without a digest was taken while other properties crossed.
    row = row if row is not None and row.properties else None
    if row is not None and theirs is None and not rules.reads_target_properties:
        theirs = row.properties if row.target.agrees(target) else None
    if row is not None and ours is None and rules.stamps_cover_properties:
        ours = row.properties if row.source.agrees(source) else None
    if ours is None:
        return Decision(Action.NOTHING, "properties unknown", needs=Need.SOURCE_PROPERTIES)
    if theirs is None:
        return Decision(Action.NOTHING, "properties unknown", needs=Need.TARGET_PROPERTIES)
    if ours != theirs:
        reason = "other properties"
        known = EvidenceLevel.RECORDED
        return Decision(Action.PROPERTIES, reason, None, known, equal.hashes, theirs)
    return Decision(Action.NOTHING, "equal", None, equal.level, equal.hashes, ours)


def _known(
    facts: ObjectFacts, row: LedgerRow | None, content: tuple[ContentHash, ...] | None
) -> dict[HashAlgorithm, bytes]:
    """The hashes of an object: what was read counts above what the store declares, and
    that above what was recorded earlier.
    """
    if not facts.size_bytes:
        return _EMPTY
    found = {one.algorithm: one.digest for one in row.hashes} if row is not None else {}
    found |= {one.algorithm: one.digest for one in facts.hashes}
    return found | {one.algorithm: one.digest for one in content or ()}


def _compare(
    ours: dict[HashAlgorithm, bytes], theirs: dict[HashAlgorithm, bytes]
) -> tuple[_Content, tuple[ContentHash, ...]]:
    """Whether two contents are equal, and the hashes that both have."""
    both = ours.keys() & theirs.keys()
    if not both:
        return _Content.UNKNOWN, ()
    if any(ours[name] != theirs[name] for name in both):
        return _Content.DIFFERENT, ()
    # Of equal bytes all hashes hold; a CRC alone does not vouch for stronger ones.
    known = ours | theirs if both & _COLLISION_FREE else {name: ours[name] for name in both}
    hashes = (ContentHash(name, digest) for name, digest in known.items())
    return _Content.EQUAL, tuple(sorted(hashes, key=lambda one: one.algorithm.value))
