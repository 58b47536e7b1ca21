"""Incremental commits: records that list only the new chunks of a block."""

from dataclasses import replace

from merkle.record import BlockRecord
from ozone.containers import INCREMENTAL, Container
from ozone.rocks import Batch, OzoneTable, block_key
from protos.convert import record_to_bytes

# The metadata key of a chunk that an incremental writer has completed.
_FULL = "full"


def is_incremental(record: BlockRecord) -> bool:
    """Whether the record has only the new chunks of its block."""
    return any(key == INCREMENTAL for key, _ in record.metadata)


def put_incremental(
    batch: Batch,
    container: Container,
    record: BlockRecord,
    stored: BlockRecord | None,
    *,
    end_of_block: bool,
) -> int:
    """Add the rows of an incremental commit to the batch; returns the block's new
    length in bytes.
    """
    key = block_key(record.container_id, record.block_id)
    settled = stored.chunks if stored else ()
    last_is_full = bool(record.chunks) and any(
        name == _FULL for name, _ in record.chunks[-1].metadata
    )
    if end_of_block or not record.chunks or last_is_full:
        pending = container.record(record.block_id) if not record.chunks else None
        chunks = pending.chunks if pending else settled + record.chunks
        whole = replace(stored or record, bcs_id=record.bcs_id, chunks=chunks)
        batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(whole))
        batch.delete(OzoneTable.LAST_CHUNK_INFO, key)
        return whole.length_bytes
    # Every commit rewrites the last chunk until it is full. Stored apart, it does not
    # make the long list be rewritten too.
    last = record.chunks[-1:]
    if stored is None or len(record.chunks) > 1:
        whole = replace(stored or record, bcs_id=record.bcs_id, chunks=settled + record.chunks[:-1])
        batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(whole))
        settled = whole.chunks
    batch.put(OzoneTable.LAST_CHUNK_INFO, key, record_to_bytes(replace(record, chunks=last)))
    return sum(chunk.length_bytes for chunk in settled + last)
