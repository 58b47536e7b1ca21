"""Read the replicas of Ozone volumes as rows of the chunk table. Volumes are opened
read-only.

A sweep first copies these rows into files and then reads the files. So it compares a
single state, can be resumed, and leaves rows for the next sweep to compare with.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from chunktable.files import AnyPath, Files
from chunktable.schema import CHUNK_SCHEMA, ReplicaAttributes, ReplicaRows, rows_of
from merkle.columns import TreeColumns
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import ContainerId
from ozone.survey import ReplicaFault, ReplicaSnapshot, VolumeSurvey
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from sweep.faults import fault_row
from sweep.inputs import part_id
from sweep.model import FINDING_SCHEMA, Part, PartKind
from sweep.output import SkippedInput, write_atomically

# Containers of one part: few enough to read again after a crash, enough to fill a file.
_PART_CONTAINERS = 64

_GROUP_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class OpenVolumes:
    """Volumes open for reading, their parts, and the volumes that cannot be read."""

    # By Part.location.
    surveys: Mapping[str, VolumeSurvey]
    parts: tuple[Part, ...]
    # By part ID. Fixed here, because the volume's containers may change before a part
    # is read.
    containers: Mapping[str, tuple[ContainerId, ...]]
    skipped: tuple[SkippedInput, ...]
    # FINDING_SCHEMA: the volumes whose database cannot be read.
    findings: pa.Table

    @property
    def created_ms(self) -> dict[tuple[str, str], int]:
        """When each volume was created, in ms since the epoch, by datanode and volume,
        if known.
        """
        held = self.surveys.values()
        return {
            (one.datanode, one.volume): one.created_ms for one in held if one.created_ms is not None
        }


@contextmanager
def open_volumes(
    names: Sequence[str], source: TreeSource, scratch: Path, disk: Disk
) -> Iterator[OpenVolumes]:
    """Open the volumes with these roots. The shadows of their databases are written to
    `scratch`. A volume that cannot be opened is in `skipped`.
    """
    surveys, parts, skipped = dict[str, VolumeSurvey](), list[Part](), list[SkippedInput]()
    seen: dict[tuple[str, str], str] = {}
    faults, containers = list[dict[str, object]](), dict[str, tuple[ContainerId, ...]]()
    with ExitStack() as stack:
        for number, name in enumerate(dict.fromkeys(names)):
            try:
                root = Path(name).absolute()
                held = open_volume(
                    root, hold=Hold.READ_ONLY, state_folder=scratch / str(number), disk=disk
                )
                survey = VolumeSurvey(stack.enter_context(held), disk)
                ids = survey.ids()
            except ReconcileError as error:
                skipped.append(SkippedInput(name, f"{error.code}: {error.message}"))
                continue
            identity = (survey.datanode, survey.volume)
            if identity in seen:
                skipped.append(
                    SkippedInput(
                        name, f"it is the same volume of the same datanode as {seen[identity]}"
                    )
                )
                continue
            seen[identity] = name
            surveys[str(root)] = survey
            if survey.fault is not None:
                faults.append(_finding(survey, None, survey.fault))
            for part in _volume_parts(str(root), survey, ids, source):
                parts.append(part)
                containers[part.part_id] = tuple(ids[part.first : part.last])
        yield OpenVolumes(
            surveys,
            tuple(parts),
            containers,
            tuple(skipped),
            pa.Table.from_pylist(faults, FINDING_SCHEMA),
        )


def copy_part(
    part: Part, volumes: OpenVolumes, path: AnyPath, files: Files
) -> tuple[int, pa.Table]:
    """Write the rows of a part's containers to a Parquet file. Returns the number of
    rows, and findings (FINDING_SCHEMA).

    Raises:
        DiskError: the file cannot be written, or the volume cannot be listed.
    """
    survey, faults = volumes.surveys[part.location], list[dict[str, object]]()
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    with write_atomically(path, CHUNK_SCHEMA, files) as writer:
        waiting, count = list[pa.RecordBatch](), 0
        for found in survey.replicas(part.source, volumes.containers[part.part_id]):
            faults += [_finding(survey, found.container_id, fault) for fault in found.faults]
            for batch in replica_rows(survey, found, now_ms).batches():
                waiting.append(batch)
                count += batch.num_rows
                if count >= _GROUP_ROWS:
                    writer.add(pa.Table.from_batches(waiting))
                    waiting, count = [], 0
        writer.add(pa.Table.from_batches(waiting, CHUNK_SCHEMA))
    return writer.rows, pa.Table.from_pylist(faults, FINDING_SCHEMA)


def replica_rows(survey: VolumeSurvey, found: ReplicaSnapshot, now_ms: int) -> ReplicaRows:
    """The rows of a replica that was read at `now_ms`, in ms since the epoch."""
    replica = ReplicaAttributes(
        survey.datanode,
        survey.volume,
        found.container_id,
        # Without a readable descriptor the replica must not be compared.
        found.state or ReplicaState.INVALID,
        found.bcs_id,
        found.replica_index,
        found.source.value if found.source else "none",
        now_ms if found.source is TreeSource.DATA else found.scanned_at_ms,
    )
    return rows_of(replica, TreeColumns.of(found.tree) if found.source else None)


def _volume_parts(
    root: str, survey: VolumeSurvey, ids: Sequence[ContainerId], source: TreeSource
) -> Iterator[Part]:
    for first in range(0, len(ids), _PART_CONTAINERS):
        last = min(first + _PART_CONTAINERS, len(ids))
        held = ",".join(map(str, ids[first:last]))
        own_id = part_id(
            PartKind.VOLUME.value, root, survey.datanode, survey.volume, source.value, first, held
        )
        yield Part(own_id, PartKind.VOLUME, root, first, last, 0, source)


def _finding(
    survey: VolumeSurvey, container_id: ContainerId | None, fault: ReplicaFault
) -> dict[str, object]:
    return fault_row(
        (survey.datanode, survey.volume),
        fault.kind,
        fault.detail,
        container_id=container_id,
        block_id=fault.block_id,
        offset=fault.offset,
    )
