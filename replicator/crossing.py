"""Which properties of an object cross, by what both stores can keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from proof.item import PROPERTIES_DIGEST_BYTES, properties_digest
from replicator.origin import unmarked
from replicator.stores.capabilities import OZONE_ACLS, Capabilities
from replicator.stores.port import ObjectProperties

# Where the digest of the tags begins.
_TAGS_FROM = PROPERTIES_DIGEST_BYTES
# What stores answer for an object that was given no content type.
_NO_CONTENT_TYPE = ("content-type", "binary/octet-stream")
_NO_CONTENT_TYPES = (_NO_CONTENT_TYPE, ("content-type", "application/octet-stream"))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The groups of properties that cross; user metadata always does, but for the mark
    of a copy's origin, which each copy gets anew.
    """

    tags: bool
    headers: bool
    acl: bool

    @classmethod
    def between(cls, source: Capabilities, target: Capabilities) -> "Crossing":
        """What both stores can keep."""
        return cls(
            tags=source.keeps_tags and target.keeps_tags,
            headers=source.keeps_headers and target.keeps_headers,
            acl=_acls_cross(source, target),
        )

    @classmethod
    def of_groups(cls, groups: Sequence[str]) -> "Crossing":
        """The crossing of which `groups` gives these names."""
        return cls("tags" in groups, "headers" in groups, "acl" in groups)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that cross, sorted."""
        kept = {"acl": self.acl, "headers": self.headers, "metadata": True, "tags": self.tags}
        return tuple(name for name, is_kept in kept.items() if is_kept)

    def of(self, properties: ObjectProperties) -> ObjectProperties:
        """The part of these properties that crosses."""
        headers = tuple(one for one in properties.headers if one != _NO_CONTENT_TYPE)
        return ObjectProperties(
            metadata=unmarked(properties.metadata),
            tags=properties.tags if self.tags else (),
            headers=headers if self.headers else (),
            acl=properties.acl if self.acl else (),
            replaces_acl=self.acl,
        )

    def digest(self, properties: ObjectProperties) -> bytes:
        """32 bytes over the part that crosses; the last 16 are of the tags alone."""
        kept = self.of(properties)
        headers = tuple(one for one in kept.headers if one not in _NO_CONTENT_TYPES)
        others = properties_digest(kept.metadata, headers, kept.acl)
        return others + properties_digest(kept.tags)


def _acls_cross(source: Capabilities, target: Capabilities) -> bool:
    return source.keeps_acls and target.keeps_acls and source.acl_form == target.acl_form


def differ_in_tags_only(ours: bytes, theirs: bytes) -> bool:
    """Whether two digests of properties are equal but for the tags."""
    return ours[:_TAGS_FROM] == theirs[:_TAGS_FROM] and ours != theirs


def not_kept(source: Capabilities, target: Capabilities) -> tuple[str, ...]:
    """What objects of Ozone have, or get, otherwise at the target, in sentences. Of
    other pairs this cannot be told before the target is written to.
    """
    notes = list[str]()
    if target.acl_form == OZONE_ACLS and source.keeps_headers and not target.keeps_headers:
        notes.append("the target keeps no content headers")
    if OZONE_ACLS not in (source.acl_form, target.acl_form):
        return ()
    if source.keeps_acls and source.acl_form != target.acl_form:
        notes.append("ACLs of objects do not cross to a store of another kind")
    if source.acl_form == OZONE_ACLS:
        notes.append(
            "owner, creation time and modification time do not cross: a copy belongs to the"
            " access ID that writes it, and has the time of its writing"
        )
    return tuple(notes)


def lacking(source: Capabilities, target: Capabilities) -> tuple[str, ...]:
    """What does not cross between these stores, and what cannot be guarded, in
    sentences for people.
    """
    lost = [
        (source.keeps_tags and not target.keeps_tags, "tags"),
        (source.keeps_headers and not target.keeps_headers, "content headers"),
        (source.keeps_acls and not _acls_cross(source, target), "ACLs of the source's form"),
    ]
    notes = ["older versions do not cross, only current objects"] * source.keeps_versions
    notes += [f"the target keeps no {what}: they do not cross" for is_lost, what in lost if is_lost]
    guarded = (
        target.creates_conditionally
        and target.replaces_conditionally
        and target.completes_conditionally
    )
    if not guarded:
        notes.append(
            "the target does not guard every write by a condition: a write by others"
            " in the moment before ours can be lost"
        )
    if not target.whole_hashes:
        notes.append("the target declares no hash of whole objects: its word proves no content")
    if not source.stamps_cover_properties:
        notes.append(
            "the stamps of the source do not show all changes of properties: they are read"
        )
    if not target.copies_ranges:
        notes.append("the target copies no ranges: a changed large object is sent whole")
    for side, store in (("source", source), ("target", target)):
        if not store.lists_all_keys:
            notes.append(
                f"the {side} does not list all keys: nothing is deleted, and equality"
                " cannot be shown"
            )
    return tuple(notes)
