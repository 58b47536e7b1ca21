"""Spark data sources that read stored trees and Ozone volumes as chunk tables.

    register(session)
    session.read.format("ozonetree").load("/exports/trees")
    session.read.format("ozonevolume").option("source", "data").load("/data/hdds")

Both have the columns of the chunk table and one more, `findings`. Input that cannot be
read yields a row whose `findings` is a text and whose other columns hold what is known;
it does not fail the job. In every other row `findings` is null. Filters on
`container_id` and `datanode` are applied before files are opened; Spark checks the rows
again.
"""

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
from runtime.documents import parse_json
from runtime.errors import UsageError
from sweep.volumes import replica_rows

# Every column is nullable, because a row with a finding has few other values. Spark
# keeps times in microseconds.
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

# Tree files are small; fewer would not pay for starting a task.
_PARTITION_FILES_MAX = 512
# Each partition opens a shadow of the volume's database; fewer containers would not pay
# for that.
_PARTITION_CONTAINERS_MAX = 256


def register(session: SparkSession) -> None:
    """Register both sources with a session and enable filter pushdown."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (OzoneTree, OzoneVolume):
        session.dataSource.register(source)


class OzoneTree(DataSource):
    """`.tree` files: one, or all below a folder.

    The container ID comes from the file's name, otherwise from the tree. The datanode
    and the volume come from parent folders named `datanode=...` and `volume=...`,
    otherwise from the options `datanode` and `volume`. A tree holds no other attribute
    of its replica: the state is CLOSED, and BCS ID and replica index are 0.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonetree"

    def schema(self) -> StructType:
        """The columns of the chunk table, and `findings`."""
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the paths in the options.

        Raises:
            UsageError: no path is given.
        """
        options = dict(self.options)
        return TreeReader(
            _paths(self.options), options.get("datanode", ""), options.get("volume", "")
        )


class OzoneVolume(DataSource):
    """Ozone volumes, opened read-only; each path is the root of one.

    The option `source` is a value of merkle.replica.TreeSource: where the checksums
    come from.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonevolume"

    def schema(self) -> StructType:
        """The columns of the chunk table, and `findings`."""
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the volumes in the options.

        Raises:
            UsageError: no path is given.
            ValueError: `source` is not a TreeSource.
        """
        return _VolumeReader(
            _paths(self.options),
            TreeSource(dict(self.options).get("source", TreeSource.TREE.value)),
        )


@dataclass(frozen=True, slots=True)
class RowFilter:
    """The rows that pushed-down filters leave; None leaves all."""

    first: int = -(2**63)
    last: int = 2**63 - 1
    containers: frozenset[int] | None = None
    datanodes: frozenset[str] | None = None

    def narrowed(self, by: Filter) -> "RowFilter":
        """This filter and one more; a filter of another kind or column changes
        nothing.
        """
        match by:
            case EqualTo(("container_id",), int(value)):
                return self._only_containers({value})
            case In(("container_id",), values):
                return self._only_containers({value for value in values if isinstance(value, int)})
            case GreaterThan(("container_id",), int(value)):
                return replace(self, first=max(self.first, value + 1))
            case GreaterThanOrEqual(("container_id",), int(value)):
                return replace(self, first=max(self.first, value))
            case LessThan(("container_id",), int(value)):
                return replace(self, last=min(self.last, value - 1))
            case LessThanOrEqual(("container_id",), int(value)):
                return replace(self, last=min(self.last, value))
            case EqualTo(("datanode",), str(value)):
                return self._only_datanodes({value})
            case In(("datanode",), values):
                return self._only_datanodes({value for value in values if isinstance(value, str)})
        return self

    def has_container(self, container_id: int) -> bool:
        """Whether the filters leave rows of this container."""
        is_listed = self.containers is None or container_id in self.containers
        return is_listed and self.first <= container_id <= self.last

    def has_datanode(self, datanode: str) -> bool:
        """Whether the filters leave rows of this datanode."""
        return self.datanodes is None or datanode in self.datanodes

    def _only_containers(self, containers: set[int]) -> "RowFilter":
        return replace(
            self,
            containers=frozenset(
                containers if self.containers is None else containers & self.containers
            ),
        )

    def _only_datanodes(self, datanodes: set[str]) -> "RowFilter":
        return replace(
            self,
            datanodes=frozenset(
                datanodes if self.datanodes is None else datanodes & self.datanodes
            ),
        )


@dataclass
class _Reader(DataSourceReader):
    paths: Sequence[str]
    row_filter: RowFilter = field(default_factory=RowFilter, kw_only=True)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Record the filters and return all of them, so that Spark applies them
        again.
        """
        for pushed in filters:
            self.row_filter = self.row_filter.narrowed(pushed)
        return filters


@dataclass
class TreeReader(_Reader):
    """Reads `.tree` files."""

    datanode: str
    volume: str

    def partitions(self) -> Sequence["TreeFilePartition"]:
        """The tree files that the filters leave, up to _PARTITION_FILES_MAX each."""
        found = [path for root in self.paths for path in _tree_files(Path(root))]
        left = [path for path in found if self._is_left(path)]
        return [
            TreeFilePartition(left[i : i + _PARTITION_FILES_MAX])
            for i in range(0, len(left), _PARTITION_FILES_MAX)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition's tree files."""
        assert isinstance(partition, TreeFilePartition)
        for path in partition.paths:
            yield from self._read(path)

    def _is_left(self, path: Path) -> bool:
        container_id = _container_id_in_name(path)
        # An invalid ID is kept: reading the file reports it as a finding.
        is_left = (
            container_id is None
            or not _is_id(container_id)
            or self.row_filter.has_container(container_id)
        )
        return is_left and self.row_filter.has_datanode(self._attribute(path, "datanode"))

    def _attribute(self, path: Path, key: str) -> str:
        values = [part.partition("=")[2] for part in path.parts if part.startswith(f"{key}=")]
        return values[-1] if values else str(getattr(self, key))

    def _read(self, path: Path) -> Iterator[pa.RecordBatch]:
        datanode, volume = self._attribute(path, "datanode"), self._attribute(path, "volume")
        if not (_is_utf8(datanode) and _is_utf8(volume)):
            yield _finding(
                f"{path}: the name of its datanode or volume is not UTF-8", None, None, None
            )
            return
        container_id = _container_id_in_name(path)
        if container_id is not None and not _is_id(container_id):
            yield _finding(f"{path}: its name is not a container ID", datanode, volume, None)
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
            # A missing root is not the root of an empty tree.
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
        yield from map(_with_findings, rows_of(replica, TreeColumns.of(tree)).batches())
        try:
            check_tree(tree)
        except ReconcileError as error:
            yield _finding(
                f"{path}: {error.code}: {error.message}", datanode, volume, tree.container_id
            )


@dataclass
class _VolumeReader(_Reader):
    """Reads Ozone volumes."""

    source: TreeSource

    def partitions(self) -> Sequence["ContainerPartition"]:
        """The containers that the filters leave, up to _PARTITION_CONTAINERS_MAX each.

        A volume that cannot be opened is a partition with a finding.
        """
        return [part for root in self.paths for part in self._partitions_of(root)]

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

    def _partitions_of(self, root: str) -> Iterator["ContainerPartition"]:
        try:
            with (
                TemporaryDirectory(prefix="treefold-") as scratch,
                _open(root, Path(scratch)) as volume,
            ):
                survey = VolumeSurvey(volume, Disk())
                if not self.row_filter.has_datanode(survey.datanode):
                    return
                ids = [
                    container_id
                    for container_id in survey.ids()
                    if self.row_filter.has_container(container_id)
                ]
                fault = survey.fault
        except ReconcileError as error:
            yield ContainerPartition(root, (), f"{root}: {error.code}: {error.message}")
            return
        if fault is not None:
            yield ContainerPartition(root, (), f"{root}: {fault.detail}")
        for i in range(0, len(ids), _PARTITION_CONTAINERS_MAX):
            yield ContainerPartition(root, tuple(ids[i : i + _PARTITION_CONTAINERS_MAX]))

    def _read(self, partition: "ContainerPartition", scratch: Path) -> Iterator[pa.RecordBatch]:
        with _open(partition.root, scratch) as volume:
            survey = VolumeSurvey(volume, Disk())
            now_ms = round(datetime.now(UTC).timestamp() * 1000)
            for found in survey.replicas(self.source, partition.container_ids):
                yield from map(_with_findings, replica_rows(survey, found, now_ms).batches())
                for fault in found.faults:
                    yield _finding(fault.detail, survey.datanode, survey.volume, found.container_id)


class TreeFilePartition(InputPartition):
    """Some `.tree` files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(None)
        self.paths = tuple(paths)


class ContainerPartition(InputPartition):
    """Some containers of a volume, or the finding why it has none to read."""

    def __init__(self, root: str, container_ids: Sequence[ContainerId], finding: str = "") -> None:
        super().__init__(None)
        self.root = root
        self.container_ids = tuple(container_ids)
        self.finding = finding


def _paths(options: MutableMapping[str, str]) -> tuple[str, ...]:
    paths = (
        parse_json(options["paths"])
        if "paths" in options
        else [options["path"]]
        if "path" in options
        else []
    )
    if not paths:
        raise UsageError("say what to load: a path")
    return tuple(map(str, paths))


def _tree_files(root: Path) -> list[Path]:
    # A root that is missing or not a folder becomes a finding when it is read.
    return sorted(root.rglob("*.tree")) if root.is_dir() else [root]


def _container_id_in_name(path: Path) -> int | None:
    return int(path.stem) if path.stem.isascii() and path.stem.isdigit() else None


def _is_id(container_id: int) -> bool:
    return 0 < container_id < 1 << 63


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open(root: str, scratch: Path) -> Volume:
    return open_volume(
        Path(root).absolute(), hold=Hold.READ_ONLY, state_folder=scratch, disk=Disk()
    )


def _with_findings(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the chunk table with SCHEMA, their `findings` null."""
    columns = [_cast(column, f.type) for column, f in zip(batch.columns, SCHEMA, strict=False)]
    return pa.RecordBatch.from_arrays(
        [*columns, pa.nulls(batch.num_rows, pa.string())], schema=SCHEMA
    )


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        # The scan time is outside Spark's range. All rows are of one replica, so it is
        # unknown for each of them.
        return pa.nulls(len(column), kind)


def _finding(
    text: str, datanode: str | None, volume: str | None, container_id: int | None
) -> pa.RecordBatch:
    # A path need not be UTF-8.
    text = os.fsencode(text).decode(errors="backslashreplace")
    known = {"datanode": datanode, "volume": volume, "container_id": container_id, "findings": text}
    return pa.RecordBatch.from_arrays(
        [pa.array([known.get(f.name)], f.type) for f in SCHEMA], schema=SCHEMA
    )
