"""Python data sources: stored trees, and whole Ozone volumes read in place, as chunk
tables.

    register(session)
    session.read.format("ozonetree").load("/exports/trees")
    session.read.format("ozonevolume").option("source", "data").load("/data/hdds")

Both have the columns of the chunk table and `findings`: a text in a row by itself, of
which the other columns say no more than is known, and null in all other rows. What
cannot be read is such a row and fails no job. Filters on `container_id` and `datanode`
are known before anything is opened that they exclude; Spark checks the rows again.
"""

import json
import os
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from chunktable.schema import CHUNK_SCHEMA, ReplicaAttributes, rows_of
from merkle.check import check_tree
from merkle.columns import TreeColumns
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import ContainerId
from ozone.survey import VolumeSurvey
from ozone.volume import Hold, Volume, open_volume
from protos.convert import container_id_of_tree, tree_from_bytes
from runtime.disk import Disk
from runtime.errors import UsageError
from sweep.volumes import replica_rows

# Of a row that speaks of a finding most is not known. Spark keeps times in
# microseconds.
SCHEMA = pa.schema(
    [
        *(
            pa.field(
                f.name, pa.timestamp("us", tz="UTC") if pa.types.is_timestamp(f.type) else f.type
            )
            for f in CHUNK_SCHEMA
        ),
        pa.field("findings", pa.string()),
    ]
)

# Small files: so many are worth a task.
_FILES = 512
# Opening a volume makes a shadow of its database, which so many containers are worth.
_CONTAINERS = 256


def register(session: SparkSession) -> None:
    """Make both sources known to a session, and let it push filters down to them."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (OzoneTree, OzoneVolume):
        session.dataSource.register(source)


class OzoneTree(DataSource):
    """`.tree` files: one, or all below a folder.

    The container is told by the file's name, else by the tree. The datanode and its
    volume are told by folders on the way, named `datanode=...` and `volume=...`, else
    by the options `datanode` and `volume`. The rest of what a chunk table says of a
    replica no tree holds: its state is given as CLOSED.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonetree"

    def schema(self) -> StructType:
        """The columns of the chunk table, and of findings."""
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the paths in the options."""
        options = dict(self.options)
        return TreeReader(
            _paths(self.options), options.get("datanode", ""), options.get("volume", "")
        )


class OzoneVolume(DataSource):
    """Roots of Ozone volumes, which are only read; the option `source` says which truth
    of theirs (`sweep.model`).
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonevolume"

    def schema(self) -> StructType:
        """The columns of the chunk table, and of findings."""
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the volumes in the options."""
        return _VolumeReader(
            _paths(self.options),
            TreeSource(dict(self.options).get("source", TreeSource.TREE.value)),
        )


@dataclass(frozen=True, slots=True)
class RowFilter:
    """What filters leave; None: everything."""

    first: int = -(2**63)
    last: int = 2**63 - 1
    containers: frozenset[int] | None = None
    datanodes: frozenset[str] | None = None

    def narrowed(self, by: Filter) -> "RowFilter":
        """With one filter more; those that are not understood leave all that there
        was.
        """
        match by:
            case EqualTo(("container_id",), int(value)):
                return self._among({value})
            case In(("container_id",), values):
                return self._among({value for value in values if isinstance(value, int)})
            case GreaterThan(("container_id",), int(value)):
                return replace(self, first=max(self.first, value + 1))
            case GreaterThanOrEqual(("container_id",), int(value)):
                return replace(self, first=max(self.first, value))
            case LessThan(("container_id",), int(value)):
                return replace(self, last=min(self.last, value - 1))
            case LessThanOrEqual(("container_id",), int(value)):
                return replace(self, last=min(self.last, value))
            case EqualTo(("datanode",), str(value)):
                return self._on({value})
            case In(("datanode",), values):
                return self._on({value for value in values if isinstance(value, str)})
        return self

    def has_container(self, container_id: int) -> bool:
        """Whether rows of this container are asked for."""
        among = self.containers is None or container_id in self.containers
        return among and self.first <= container_id <= self.last

    def has_datanode(self, datanode: str) -> bool:
        """Whether rows of this datanode are asked for."""
        return self.datanodes is None or datanode in self.datanodes

    def _among(self, containers: set[int]) -> "RowFilter":
        return replace(
            self,
            containers=frozenset(
                containers if self.containers is None else containers & self.containers
            ),
        )

    def _on(self, datanodes: set[str]) -> "RowFilter":
        return replace(
            self,
            datanodes=frozenset(
                datanodes if self.datanodes is None else datanodes & self.datanodes
            ),
        )


@dataclass
class _Reader(DataSourceReader):
    paths: Sequence[str]
    wanted: RowFilter = field(default_factory=RowFilter, kw_only=True)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Note what filters leave; Spark applies all of them again."""
        for one in filters:
            self.wanted = self.wanted.narrowed(one)
        return filters


@dataclass
class TreeReader(_Reader):
    """Reads `.tree` files."""

    datanode: str
    volume: str

    def partitions(self) -> Sequence["TreeFilePartition"]:
        """The tree files that filters leave, some in each partition."""
        found = [path for root in self.paths for path in _trees(Path(root))]
        wanted = [path for path in found if self._is_wanted(path)]
        return [TreeFilePartition(wanted[i : i + _FILES]) for i in range(0, len(wanted), _FILES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition's tree files."""
        assert isinstance(partition, TreeFilePartition)
        for path in partition.paths:
            yield from self._read(path)

    def _is_wanted(self, path: Path) -> bool:
        container_id = _named(path)
        # What is wrong with a name that no container has, reading tells.
        known = (
            container_id is None
            or not _is_id(container_id)
            or self.wanted.has_container(container_id)
        )
        return known and self.wanted.has_datanode(self._told(path, "datanode"))

    def _told(self, path: Path, what: str) -> str:
        told = [part.partition("=")[2] for part in path.parts if part.startswith(f"{what}=")]
        return told[-1] if told else str(getattr(self, what))

    def _read(self, path: Path) -> Iterator[pa.RecordBatch]:
        datanode, volume = self._told(path, "datanode"), self._told(path, "volume")
        if not (_is_text(datanode) and _is_text(volume)):
            yield _finding(
                f"{path}: the name of its datanode or volume is no text in UTF-8", None, None, None
            )
            return
        container_id = _named(path)
        if container_id is not None and not _is_id(container_id):
            yield _finding(f"{path}: its name is no container's ID", datanode, volume, None)
            return
        try:
            raw = Disk().read(path)
            tree = tree_from_bytes(
                raw,
                ContainerId(container_id_of_tree(raw) if container_id is None else container_id),
            )
        except ReconcileError as error:
            yield _finding(f"{path}: {error.code}: {error.message}", datanode, volume, container_id)
            return
        if tree.data_checksum is None:
            # An unknown root is not that of an empty tree.
            yield _finding(f"{path}: the tree has no root", datanode, volume, tree.container_id)
            return
        if any(chunk.offset < 0 for block in tree.blocks for chunk in block.chunks):
            yield _finding(
                f"{path}: a chunk has a negative offset", datanode, volume, tree.container_id
            )
            return
        replica = ReplicaAttributes(
            datanode, volume, tree.container_id, ReplicaState.CLOSED, 0, 0, TreeSource.TREE.value
        )
        yield from map(_given, rows_of(replica, TreeColumns.of(tree)).batches())
        try:
            check_tree(tree)
        except ReconcileError as error:
            yield _finding(
                f"{path}: {error.code}: {error.message}", datanode, volume, tree.container_id
            )


@dataclass
class _VolumeReader(_Reader):
    """Reads volumes."""

    source: TreeSource

    def partitions(self) -> Sequence["ContainerPartition"]:
        """The containers that filters leave, some in each partition."""
        return [part for root in self.paths for part in self._ranges(root)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition's containers."""
        assert isinstance(partition, ContainerPartition)
        if partition.finding:
            yield _finding(partition.finding, None, None, None)
            return
        try:
            with TemporaryDirectory(prefix="treefold-") as scratch:
                yield from self._read(partition, Path(scratch))
        except ReconcileError as error:
            yield _finding(f"{partition.root}: {error.code}: {error.message}", None, None, None)

    def _ranges(self, root: str) -> Iterator["ContainerPartition"]:
        try:
            with (
                TemporaryDirectory(prefix="treefold-") as scratch,
                _opened(root, Path(scratch)) as volume,
            ):
                survey = VolumeSurvey(volume, Disk())
                if not self.wanted.has_datanode(survey.datanode):
                    return
                ids = [
                    container_id
                    for container_id in survey.ids()
                    if self.wanted.has_container(container_id)
                ]
                fault = survey.fault
        except ReconcileError as error:
            yield ContainerPartition(root, (), f"{root}: {error.code}: {error.message}")
            return
        if fault is not None:
            yield ContainerPartition(root, (), f"{root}: {fault.detail}")
        for i in range(0, len(ids), _CONTAINERS):
            yield ContainerPartition(root, tuple(ids[i : i + _CONTAINERS]))

    def _read(self, partition: "ContainerPartition", scratch: Path) -> Iterator[pa.RecordBatch]:
        with _opened(partition.root, scratch) as volume:
            survey = VolumeSurvey(volume, Disk())
            now_ms = round(datetime.now(UTC).timestamp() * 1000)
            for found in survey.replicas(self.source, partition.container_ids):
                yield from map(_given, replica_rows(survey, found, now_ms).batches())
                for fault in found.faults:
                    yield _finding(fault.detail, survey.datanode, survey.volume, found.container_id)


class TreeFilePartition(InputPartition):
    """Some `.tree` files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(None)
        self.paths = tuple(paths)


class ContainerPartition(InputPartition):
    """Some containers of a volume, or why there are none."""

    def __init__(self, root: str, container_ids: Sequence[ContainerId], finding: str = "") -> None:
        super().__init__(None)
        self.root = root
        self.container_ids = tuple(container_ids)
        self.finding = finding


def _paths(options: MutableMapping[str, str]) -> tuple[str, ...]:
    paths = (
        json.loads(options["paths"])
        if "paths" in options
        else [options["path"]]
        if "path" in options
        else []
    )
    if not paths:
        raise UsageError("say what to load: a path")
    return tuple(map(str, paths))


def _trees(root: Path) -> list[Path]:
    # What is not there, or is no folder, is told when it is read.
    return sorted(root.rglob("*.tree")) if root.is_dir() else [root]


def _named(path: Path) -> int | None:
    return int(path.stem) if path.stem.isascii() and path.stem.isdigit() else None


def _is_id(container_id: int) -> bool:
    return 0 < container_id < 1 << 63


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _opened(root: str, scratch: Path) -> Volume:
    return open_volume(
        Path(root).absolute(), hold=Hold.READ_ONLY, state_folder=scratch, disk=Disk()
    )


def _given(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [_cast(column, f.type) for column, f in zip(batch.columns, SCHEMA, strict=False)]
    return pa.RecordBatch.from_arrays(
        [*columns, pa.nulls(batch.num_rows, pa.string())], schema=SCHEMA
    )


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        # A time of a scan that Spark has no number for: all rows are of one replica,
        # and it is unknown of each.
        return pa.nulls(len(column), kind)


def _finding(
    text: str, datanode: str | None, volume: str | None, container_id: int | None
) -> pa.RecordBatch:
    # The path may be no text.
    text = os.fsencode(text).decode(errors="backslashreplace")
    known = {"datanode": datanode, "volume": volume, "container_id": container_id, "findings": text}
    return pa.RecordBatch.from_arrays(
        [pa.array([known.get(f.name)], f.type) for f in SCHEMA], schema=SCHEMA
    )
