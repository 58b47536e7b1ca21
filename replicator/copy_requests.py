"""What the copy of one object asks of its runner, and the values that pass between.

A copy is a generator: it yields a request and is resumed with the answer, or with the
error of the request thrown into it. It does no I/O of its own. A test may stop it after
any request, as a killed process stops.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from merkle.checksum import Buffer
from proof.item import ContentHash
from replicator.stitching import StitchPlan
from replicator.stores.errors import StoreError
from replicator.stores.port import (
    CopySource,
    ObjectFacts,
    ObjectProperties,
    UploadedPart,
    UploadId,
    WholeObject,
    WriteCondition,
)
from replicator.stores.stamps import same_stamp
from replicator.windows import WindowTable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """While a store answers the same stamp for a key, the bytes are the same. What the
    store did not say is empty or 0, and agrees with anything.
    """

    version: str
    etag: str
    modified_ms: int
    size_bytes: int

    @classmethod
    def of(cls, facts: ObjectFacts) -> "ObjectStamp":
        """The stamp in these facts."""
        return cls(facts.version, facts.etag, facts.modified_ms, facts.size_bytes)

    def facts(self, key: str) -> ObjectFacts:
        """The facts of a key with this stamp; of its hashes nothing is known."""
        return ObjectFacts(key, self.size_bytes, self.etag, self.modified_ms, self.version)

    def agrees(self, facts: ObjectFacts) -> bool:
        """Whether these facts describe the same state, as far as both say."""
        return same_stamp(self.facts(facts.key), facts)

    def completed(self, facts: ObjectFacts) -> "ObjectStamp":
        """This stamp with what facts that agree with it say besides."""
        return ObjectStamp(
            self.version or facts.version,
            self.etag,
            facts.modified_ms or self.modified_ms,
            self.size_bytes,
        )


class FailureReason(Enum):
    """Why a key was not brought to the target, by the name in reports."""

    SOURCE_CHANGED = "source_changed"
    """It changed twice while it was being copied."""
    SOURCE_UNREADABLE = "source_unreadable"
    SOURCE_DISAGREES = "source_disagrees"
    """What was read of it has another hash than its store declares."""
    TARGET_CHANGED = "target_changed"
    """Somebody else wrote the key at the target; it is left as it is."""
    TARGET_DISAGREES = "target_disagrees"
    """The target answered with another size or hash than what was sent."""
    UNSUPPORTED = "unsupported"
    """The target cannot keep this key, size or metadata."""
    TARGET_REFUSED = "target_refused"
    UNAVAILABLE = "unavailable"
    """A store did not answer after several attempts."""
    DELETE_REFUSED = "delete_refused"
    IN_FLIGHT = "in_flight"
    """It changed between the looks that a delete needs, and was not deleted."""


class CopyFailedError(StoreError):
    """One object was not copied; `facts['reason']` is the value of a FailureReason."""

    code = "copy_failed"

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message, reason=reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part that the target acknowledged; `blake3` is of the bytes that it has been
    proven to have got, empty where it copied them from itself, and where the ETag of
    the source is the proof of all parts together.
    """

    part: UploadedPart
    blake3: bytes


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """An upload of ours at the target. `upload` is None from just before it is begun
    until its ID is known: a run that is killed between leaves an upload without parts,
    which nobody can tell from those of others. `source` is what is being copied,
    `target` the object that it will replace. `properties` is a digest of what it was
    begun with. `part_bytes` is the size of all parts but the last, negative for a
    patch, of whose parts it is a fingerprint, and 0 for what is stitched, which no run
    resumes.
    """

    upload: UploadId | None
    source: ObjectStamp
    target: ObjectStamp | None
    properties: bytes
    part_bytes: int
    sent: tuple[SentPart, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it sends the whole object."""
        return self.part_bytes > 0


class AclSeen(Enum):
    """What a copy has seen of the source's ACL."""

    NOTHING = "nothing"
    DEFAULT = "default"
    OTHER = "other"
    ASSUMED = "assumed"
    """It was taken for the default one, and not read."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """An object that the target acknowledged: its facts there, what was sent, and how
    much of it. `source` has the facts of the version that was copied; `properties` is
    the digest of those that crossed.
    """

    source: ObjectFacts
    target: ObjectFacts
    hashes: tuple[ContentHash, ...]
    properties: bytes
    sent_bytes: int
    windows: WindowTable | None = None
    properties_only: bool = False
    acl: AclSeen = AclSeen.NOTHING


@dataclass(frozen=True, slots=True)
class ReadSourceFacts:
    """Answered by ObjectFacts or None."""

    key: str


@dataclass(frozen=True, slots=True)
class ReadTargetFacts:
    """Answered by ObjectFacts or None."""

    key: str


@dataclass(frozen=True, slots=True)
class ReadSourceProperties:
    """Answered by ObjectProperties."""

    facts: ObjectFacts


@dataclass(frozen=True, slots=True)
class ReadWhole:
    """All bytes and the properties of just this version of the source; answered by
    WholeObject.
    """

    facts: ObjectFacts
    with_acl: bool = True


@dataclass(frozen=True, slots=True)
class ReadTargetProperties:
    """Answered by ObjectProperties."""

    facts: ObjectFacts


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes of just this version of the source; answered by a memoryview of them. Its
    memory is that of the next read, unless a part with it was started. Bytes up to
    `until` will probably be read next.
    """

    facts: ObjectFacts
    first: int
    end: int
    until: int


@dataclass(frozen=True, slots=True)
class DoubtSourceEtags:
    """An ETag of the source did not prove our parts, so later copies need not try;
    answered by None.
    """


@dataclass(frozen=True, slots=True)
class PutObject:
    """Answered by ObjectFacts."""

    key: str
    body: Buffer
    properties: ObjectProperties
    condition: WriteCondition


@dataclass(frozen=True, slots=True)
class PutPieces:
    """Write just this version of the source as it is read; answered by ObjectFacts. The
    target checks the MD5. `take` gets each piece before it is sent, and looks at it no
    more when it returns. The last piece is sent once the source has been seen to be
    unchanged.
    """

    facts: ObjectFacts
    md5: bytes
    properties: ObjectProperties
    condition: WriteCondition
    take: Callable[[Buffer], None]


@dataclass(frozen=True, slots=True)
class PutProperties:
    """Answered by ObjectFacts."""

    facts: ObjectFacts
    properties: ObjectProperties
    tags_only: bool


@dataclass(frozen=True, slots=True)
class SaveUpload:
    """Keep this in the ledger, instead of what it has of the key's upload; answered by
    None. A record of None forgets the upload.
    """

    key: str
    record: UploadRecord | None


@dataclass(frozen=True, slots=True)
class SavePart:
    """Add a part to the key's upload in the ledger; answered by None."""

    key: str
    sent: SentPart


@dataclass(frozen=True, slots=True)
class BeginUpload:
    """Answered by UploadId."""

    key: str
    properties: ObjectProperties


@dataclass(frozen=True, slots=True)
class AbortUpload:
    """Answered by None."""

    key: str
    upload: UploadId


@dataclass(frozen=True, slots=True)
class ListParts:
    """Answered by a tuple of UploadedPart."""

    key: str
    upload: UploadId


@dataclass(frozen=True, slots=True)
class StartPart:
    """Begin to write a part; answered by None at once. JoinPart gives the outcome.
    `with_digest` as of UploadWriter.
    """

    key: str
    upload: UploadId
    number: int
    body: Buffer
    with_digest: bool


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Write the bytes `first` to `end` of just this version of the source as a part,
    once, while they are read, and without a digest; answered by UploadedPart. `take` as
    of PutPieces. Bytes up to `until` will probably be read next.
    """

    facts: ObjectFacts
    upload: UploadId
    number: int
    first: int
    end: int
    until: int
    take: Callable[[Buffer], None]


@dataclass(frozen=True, slots=True)
class JoinPart:
    """Wait for any part that was started; answered by UploadedPart."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Answered by UploadedPart."""

    key: str
    upload: UploadId
    number: int
    source: CopySource


@dataclass(frozen=True, slots=True)
class StitchObject:
    """Answered by ObjectFacts of the object that the plan makes of `base`. Its upload
    and the parts of it are added to the key's record in the ledger before they count.
    """

    base: ObjectFacts
    plan: StitchPlan
    properties: ObjectProperties
    whole: ContentHash | None


@dataclass(frozen=True, slots=True)
class CompleteUpload:
    """Answered by ObjectFacts."""

    key: str
    upload: UploadId
    parts: tuple[UploadedPart, ...]
    properties: ObjectProperties
    condition: WriteCondition
    whole: ContentHash | None


Request: TypeAlias = (
    ReadSourceFacts
    | ReadTargetFacts
    | ReadSourceProperties
    | ReadWhole
    | ReadTargetProperties
    | ReadRange
    | DoubtSourceEtags
    | PutObject
    | PutPieces
    | PutProperties
    | SaveUpload
    | SavePart
    | BeginUpload
    | AbortUpload
    | ListParts
    | StartPart
    | StreamPart
    | JoinPart
    | CopyPart
    | StitchObject
    | CompleteUpload
)
Answer: TypeAlias = (
    ObjectFacts
    | ObjectProperties
    | WholeObject
    | memoryview
    | str
    | UploadedPart
    | tuple[UploadedPart, ...]
    | None
)
Steps: TypeAlias = Generator[Request, Answer, T]
