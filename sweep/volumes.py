"""Ozone volumes as chunk tables: the replicas of a volume read in place, without a byte
written to it.

A sweep copies the rows of volumes into files first and reads those: what was compared
is then one state, a resumed sweep goes on with it, and the next sweep can tell what
changed since.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from chunktable.schema import CHUNK_SCHEMA, ReplicaAttributes, ReplicaRows, rows_of
from merkle.columns import TreeColumns
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import ContainerId
from ozone.survey import ReplicaFault, ReplicaSnapshot, VolumeSurvey
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from sweep.inputs import part_id
from sweep.model import FINDING_SCHEMA, Part, PartKind
from sweep.output import Skipped, written_whole

# Containers of one part: few enough to be read again after a crash, many enough to fill
# a file.
_PART_CONTAINERS = 64

_GROUP_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class OpenVolumes:
    """Volumes held open read-only, their parts, and those that cannot be read."""

    # By what `Part.location` says.
    surveys: Mapping[str, VolumeSurvey]
    parts: tuple[Part, ...]
    # Of each part, by its ID: the volume may have others by the time that it is read.
    containers: Mapping[str, tuple[ContainerId, ...]]
    skipped: tuple[Skipped, ...]
    # FINDING_SCHEMA: of volumes whose database cannot be read.
    findings: pa.Table

    @property
    def created_ms(self) -> dict[tuple[str, str], int]:
        """Since when volumes exist, by datanode and volume, as far as they tell."""
        held = self.surveys.values()
        return {
            (one.datanode, one.volume): one.created_ms for one in held if one.created_ms is not None
        }


@contextmanager
def open_volumes(
    names: Sequence[str], source: TreeSource, scratch: Path, disk: Disk
) -> Iterator[OpenVolumes]:
    """Open the volumes whose roots these are; `scratch` takes the shadows of their
    databases.
    """
    surveys, parts, skipped = dict[str, VolumeSurvey](), list[Part](), list[Skipped]()
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
                skipped.append(Skipped(name, f"{error.code}: {error.message}"))
                continue
            identity = (survey.datanode, survey.volume)
            if identity in seen:
                skipped.append(
                    Skipped(name, f"it is the same volume of the same datanode as {seen[identity]}")
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


def copy_part(part: Part, volumes: OpenVolumes, path: Path, disk: Disk) -> tuple[int, pa.Table]:
    """Write the rows of a part's containers into a Parquet file; their number, and
    FINDING_SCHEMA.

    Raises:
        DiskError: the file cannot be written, or the volume cannot be listed.
    """
    survey, faults = volumes.surveys[part.location], list[dict[str, object]]()
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    with written_whole(path, CHUNK_SCHEMA, disk) as writer:
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
    """The rows of a replica as it was found; `now_ms` is when, in ms since the
    epoch.
    """
    replica = ReplicaAttributes(
        survey.datanode,
        survey.volume,
        found.container_id,
        # A descriptor that cannot be read is of a replica that nobody may compare.
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
        made = part_id(
            PartKind.VOLUME.value, root, survey.datanode, survey.volume, source.value, first, held
        )
        yield Part(made, PartKind.VOLUME, root, first, last, 0, source)


def _finding(
    survey: VolumeSurvey, container_id: ContainerId | None, fault: ReplicaFault
) -> dict[str, object]:
    return {
        "kind": fault.kind,
        "container_id": container_id,
        "block_id": fault.block_id,
        "chunk_offset": fault.offset,
        "lacking": [],
        "sources": [],
        "detail": f"{survey.datanode}/{survey.volume}: {fault.detail}",
    }
