"""Containers are found where they lie, and their records and files read as Ozone reads
them.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.errors import RecordInvalidError
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.containers import INCREMENTAL, ContainerStore, Counters
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, DescriptorError
from ozone.rocks import Counter, OzoneTable, block_key, container_prefix, counter_key, long_bytes
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from runtime.errors import DatabaseError
from tests.support.handmade import VolumeMaker, block_record, chunk_record, some_bytes

ONE = ContainerId(1)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[VolumeMaker]:
    with VolumeMaker(tmp_path / "volume") as maker:
        yield maker


@contextmanager
def opened(made: VolumeMaker) -> Iterator[ContainerStore]:
    made.database.close()
    with open_volume(
        made.root, hold=Hold.READ_ONLY, state_folder=made.root.parent / "state", disk=Disk()
    ) as volume:
        yield ContainerStore(volume, Disk())


def test_containers_are_listed_by_number_and_strangers_passed_over(made: VolumeMaker) -> None:
    for container_id in (1000, 9, 10, 511, 512):
        made.container(container_id)
    (made.working / "current" / "containerDir0" / "stray").mkdir()

    with opened(made) as store:
        assert store.ids() == [9, 10, 511, 512, 1000]
        assert store.open(ContainerId(512)).state is ReplicaState.CLOSED


def test_a_container_that_is_not_there_is_named(made: VolumeMaker) -> None:
    with opened(made) as store, pytest.raises(ContainerNotFoundError):
        store.open(ONE)


def test_a_container_with_a_broken_descriptor_is_not_opened(made: VolumeMaker) -> None:
    folder = made.container()
    (folder / "metadata" / "1.container").write_bytes(b"junk")

    with opened(made) as store:
        with pytest.raises(DescriptorError):
            store.open(ONE)
        assert store.get(ONE).folder == folder


def test_records_without_a_folder_betray_a_lost_container(made: VolumeMaker) -> None:
    for container_id in (1, 2, 3, 4):
        made.container(container_id)
    for container_id in (1, 2, 4):
        made.block(container_id, 20, chunk_record(b"data"))
    for container_id in (2, 3, 4):
        shutil.rmtree(made.folder(container_id))
    # Container 4 is just being deleted.
    (made.working / "tmp" / "deleted-containers" / "4").mkdir(parents=True)

    with opened(made) as store:
        assert store.ids() == [1]
        assert store.ids_without_folder() == [2]


def test_blocks_come_by_number_where_rows_come_by_text(made: VolumeMaker) -> None:
    made.container(1)
    made.container(2)
    for block_id in (100, 9, 10, 0, 115816896921600001):
        made.block(1, block_id)
    made.block(2, 5)
    made.put(OzoneTable.BLOCK_DATA, container_prefix(ONE) + b"#deleting#7", b"")

    with opened(made) as store:
        container = store.open(ONE)
        assert container.block_ids() == [0, 9, 10, 100, 115816896921600001]
        assert [record.block_id for record in container.records()] == container.block_ids()


@pytest.mark.parametrize("suffix", [b"abc", b"1_0", b" 1", b"007", b"\xd9\xa3", b""])
def test_a_key_that_is_no_block_is_refused(made: VolumeMaker, suffix: bytes) -> None:
    made.container()
    made.put(OzoneTable.BLOCK_DATA, container_prefix(ONE) + suffix, b"")

    with opened(made) as store, pytest.raises(RecordInvalidError) as caught:
        store.open(ONE).block_ids()

    assert caught.value.facts["reason"] == "key"


def test_the_pending_last_chunk_is_merged_for_readers_only(made: VolumeMaker) -> None:
    made.container()
    first, last = chunk_record(some_bytes(100)), chunk_record(some_bytes(50), 100)
    stored = replace(block_record(1, 20, [first]), metadata=((INCREMENTAL, ""),))
    made.put_record(OzoneTable.BLOCK_DATA, stored)
    made.put_record(OzoneTable.LAST_CHUNK_INFO, replace(block_record(1, 20, [last]), bcs_id=8))

    with opened(made) as store:
        container = store.open(ONE)
        assert list(container.records()) == [stored]
        merged = container.record(BlockId(20))

    assert merged is not None
    assert (merged.chunks, merged.bcs_id) == ((first, last), 8)


def test_a_block_that_is_only_pending_is_there_for_readers(made: VolumeMaker) -> None:
    made.container()
    pending = block_record(1, 20, [chunk_record(some_bytes(50))])
    made.put_record(OzoneTable.LAST_CHUNK_INFO, pending)

    with opened(made) as store:
        container = store.open(ONE)
        assert container.record(BlockId(20)) == pending
        assert container.stored_record(BlockId(20)) is None
        assert container.record(BlockId(21)) is None


def test_a_finished_block_ignores_what_is_pending(made: VolumeMaker) -> None:
    made.container()
    finished = made.block(1, 20, chunk_record(some_bytes(100)))
    made.put_record(OzoneTable.LAST_CHUNK_INFO, block_record(1, 20, [chunk_record(b"x", 100)]))

    with opened(made) as store:
        assert store.open(ONE).record(BlockId(20)) == finished


@pytest.mark.parametrize("offset", [99, 101])
def test_a_pending_chunk_that_does_not_continue_the_block_is_refused(
    made: VolumeMaker, offset: int
) -> None:
    made.container()
    stored = replace(
        block_record(1, 20, [chunk_record(some_bytes(100))]), metadata=((INCREMENTAL, ""),)
    )
    made.put_record(OzoneTable.BLOCK_DATA, stored)
    made.put_record(OzoneTable.LAST_CHUNK_INFO, block_record(1, 20, [chunk_record(b"x", offset)]))

    with opened(made) as store, pytest.raises(RecordInvalidError) as caught:
        store.open(ONE).record(BlockId(20))

    assert caught.value.facts["reason"] == "last_chunk"


def test_a_record_that_cannot_be_read_names_its_block(made: VolumeMaker) -> None:
    made.container()
    made.put(OzoneTable.BLOCK_DATA, block_key(ONE, BlockId(20)), b"junk")

    with opened(made) as store, pytest.raises(RecordInvalidError) as caught:
        list(store.open(ONE).records())

    assert caught.value.facts["block_id"] == 20


def test_counters_that_were_never_written_are_none(made: VolumeMaker) -> None:
    made.container()
    made.put(OzoneTable.METADATA, counter_key(ONE, Counter.DATA_CHECKSUM), long_bytes(-1))

    with opened(made) as store:
        assert store.open(ONE).counters() == Counters(7, None, None, -1, None)


def test_a_counter_that_is_no_number_is_an_error_of_the_database(made: VolumeMaker) -> None:
    made.container()
    made.put(OzoneTable.METADATA, counter_key(ONE, Counter.BYTES_USED), b"seven")

    with opened(made) as store, pytest.raises(DatabaseError):
        store.open(ONE).counters()


def test_bytes_are_read_as_they_are_and_end_with_the_file(made: VolumeMaker) -> None:
    made.container()
    data = some_bytes(100)
    made.block(1, 20, (chunk_record(data), data))

    with opened(made) as store:
        container = store.open(ONE)
        assert container.read(BlockId(20), 10, 20) == data[10:30]
        assert container.read(BlockId(20), 90, 20) == data[90:]
        assert container.read(BlockId(20), 500, 20) == b""
        assert container.block_length(BlockId(20)) == 100
        assert container.block_length(BlockId(21)) is None
        with pytest.raises(BlockNotFoundError):
            container.read(BlockId(21), 0, 1)
