"""Spark data sources that read stored trees and Ozone volumes as chunk tables.

    register(session)
    session.read.format("ozonetree").load("/exports/trees")
    session.read.format("ozonevolume").option("source", "data").load("/data/hdds")

Both have the columns of the chunk table and one more, `findings`. Input that cannot be
read yields a row whose `findings` is a text and whose other columns hold what is known;
it does not fail the job. In every other row `findings` is null.

The options `only_containers`, `only_datanodes`, `only_volumes` and `only_states` keep
files from being opened. The sources take no filters of Spark: it keeps those of one
query for the next ones of the same DataFrame, which would silently lack rows. Nor does
Spark tell a source which columns a query needs: a schema of some columns
(`.schema(...)`) makes the others be left out where they are read.
"""

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    InputPartition,
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
from spark.jobs import is_remote
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

# Columns of text by which rows can be chosen.
_TEXTS = ("datanode", "volume", "state")
_FILTERS = frozenset({"only_containers", *(f"only_{name}s" for name in _TEXTS)})
_RANGE = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")
# A stored tree does not tell its replica's state.
_TREE_STATE = ReplicaState.CLOSED
_DEFAULT_PYTHON = "python3"
# Tree files are small; fewer would not pay for starting a task.
_PARTITION_FILES_MAX = 512
# Each partition opens a shadow of the volume's database; fewer containers would not pay
# for that.
_PARTITION_CONTAINERS_MAX = 256


def register(session: SparkSession) -> None:
    """Register both sources with a session.

    Spark plans a source in a Python worker on the driver's machine, and reads it in
    those of executors. Neither is this interpreter, and the first `python3` of the PATH
    may have no packages: so workers get `spark.pyspark.python` or PYSPARK_PYTHON if it
    is set, and otherwise this interpreter where all run on this machine.
    """
    # A server of Spark Connect has an interpreter of its own.
    if not is_remote(session):
        _choose_python(session)
    for source in (OzoneTree, OzoneVolume):
        session.dataSource.register(source)


def _choose_python(session: SparkSession) -> None:
    context = session.sparkContext
    chosen = context.getConf().get("spark.pyspark.python")
    # What is there comes from PYSPARK_PYTHON, or is Spark's default.
    is_default = context.pythonExec == _DEFAULT_PYTHON
    if chosen is None and is_default and str(context.master).startswith("local"):
        chosen = sys.executable
    context.pythonExec = chosen or context.pythonExec
    # For a bare interpreter on the driver's machine, where the executors' packages are
    # not. It ignores paths that do not exist. Each is given once: Spark starts a daemon
    # for each environment that differs.
    ours = [path for path in sys.path if path and Path(path).is_dir()]
    given = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(path for path in (*given, *ours) if path)
    context.environment["PYTHONPATH"] = os.pathsep.join(paths)


class _Source(DataSource):
    """What both sources have."""

    # The names of their options, in lower case, as Spark passes them.
    known: ClassVar[frozenset[str]]

    def __init__(self, options: dict[str, str]) -> None:
        """Take the options that `load` and `option` gave.

        Raises:
            UsageError: there is no path, or an unknown option.
        """
        super().__init__(options)
        given = {name.lower(): value for name, value in options.items()}
        known = self.known | _FILTERS
        if unknown := sorted(given.keys() - known - {"path", "paths"}):
            raise _refusal(
                f"{self.name()} has no option {', '.join(unknown)}",
                f"Its options are {', '.join(sorted(known))}.",
            )
        self.given = given
        self.paths = _paths(given)
        self.row_filter = _RowFilter.of(given)

    def schema(self) -> StructType:
        """The columns of the chunk table, and `findings`."""
        return from_arrow_schema(SCHEMA)


class OzoneTree(_Source):
    """`.tree` files: one, or all below a folder.

    The container ID comes from the file's name, otherwise from the tree. The datanode
    and the volume come from parent folders named `datanode=...` and `volume=...`,
    otherwise from the options `datanode` and `volume`. A tree holds no other attribute
    of its replica: the state is CLOSED, and BCS ID and replica index are 0.
    """

    known = frozenset({"datanode", "volume"})

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonetree"

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of these columns.

        Raises:
            UsageError: the source has no such columns.
        """
        datanode, volume = self.given.get("datanode", ""), self.given.get("volume", "")
        columns = _columns(self.name(), schema)
        return _TreeReader(self.paths, columns, self.row_filter, datanode, volume)


class OzoneVolume(_Source):
    """Ozone volumes, opened read-only; each path is the root of one.

    The option `source` is a value of merkle.replica.TreeSource: where the checksums
    come from.
    """

    known = frozenset({"source"})

    def __init__(self, options: dict[str, str]) -> None:
        """Take the options that `load` and `option` gave.

        Raises:
            UsageError: there is no path, an unknown option, or no such source.
        """
        super().__init__(options)
        source = self.given.get("source", TreeSource.TREE.value)
        sources = [one.value for one in TreeSource]
        if source not in sources:
            raise _refusal(f"ozonevolume has no source {source!r}", f"It is {', '.join(sources)}.")
        self.source = TreeSource(source)

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "ozonevolume"

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of these columns.

        Raises:
            UsageError: the source has no such columns.
        """
        columns = _columns(self.name(), schema)
        return _VolumeReader(self.paths, columns, self.row_filter, self.source)


@dataclass(frozen=True, slots=True)
class _RowFilter:
    """The rows that the options `only_...` leave; all without any."""

    # Ranges of container IDs, inclusive; None leaves all.
    containers: tuple[tuple[int, int], ...] | None = None
    # By column: datanode, volume and state.
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "_RowFilter":
        """The filter of some options.

        Raises:
            UsageError: there are no such containers or states.
        """
        containers, states = None, {state.value for state in ReplicaState}
        if (text := given.get("only_containers")) is not None:
            ranges = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
            if not all(ranges):
                raise _refusal(
                    f"only_containers is {text!r}", "Write IDs and ranges of them: 3,7,20-30."
                )
            containers = tuple((int(one[1]), int(one[2] or one[1])) for one in ranges if one)
        texts = {
            column: frozenset(part.strip() for part in given[f"only_{column}s"].split(","))
            for column in _TEXTS
            if f"only_{column}s" in given
        }
        if unknown := sorted(texts.get("state", frozenset()) - states):
            raise _refusal(
                f"only_states has {', '.join(unknown)}", f"States are {', '.join(sorted(states))}."
            )
        return cls(containers, texts)

    def has_container(self, container_id: int) -> bool:
        """Whether rows of this container are left."""
        ranges = self.containers
        return ranges is None or any(first <= container_id <= last for first, last in ranges)

    def has(self, **texts: str) -> bool:
        """Whether rows with these values of columns are left."""
        return all(
            name not in self.texts or value in self.texts[name] for name, value in texts.items()
        )


@dataclass
class _Reader(DataSourceReader):
    paths: Sequence[str]
    # The names of the columns to return, in order.
    columns: Sequence[str]
    row_filter: _RowFilter

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition."""
        # Spark makes a partition where there is none.
        if isinstance(partition, TreeFilePartition | ContainerPartition):
            for batch in self.rows(partition):
                yield batch.select(list(self.columns))

    @abstractmethod
    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, with all columns."""


@dataclass
class _TreeReader(_Reader):
    """Reads `.tree` files."""

    datanode: str
    volume: str

    def partitions(self) -> Sequence["TreeFilePartition"]:
        """The tree files that are left, up to _PARTITION_FILES_MAX each."""
        found = [path for root in self.paths for path in _tree_files(Path(root))]
        left = [path for path in found if self._is_left(path)]
        return [
            TreeFilePartition(left[i : i + _PARTITION_FILES_MAX])
            for i in range(0, len(left), _PARTITION_FILES_MAX)
        ]

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
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
        return is_left and self.row_filter.has(
            datanode=self._attribute(path, "datanode"),
            volume=self._attribute(path, "volume"),
            state=_TREE_STATE.value,
        )

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
        if not self.row_filter.has_container(tree.container_id):
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
            datanode, volume, tree.container_id, _TREE_STATE, 0, 0, TreeSource.TREE.value
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
        """The containers that are left, up to _PARTITION_CONTAINERS_MAX each.

        A volume that cannot be opened is a partition with a finding.
        """
        return [part for root in self.paths for part in self._partitions_of(root)]

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
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
                if not self.row_filter.has(datanode=survey.datanode, volume=survey.volume):
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
            states = {number: survey.state(number) for number in partition.container_ids}
            left = [
                number
                for number, state in states.items()
                # Reading one without a readable state reports why.
                if state is None or self.row_filter.has(state=state.value)
            ]
            for found in survey.replicas(self.source, left):
                state = found.state or ReplicaState.INVALID
                if self.row_filter.has(state=state.value):
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


def _paths(options: Mapping[str, str]) -> tuple[str, ...]:
    paths = (
        parse_json(options["paths"])
        if "paths" in options
        else [options["path"]]
        if "path" in options
        else []
    )
    if not paths or not all(paths):
        raise _refusal("say what to load: a path", "Write .load(PATH).")
    return tuple(map(str, paths))


def _columns(source: str, schema: StructType) -> tuple[str, ...]:
    """The names of the columns of a schema that a caller may have given."""
    ours = {one.name: one.dataType for one in from_arrow_schema(SCHEMA)}
    for one in schema:
        if one.name not in ours:
            raise _refusal(
                f"{source} has no column {one.name}", f"Its columns are {', '.join(ours)}."
            )
        if one.dataType != ours[one.name] or not one.nullable:
            kind = ours[one.name].simpleString()
            raise _refusal(
                f"column {one.name} of {source} is {kind}, and may be null",
                "Leave out .schema(...), or name its columns with these types.",
            )
    return tuple(schema.fieldNames())


def _refusal(text: str, hint: str) -> UsageError:
    """The error of who uses a source wrongly: Spark shows it without the lines of code
    that it passed, which would say nothing to them.
    """
    main = getattr(sys.modules["__main__"], "__spec__", None)
    # Only in a worker of Spark, which Spark ends after an error.
    if main is not None and main.name.startswith(("pyspark.", "spark.daemon")):
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
    return UsageError(f"{text}. {hint}", hint=hint)


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
