"""RocksDB databases of our own: bytes by key.

Rows can also be written in order to files, which a database takes over by links: so
many processes make one database.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rocksdict import (
    BlockBasedOptions,
    DBCompressionType,
    DBRecoveryMode,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from ozone.rocks import (
    remove_stray,
    require_database,
    rows_from,
    translate_errors,
)

# Table files that a database keeps open. One that was made of sorted files has hundreds
# of them, and a process may often open 1,024 in all.
_OPEN_FILES_MAX = 256
# As in a datanode's databases: half the size of the default's index.
_BLOCK_BYTES = 16 << 10
_TAKEN = ".taken"


class KeyValues:
    """A RocksDB of our own: bytes by key, in the order of keys. One thread at a time
    writes; iterators and snapshots end before `close`.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open a database, or create one.

        Raises:
            VolumeLockedError: a process has it open.
            DatabaseError: there is none, or it cannot be opened.
        """
        if not create:
            require_database(path)
        options = _own_options()
        options.create_if_missing(create)
        options.set_error_if_exists(create)
        options.set_write_buffer_size(64 << 20)
        # The default takes a damaged record in the middle of the log for its end.
        options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
        self._path, self._closed = path, False
        with translate_errors(path, "open"):
            self._rdict = Rdict(str(path), options=options)
        remove_stray(path)

    @contextlib.contextmanager
    def scanner(self) -> Iterator["KeyScanner"]:
        """All rows at this moment, unchanged until the context ends.

        Raises:
            DatabaseError: the database cannot be read.
        """
        with translate_errors(self._path, "read"):
            scanner = KeyScanner(self._rdict, self._path)
        try:
            yield scanner
        finally:
            scanner.release()

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows from one key on and before another, as of the first step. Raises as
        `KeyScanner.scan`.
        """
        with translate_errors(self._path, "read"):
            options = ReadOptions()
            options.set_iterate_upper_bound(end)
            found = self._rdict.iter(options)
            found.seek(start)
        # A generator keeps the options; the iterator only refers to its bound.
        yield from rows_from(found, self._path)

    def write(
        self,
        puts: Iterable[tuple[bytes, bytes]],
        deletes: Iterable[bytes] = (),
        *,
        delete_range: tuple[bytes, bytes] | None = None,
        durable: bool = True,
    ) -> None:
        """Delete a range, then keys, then write rows: all or nothing. Without `durable`
        only `flush` makes it durable.

        Raises:
            DatabaseError: with the fact `suspect`: what the database holds is unknown.
        """
        with translate_errors(self._path, "write", suspect=True):
            changes, options = WriteBatch(raw_mode=True), WriteOptions()
            if delete_range is not None:
                changes.delete_range(*delete_range)
            for key in deletes:
                changes.delete(key)
            for key, value in puts:
                changes.put(key, value)
            options.sync = durable
            self._rdict.write(changes, options)

    def take_files(self, paths: Sequence[Path]) -> None:
        """Take over files of `write_sorted`, whose ranges of keys are disjoint, without
        reading their rows. They stay where they are, too.

        Raises:
            DatabaseError: one is damaged, or overlaps with another; or the folder is on
                another file system.
        """
        options = IngestExternalFileOptions()
        # RocksDB removes what it moves, and an error afterwards would lose that.
        options.set_move_files(True)
        # Overlapping files would need it.
        options.set_allow_global_seqno(False)
        links = [path.with_name(f"{path.name}{_TAKEN}") for path in paths]
        with translate_errors(self._path, "take files into"), contextlib.ExitStack() as stack:
            for path, link in zip(paths, links, strict=True):
                link.unlink(missing_ok=True)
                stack.callback(link.unlink, missing_ok=True)
                link.hardlink_to(path)
            if links:
                self._rdict.ingest_external_file([str(link) for link in links], options)

    def flush(self) -> None:
        """Make everything durable, in as few files as possible. Raises as `write`."""
        with translate_errors(self._path, "flush", suspect=True):
            self._rdict.flush(True)
            self._rdict.compact_range(None, None)

    def close(self) -> None:
        """Close the database, whatever it raises; idempotent."""
        if not self._closed:
            self._closed = True
            with translate_errors(self._path, "close"):
                self._rdict.close()
            remove_stray(self._path)


def write_sorted(path: Path, rows: Iterable[tuple[bytes, bytes]]) -> None:
    """Write at least one row to a new file for `KeyValues.take_files`. Keys ascend. It
    is not durable yet.

    Raises:
        DatabaseError: it cannot be written.
    """
    with translate_errors(path, "write"):
        options = _own_options()
        # Half the CPU of zstd; what is changed later is written by the database itself.
        options.set_compression_type(DBCompressionType.snappy())
        writer = SstFileWriter(options)
        writer.open(str(path))
        for key, value in rows:
            writer[key] = value
        writer.finish()


class KeyScanner:
    """The rows of one moment; one scan at a time."""

    def __init__(self, rdict: Rdict, path: Path) -> None:
        """Internal: use `KeyValues.scanner`."""
        self._path = path
        # Iterators keep to their beginning; those of the binding's snapshots do not.
        self._held: tuple[RdictIter, RdictIter] | None = (rdict.iter(), rdict.iter())

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows from one key on and before another. It ends the scan before.

        Raises:
            DatabaseError: a row cannot be read.
        """
        assert self._held is not None
        with translate_errors(self._path, "read"):
            self._held[0].seek(start)
        return itertools.takewhile(lambda row: row[0] < end, rows_from(self._held[0], self._path))

    def get(self, key: bytes) -> bytes | None:
        """The value of a key. Raises as `scan`."""
        assert self._held is not None
        with translate_errors(self._path, "read"):
            self._held[1].seek(key)
        found = next(rows_from(self._held[1], self._path), None)
        return found[1] if found is not None and found[0] == key else None

    def release(self) -> None:
        """End; whoever keeps the scanner does not keep the database open with it."""
        self._held = None


def _own_options() -> Options:
    """The options of our own databases."""
    options = Options(raw_mode=True)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_compression_type(DBCompressionType.zstd())
    # No filters: they would serve look-ups, and ours are all seeks.
    blocks = BlockBasedOptions()
    blocks.set_block_size(_BLOCK_BYTES)
    options.set_block_based_table_factory(blocks)
    return options
