"""The rows of a local bucket in SQLite: versions, contents, uploads, and the history.

A change of a key is a row of `versions`, whose number is the position of the change: it
is current until `superseded`, the position of the next one. So the versions are the
change log too, and the bucket as it was at a position is a condition on two columns.
A rename is a delete marker and, at the next position, a version with `previous_key`.

The history reaches back to one position, `trimmed`: rows superseded before are removed
but for those that a snapshot shows. Up to `swept` that is done.

A content is a list of segments, each a range of a blob; a blob is a data file, or bytes
in a row if they are few. Segments of several contents may share a blob, so that parts
become an object, and ranges another object's parts, by rows alone.
"""

import json
import sqlite3
from collections.abc import Iterable

from replicator.hashing import content_hashes
from replicator.stores.errors import FeedGapError, PositionTrimmedError, SnapshotLostError
from replicator.stores.local_contents import (
    TIME_MS_END,
    Content,
    NewBlob,
    Segment,
    content_of,
    damaged,
    file_name_of,
    key_of,
    segment_of,
)
from replicator.stores.port import (
    Change,
    ChangeKind,
    FeedPosition,
    ObjectFacts,
    ObjectProperties,
    SnapshotFacts,
)
from runtime.documents import parse_json
from runtime.row_order import in_order, of_types

# BucketRows that a listing reads at a time: it holds no lock in between.
PAGE_ROWS = 1000

# Of any change: the largest that SQLite keeps.
_POSITION_MAX = (1 << 63) - 1
# What an object keeps of its properties.
_GROUPS = ("metadata", "tags", "headers", "acl")
_FACTS = """
SELECT v.key, v.position, v.modified_ms, v.content, c.size_bytes, c.etag, c.crc32c, c.md5,
    c.blake3, v.previous_key FROM versions v LEFT JOIN contents c USING (content)
"""
_SNAPSHOTS = "SELECT name, snapshot_id, s.position, created_ms, log FROM snapshots s, history"
# A delete marker that is one half of a rename.
_IS_RENAMED = """v.content IS NULL AND EXISTS (
    SELECT 1 FROM versions r WHERE r.position = v.position + 1 AND r.previous_key = v.key)"""
# Written since an older snapshot, and shown by a newer one: whether that one object of
# the older one got another key.
_WRITTEN = """
SELECT facts.*, EXISTS (
    SELECT 1 FROM versions o WHERE o.key = facts.previous_key
    AND o.position <= :older AND o.superseded = facts.position - 1)
FROM (SELECT v.key, v.position, v.modified_ms, v.content, c.size_bytes, c.etag, c.crc32c,
    c.md5, c.blake3, v.previous_key FROM versions v JOIN contents c USING (content)
    WHERE v.position > max(:older, :after) AND v.position <= :newer
    AND (v.superseded IS NULL OR v.superseded > :newer)
    ORDER BY v.position LIMIT :most) facts
"""
# Shown by an older snapshot, and its key neither shown nor renamed in the newer one.
_REMOVED = """
SELECT v.key, v.position, v.superseded FROM versions v
WHERE v.superseded > max(:older, :after) AND v.superseded <= :newer
AND v.position <= :older AND v.content IS NOT NULL
AND NOT EXISTS (SELECT 1 FROM versions n WHERE n.key = v.key AND n.content IS NOT NULL
    AND n.position <= :newer AND (n.superseded IS NULL OR n.superseded > :newer))
AND NOT EXISTS (SELECT 1 FROM versions r WHERE r.position = v.superseded + 1
    AND r.position <= :newer AND r.previous_key = v.key
    AND (r.superseded IS NULL OR r.superseded > :newer))
ORDER BY v.superseded LIMIT :most
"""
_FactsRow = tuple[
    bytes, int, int, int | None, int, str, int, bytes | None, bytes | None, bytes | None
]


class BucketRows:
    """The rows inside one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._many = connection.executemany

    def history(self) -> tuple[int, int]:
        """The position of the newest change, and that to which the history reaches back
        (exclusive).
        """
        row = self._execute("SELECT position, trimmed FROM history").fetchone()
        position, trimmed = of_types(row, int, int)
        return position, trimmed

    def log_stamp(self) -> str:
        """What the file of this log was like when the log began."""
        row = self._execute("SELECT log_stamp FROM history").fetchone()
        return str(of_types(row, str)[0])

    def begin_log(self, log: str, stamp: str) -> None:
        """Give the log another identity; indexes go on."""
        self._execute("UPDATE history SET log = ?, log_stamp = ?", (log, stamp))

    def position(self) -> FeedPosition:
        """The position of the newest change."""
        row = self._execute("SELECT log, position FROM history").fetchone()
        return FeedPosition(*of_types(row, str, int))

    def current(self, prefix: bytes, after: bytes | None, at: int | None) -> list[ObjectFacts]:
        """A page of the objects that exist now, or existed at a position, by key after
        `after`.
        """
        condition, values = self._at(at)
        first, end = _bounds(prefix, after)
        rows = self._execute(
            f"{_FACTS} WHERE {condition} AND v.content IS NOT NULL AND v.key {first[0]} ?"
            " AND (? IS NULL OR v.key < ?) ORDER BY v.key LIMIT ?",
            (*values, first[1], end, end, PAGE_ROWS),
        )
        found = [_facts(row) for row in rows]
        return in_order(found, lambda one: one.key.encode(), after=after)

    def versions(
        self, prefix: bytes, after: tuple[bytes, int] | None, at: int | None
    ) -> list[ObjectFacts]:
        """A page of all versions, by key and newest first, after a key and position."""
        key, before = after or (prefix, _POSITION_MAX)
        _, end = _bounds(prefix, None)
        rows = self._execute(
            f"{_FACTS} WHERE v.key >= ? AND (v.key > ? OR v.position < ?)"
            " AND (? IS NULL OR v.key < ?) AND +v.position <= ?"
            " ORDER BY v.key, v.position DESC LIMIT ?",
            (key, key, before, end, end, _POSITION_MAX if at is None else at, PAGE_ROWS),
        )
        found = [_facts(row) for row in rows]
        # Newest first.
        place = (after[0], -after[1]) if after else None
        return in_order(found, lambda one: (one.key.encode(), -int(one.version)), after=place)

    def find(
        self, key: bytes, version: str = "", at: int | None = None
    ) -> tuple[ObjectFacts, int] | None:
        """The current object of a key, or one version of it, and its content; 0 of a
        delete marker.
        """
        condition, values = self._at(at)
        if version:
            # What str() gave, and nothing else that int() reads.
            position = int(version) if version.isascii() and version.isdigit() else 0
            newest = _POSITION_MAX if at is None else at
            condition, values = "v.position = ?", (position if position <= newest else 0,)
        row = self._execute(f"{_FACTS} WHERE {condition} AND v.key = ?", (*values, key)).fetchone()
        return None if row is None else (_facts(row), row[3] or 0)

    def properties(self, position: int) -> ObjectProperties:
        """Those of a version."""
        row = self._execute("SELECT properties FROM versions WHERE position = ?", (position,))
        return _properties(of_types(row.fetchone(), str)[0])

    def supersede(
        self,
        key: bytes,
        content: int | None,
        properties: ObjectProperties,
        *,
        modified_ms: int,
        previous_key: bytes | None = None,
    ) -> ObjectFacts:
        """Add a version of a key, a delete marker without content, as the newest
        change. `previous_key` is that of a renamed object, whose marker was the last.
        """
        row = self._execute("UPDATE history SET position = position + 1 RETURNING position")
        position = of_types(row.fetchone(), int)[0]
        self._execute(
            "UPDATE versions SET superseded = ? WHERE key = ? AND superseded IS NULL",
            (position, key),
        )
        self._execute(
            "INSERT INTO versions VALUES (?, ?, NULL, ?, ?, ?, ?)",
            (position, key, content, modified_ms, _text(properties), previous_key),
        )
        found = self.find(key)
        assert found is not None
        return found[0]

    def add_content(self, content: Content) -> int:
        """A new content without segments; returns its number."""
        row = self._execute(
            "INSERT INTO contents (size_bytes, etag, crc32c, md5, blake3) VALUES (?, ?, ?, ?, ?)",
            (content.size_bytes, content.etag, content.crc32c, content.md5, content.blake3),
        )
        assert row.lastrowid is not None
        return row.lastrowid

    def add_blob(self, blob: NewBlob) -> int:
        """A new blob; returns its number, which no other blob had."""
        row = self._execute(
            "INSERT INTO blobs (file, body) VALUES (?, ?)",
            (blob.file, None) if blob.file else (None, blob.body),
        )
        assert row.lastrowid is not None
        return row.lastrowid

    def add_segments(self, content: int, segments: Iterable[Segment]) -> None:
        """Segments of a content."""
        self._many(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)",
            ((content, s.first, s.size_bytes, s.blob, s.blob_first, s.crc32c) for s in segments),
        )

    def segments(self, content: int, first: int, end: int) -> list[Segment]:
        """The segments of a content with bytes in a range, in order."""
        rows = self._execute(
            "SELECT first, size_bytes, blob, blob_first, crc32c FROM segments"
            " WHERE content = ? AND first < ? AND first + size_bytes > ? ORDER BY first",
            (content, end, first),
        )
        return [segment_of(row) for row in rows]

    def move_segments(self, source: int, target: int, at: int) -> None:
        """Append a content's segments to those of another, of which they are the bytes
        from `at`.
        """
        self._execute(
            "UPDATE segments SET content = ?, first = first + ? WHERE content = ?",
            (target, at, source),
        )

    def blob(self, number: int) -> NewBlob | None:
        """Where the bytes of a blob are; None if it was removed."""
        row = self._execute("SELECT file, body FROM blobs WHERE blob = ?", (number,)).fetchone()
        if row is None:
            return None
        file, body = of_types(row, str | None, bytes | None)
        return NewBlob(file_name_of(file) if file else "", body or b"")

    def knows_file(self, name: str) -> bool:
        """Whether a data file belongs to a blob."""
        row = self._execute("SELECT 1 FROM blobs WHERE file = ?", (name,))
        return row.fetchone() is not None

    def drop_content(self, number: int) -> None:
        """Remove a content that no version and no part has any more."""
        if self._execute("SELECT 1 FROM versions WHERE content = ?", (number,)).fetchone():
            return
        blobs = self._execute("SELECT DISTINCT blob FROM segments WHERE content = ?", (number,))
        numbers = blobs.fetchall()
        self._execute("DELETE FROM segments WHERE content = ?", (number,))
        self._execute("DELETE FROM contents WHERE content = ?", (number,))
        for (blob,) in (of_types(row, int) for row in numbers):
            if self._execute("SELECT 1 FROM segments WHERE blob = ?", (blob,)).fetchone() is None:
                self._execute(
                    "INSERT INTO garbage SELECT file FROM blobs WHERE blob = ?"
                    " AND file IS NOT NULL",
                    (blob,),
                )
                self._execute("DELETE FROM blobs WHERE blob = ?", (blob,))

    def changes(self, after: FeedPosition) -> list[Change]:
        """A page of changes after a position, oldest first.

        Raises:
            FeedGapError: it is of another log, or beyond the newest change.
            PositionTrimmedError: the history does not reach back to it.
        """
        newest = self.position()
        if after.log != newest.log or after.index > newest.index:
            raise FeedGapError(
                f"position {after.index} of the log {after.log} is not one of this bucket,"
                f" whose log {newest.log} ends at {newest.index}",
                hint="It was restored or copied. Compare it, then follow its changes from here.",
                position=after.index,
                newest=newest.index,
            )
        self._check_kept(after.index)
        rows = self._execute(
            f"{_FACTS} WHERE v.position > ? AND NOT ({_IS_RENAMED}) ORDER BY v.position LIMIT ?",
            (after.index, PAGE_ROWS),
        )
        found = [_change(row, is_rename=bool(row[9])) for row in rows]
        return in_order(found, lambda change: change.index, after=after.index)

    def forget_history(self, through: int) -> None:
        """Let the history begin at a position; `sweep` removes what it had before."""
        self._execute("UPDATE history SET trimmed = max(trimmed, min(?, position))", (through,))

    def is_swept(self) -> bool:
        """Whether `sweep` has nothing to do."""
        return bool(self._execute("SELECT swept >= trimmed FROM history").fetchone()[0])

    def sweep(self) -> bool:
        """Remove what neither the history nor a snapshot shows any more: a page of
        superseded versions, and delete markers before which nothing is left. True if
        there may be more of them.
        """
        row = self._execute("SELECT trimmed, swept FROM history").fetchone()
        trimmed, swept = of_types(row, int, int)
        page = self._execute(
            "SELECT superseded, position, key, content, EXISTS (SELECT 1 FROM snapshots s"
            " WHERE s.position >= v.position AND s.position < v.superseded) FROM versions v"
            " WHERE superseded > ? AND superseded <= ? ORDER BY superseded LIMIT ?",
            (swept, trimmed, PAGE_ROWS),
        ).fetchall()
        for row in page:
            of_types(row, int, int, bytes, int | None, int)
        in_order(page, lambda row: int(row[0]), after=swept)
        for _, position, key, content, is_shown in page:
            if is_shown:
                continue
            self._execute("DELETE FROM versions WHERE position = ?", (position,))
            self._execute(
                "DELETE FROM versions AS v WHERE key = ? AND superseded IS NULL AND content IS NULL"
                " AND position <= ? AND NOT EXISTS (SELECT 1 FROM versions o"
                " WHERE o.key = v.key AND o.position < v.position)",
                (key, trimmed),
            )
            if content is not None:
                self.drop_content(content)
        has_more = len(page) == PAGE_ROWS
        self._execute("UPDATE history SET swept = ?", (page[-1][0] if has_more else trimmed,))
        return has_more

    def add_snapshot(self, snapshot_id: str, name: str, created_ms: int) -> None:
        """Keep what the bucket has now under a name that no snapshot has."""
        self._execute(
            "INSERT INTO snapshots SELECT ?, ?, position, ? FROM history",
            (snapshot_id, name, created_ms),
        )

    def snapshot(self, name: str) -> SnapshotFacts | None:
        """The snapshot of this name."""
        row = self._execute(f"{_SNAPSHOTS} WHERE name = ?", (name,)).fetchone()
        return _snapshot_of(row) if row is not None else None

    def snapshots(self, prefix: str) -> list[SnapshotFacts]:
        """All snapshots whose names begin with `prefix`, by name."""
        rows = self._execute(
            f"{_SNAPSHOTS} WHERE substr(name, 1, ?) = ? ORDER BY name", (len(prefix), prefix)
        )
        return [_snapshot_of(row) for row in rows]

    def snapshot_position(self, snapshot: SnapshotFacts) -> int:
        """The position that a snapshot shows.

        Raises:
            SnapshotLostError: it was deleted.
        """
        row = self._execute(
            "SELECT position FROM snapshots WHERE snapshot_id = ?", (snapshot.snapshot_id,)
        ).fetchone()
        if row is None:
            raise SnapshotLostError(
                f"the snapshot {snapshot.name!r} was deleted", name=snapshot.name
            )
        return int(of_types(row, int)[0])

    def remove_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot; `sweep` removes what it alone has shown."""
        row = self._execute(
            "DELETE FROM snapshots WHERE snapshot_id = ? RETURNING position", (snapshot_id,)
        ).fetchone()
        if row is not None:
            self._execute("UPDATE history SET swept = min(swept, ?)", row)

    def written(self, older: int, newer: int, after: int) -> list[tuple[int, Change]]:
        """A page of the objects that are shown at a newer position and not at an older
        one, each with its place in this order, after a place.
        """
        rows = self._execute(_WRITTEN, _range(older, newer, after))
        found = [
            (row[1], _change(row[:-1], is_rename=bool(row[-1]), has_index=False)) for row in rows
        ]
        return in_order(found, lambda one: one[0], after=max(older, after))

    def removed(self, older: int, newer: int, after: int) -> list[tuple[int, Change]]:
        """The same of the objects that are shown at an older position only."""
        rows = self._execute(_REMOVED, _range(older, newer, after))
        found = [
            (place, Change(0, key_of(key), str(position), ChangeKind.DELETE))
            for key, position, place in (of_types(row, bytes, int, int) for row in rows)
        ]
        return in_order(found, lambda one: one[0], after=max(older, after))

    def add_upload(self, upload: str, key: bytes, properties: ObjectProperties) -> None:
        """A new upload without parts."""
        self._execute("INSERT INTO uploads VALUES (?, ?, ?)", (upload, key, _text(properties)))

    def upload(self, upload: str, key: bytes) -> ObjectProperties | None:
        """The properties of an upload; None if it does not exist for this key."""
        row = self._execute(
            "SELECT properties FROM uploads WHERE upload = ? AND key = ?", (upload, key)
        ).fetchone()
        return None if row is None else _properties(of_types(row, str)[0])

    def uploads(self, prefix: bytes, after: tuple[bytes, str] | None) -> list[tuple[bytes, str]]:
        """A page of key and ID of uploads, by key, after one of them."""
        key, upload = after or (prefix, "")
        _, end = _bounds(prefix, None)
        rows = self._execute(
            "SELECT key, upload FROM uploads WHERE (key, upload) > (?, ?)"
            " AND (? IS NULL OR key < ?) ORDER BY key, upload LIMIT ?",
            (key, upload, end, end, PAGE_ROWS),
        )
        found: list[tuple[bytes, str]] = [of_types(row, bytes, str) for row in rows]
        for name, _ in found:
            key_of(name)
        return in_order(found, lambda row: row, after=after)

    def remove_upload(self, upload: str) -> None:
        """Remove an upload with its parts, but not their contents."""
        self._execute("DELETE FROM parts WHERE upload = ?", (upload,))
        self._execute("DELETE FROM uploads WHERE upload = ?", (upload,))

    def set_part(self, upload: str, number: int, content: int) -> bool:
        """Make a content a part; one that it replaces is removed: True if there was
        one.
        """
        row = self._execute(
            "SELECT content FROM parts WHERE upload = ? AND number = ?", (upload, number)
        ).fetchone()
        self._execute("REPLACE INTO parts VALUES (?, ?, ?)", (upload, number, content))
        if row is not None:
            self.drop_content(of_types(row, int)[0])
        return row is not None

    def parts(self, upload: str, after: int = 0) -> list[tuple[int, int, Content]]:
        """A page of an upload's parts after a number: number, content and its facts."""
        rows = self._execute(
            "SELECT number, content, size_bytes, etag, crc32c, md5, blake3 FROM parts"
            " JOIN contents USING (content) WHERE upload = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            (upload, after, PAGE_ROWS),
        )
        found = list[tuple[int, int, Content]]()
        for row in rows:
            number, content = of_types(row[:2], int, int)
            facts = content_of(row[2:])
            if "-" in facts.etag:
                raise damaged("a part")
            found.append((number, content, facts))
        return in_order(found, lambda part: part[0], after=after)

    def writers(self) -> set[str]:
        """Tokens of the writers that have not ended in good order."""
        rows = self._execute("SELECT token FROM writers")
        return {file_name_of(of_types(row, str)[0]) for row in rows}

    def add_writer(self, token: str) -> None:
        """Record a writer of data files."""
        self._execute("INSERT INTO writers VALUES (?)", (token,))

    def remove_writer(self, token: str) -> None:
        """Forget a writer that left nothing behind."""
        self._execute("DELETE FROM writers WHERE token = ?", (token,))

    def garbage(self) -> list[str]:
        """A page of data files that no row names any more."""
        rows = self._execute("SELECT file FROM garbage LIMIT ?", (PAGE_ROWS,))
        return [file_name_of(of_types(row, str)[0]) for row in rows]

    def forget_garbage(self, names: Iterable[str]) -> None:
        """Forget files that were removed."""
        self._many("DELETE FROM garbage WHERE file = ?", ((name,) for name in names))

    def _check_kept(self, at: int) -> None:
        """Check that the history reaches back to a position.

        Raises:
            PositionTrimmedError: it does not.
        """
        _, trimmed = self.history()
        if at < trimmed:
            raise PositionTrimmedError(
                f"the history is kept from position {trimmed} on, not from {at}",
                hint="List the bucket, and follow its changes from its present position.",
                position=at,
                trimmed=trimmed,
            )

    def _at(self, at: int | None) -> tuple[str, tuple[int, ...]]:
        """The condition for versions that are current, or were at a position."""
        if at is None:
            return "v.superseded IS NULL", ()
        # The sign keeps SQLite from reading by position, then sorting.
        return "+v.position <= ? AND (v.superseded IS NULL OR v.superseded > ?)", (at, at)


def _bounds(prefix: bytes, after: bytes | None) -> tuple[tuple[str, bytes], bytes | None]:
    """Where keys below a prefix begin, and the first bytes above them all."""
    first = (">=", prefix) if after is None or after < prefix else (">", after)
    # No byte of UTF-8 text is 0xff.
    return first, prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else None


def _facts(row: _FactsRow) -> ObjectFacts:
    key, position, modified_ms, content = row[:4]
    of_types(row[1:4], int, int, int | None)
    if not 0 <= modified_ms < TIME_MS_END:
        raise damaged("a time")
    name, version = key_of(key), str(position)
    if content is None:
        return ObjectFacts(name, 0, "", modified_ms, version, is_delete_marker=True)
    found = content_of(row[4:9])
    hashes = content_hashes(md5=found.md5, crc32c=found.crc32c, blake3=found.blake3)
    return ObjectFacts(name, found.size_bytes, found.etag, modified_ms, version, hashes=hashes)


def _change(row: _FactsRow, *, is_rename: bool, has_index: bool = True) -> Change:
    facts, previous = _facts(row), row[9]
    kind = ChangeKind.DELETE if facts.is_delete_marker else ChangeKind.PUT
    return Change(
        int(facts.version) if has_index else 0,
        facts.key,
        facts.version,
        ChangeKind.RENAME if is_rename else kind,
        key_of(previous) if previous and is_rename else "",
        None if facts.is_delete_marker else facts,
        facts.modified_ms,
    )


def _snapshot_of(row: tuple[str, str, int, int, str]) -> SnapshotFacts:
    name, snapshot_id, position, created_ms, log = of_types(row, str, str, int, int, str)
    return SnapshotFacts(name, snapshot_id, FeedPosition(log, position), created_ms)


def _range(older: int, newer: int, after: int) -> dict[str, int]:
    return {"older": older, "newer": newer, "after": after, "most": PAGE_ROWS}


def _text(properties: ObjectProperties) -> str:
    groups = {name: getattr(properties, name) for name in _GROUPS}
    return json.dumps(groups, ensure_ascii=False)


def _properties(text: str) -> ObjectProperties:
    try:
        groups = {name: tuple(map(tuple, pairs)) for name, pairs in parse_json(text).items()}
        for pairs in groups.values():
            for pair in pairs:
                of_types(pair, str, str)
            if list(pairs) != sorted(pairs):
                raise damaged("a property")
        metadata, tags, headers, acl = (groups.pop(name, ()) for name in _GROUPS)
        if groups:
            raise damaged("a property")
        return ObjectProperties(metadata, tags, headers, acl)
    # Of text that is not JSON, or not that of properties.
    except (AttributeError, TypeError, ValueError) as error:
        raise damaged("a property") from error
