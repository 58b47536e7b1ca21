"""May these two buckets be replicated? All that speaks against it, at once (OZ-025).

Pure, but for `facts_of` and `is_empty`, which ask a store.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from replicator.crossing import not_kept
from replicator.stores.bucket_facts import BucketFacts, BucketQuota
from replicator.stores.port import Store


class Precheck(Enum):
    """What is looked at before a replication begins."""

    LAYOUT = "layout"
    """Both buckets have one layout (OZ-016)."""
    ACLS = "acls"
    """Both have the same ACLs (OZ-017)."""
    DEFAULT_REPLICATION = "default_replication"
    """Both have the same default replication (OZ-018)."""
    QUOTA = "quota"
    """The target has no quota, or one that is large enough (OZ-019)."""
    TARGET_EMPTY = "target_empty"
    """The target has no object (OZ-022)."""
    TARGET_WRITERS = "target_writers"
    """Nobody but its owner may write to the target (OZ-023)."""
    SNAPSHOTS = "snapshots"
    """The services of both make snapshots (OZ-024)."""
    PROPERTIES = "properties"
    """The target keeps all that objects have beside their bytes (OZ-027 to OZ-032)."""
    VERIFIER = "verifier"
    """The verifier is one of the target, and takes writes."""


@dataclass(frozen=True, slots=True)
class PrecheckFinding:
    """Something that speaks against a replication. One that `is_refusal` prevents it;
    others are warnings.
    """

    check: Precheck
    is_refusal: bool
    text: str


@dataclass(frozen=True, slots=True)
class PrecheckReport:
    """What was found. `unknown` has the checks for which a store has no such thing, or
    did not say: these neither pass nor fail.
    """

    findings: tuple[PrecheckFinding, ...]
    unknown: tuple[Precheck, ...]

    @property
    def is_refused(self) -> bool:
        """Whether the replication may not begin."""
        return any(one.is_refusal for one in self.findings)


def facts_of(store: Store) -> BucketFacts:
    """What a store says of its bucket; all is unknown where it has no such thing.

    Raises:
        StoreError: the store did not say.
    """
    return store.bucket.facts() if store.bucket else BucketFacts()


def is_empty(store: Store) -> bool:
    """Whether a bucket has no object.

    Raises:
        StoreError: the store did not say.
    """
    return next(store.lister.list_objects(""), None) is None


def lost_properties(source: Store, target: Store) -> tuple[PrecheckFinding, ...]:
    """A warning for whatever objects of the source will not have at the target."""
    lost = not_kept(source.capabilities, target.capabilities)
    return tuple(PrecheckFinding(Precheck.PROPERTIES, False, text) for text in lost)


def precheck(
    source: BucketFacts, target: BucketFacts, *, target_is_empty: bool, allow_nonempty: bool
) -> PrecheckReport:
    """All that speaks against a replication from one bucket to another."""
    findings = [
        *_equal_layouts(source, target),
        *_same_rights(source, target),
        *_same_replication(source, target),
        *_enough_quota(source, target),
        *_no_writers(target),
        *_snapshots(source, target),
    ]
    if not target_is_empty:
        text = "the target is not empty: objects of the same keys will be overwritten"
        findings.append(PrecheckFinding(Precheck.TARGET_EMPTY, not allow_nonempty, text))
    return PrecheckReport(tuple(findings), tuple(_unknown(source, target)))


def _equal_layouts(source: BucketFacts, target: BucketFacts) -> Iterator[PrecheckFinding]:
    if source.layout and target.layout and source.layout != target.layout:
        text = f"the source's layout is {source.layout}, the target's is {target.layout}"
        yield PrecheckFinding(Precheck.LAYOUT, True, text)


def _same_rights(source: BucketFacts, target: BucketFacts) -> Iterator[PrecheckFinding]:
    if source.grants is None or target.grants is None or source.grants == target.grants:
        return
    ours = "; ".join(map(str, source.grants)) or "none"
    theirs = "; ".join(map(str, target.grants)) or "none"
    text = f"the source's ACLs are {ours}, the target's are {theirs}"
    yield PrecheckFinding(Precheck.ACLS, False, text)


def _same_replication(source: BucketFacts, target: BucketFacts) -> Iterator[PrecheckFinding]:
    ours, theirs = source.default_replication, target.default_replication
    if ours and theirs and ours != theirs:
        text = f"the source replicates by {ours}, the target by {theirs}: copies get the target's"
        yield PrecheckFinding(Precheck.DEFAULT_REPLICATION, False, text)


def _enough_quota(source: BucketFacts, target: BucketFacts) -> Iterator[PrecheckFinding]:
    ours, theirs = source.quota or BucketQuota(), target.quota
    if theirs is None:
        return
    for what, most, limit, used in (
        ("bytes", theirs.bytes_max, ours.bytes_max, ours.used_bytes),
        ("objects", theirs.objects_max, ours.objects_max, ours.used_objects),
    ):
        if most is None:
            continue
        if used > most:
            text = f"the target's quota is {most} {what}; the source holds {used}"
            yield PrecheckFinding(Precheck.QUOTA, True, text)
        elif limit is None or limit > most:
            has = "has none" if limit is None else f"is {limit}"
            text = f"the target's quota is {most} {what}; the source's {has}"
            yield PrecheckFinding(Precheck.QUOTA, True, text)


def _no_writers(target: BucketFacts) -> Iterator[PrecheckFinding]:
    others = [
        str(one)
        for one in target.grants or ()
        if one.may_write and (one.kind, one.name) != ("USER", target.owner)
    ]
    if others:
        text = f"others than its owner may write to the target: {'; '.join(others)}"
        yield PrecheckFinding(Precheck.TARGET_WRITERS, False, text)


def _snapshots(source: BucketFacts, target: BucketFacts) -> Iterator[PrecheckFinding]:
    for side, facts in (("source", source), ("target", target)):
        if facts.has_snapshots is False:
            text = f"the {side}'s service has snapshots disabled"
            yield PrecheckFinding(Precheck.SNAPSHOTS, True, text)


def _unknown(source: BucketFacts, target: BucketFacts) -> Iterator[Precheck]:
    for check, values in (
        (Precheck.LAYOUT, (source.layout, target.layout)),
        (Precheck.ACLS, (source.grants, target.grants)),
        (Precheck.DEFAULT_REPLICATION, (source.default_replication, target.default_replication)),
        (Precheck.QUOTA, (target.quota,)),
        (Precheck.TARGET_WRITERS, (target.grants,)),
        (Precheck.SNAPSHOTS, (source.has_snapshots, target.has_snapshots)),
    ):
        if None in values:
            yield check
