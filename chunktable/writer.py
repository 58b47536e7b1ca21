"""Write a chunk table."""

import pyarrow as pa
import pyarrow.parquet as pq


def parquet_writer(where: object, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of one file of a table into a path or a stream, so that it is fast to
    read.

    Nearly all columns repeat themselves, and dictionaries of them are read several
    times as fast as their values; checksums never do, and are read three times as fast
    packed as differences, which Spark and others know too. Text in `schema` may be
    dictionaries.
    """
    packed = {name: "DELTA_BINARY_PACKED" for name in schema.names if name == "checksum"}
    return pq.ParquetWriter(
        where,
        schema,
        compression="zstd",
        use_dictionary=[name for name in schema.names if name not in packed],
        column_encoding=packed or None,
        # A flipped bit in a file is found by who reads the page.
        write_page_checksum=True,
        # Whether text came as dictionaries is nobody's business.
        store_schema=False,
    )
