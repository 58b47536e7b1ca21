"""A crash while a sweep writes a table: the table is not there, or it is whole."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.files import Files
from sweep.output import write_atomically
from tests.support.disk import ImagingDisk

pytestmark = pytest.mark.crashes

TABLE = pa.table({"container_id": pa.array(range(1000), pa.int64())})


def test_a_table_is_there_whole_or_not_at_all(memory_folder: Path) -> None:
    out = memory_folder / "out"
    out.mkdir()
    disk = ImagingDisk(out, memory_folder / "images")
    with write_atomically(out / "sweep" / "roots.parquet", TABLE.schema, Files(disk)) as writer:
        writer.add(TABLE)
    for image in disk.finish():
        path = image.folder / "sweep" / "roots.parquet"
        assert path.exists() or not image.is_final, image
        assert not path.exists() or pq.read_table(path) == TABLE, image
