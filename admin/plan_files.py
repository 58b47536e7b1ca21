"""Plan files: what a reconciliation would write, made by the agents and carried out
later (`treefold reconcile --plan FILE`, `--apply FILE`).

The file is for people and for the check that nothing changed since. The agents carry
out only the plans that they keep by the digests in it (repair.replica_plan).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dnagent.client import AgentClient
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from repair.replica_plan import FORMAT, canonical_json, plan_digest
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import UsageError
from runtime.output import print_line, print_table, size_text
from scm.client import ControllerClient
from scm.planned import PlannedOrder
from scm.views import ContainerStatus

_SCHEMA_VERSION = 1
# A plan reads and fetches all that would be written, replica by replica.
_CONTAINERS_MAX = 100
_TIMEOUT_S = 600.0
_ROWS_MAX = 100
_REASONS_MAX = 10
_READ_ONLY = "it is held read-only"


class _NoPlanError(ReconcileError):
    """No agent could plan the repair of its replica."""

    code = "no_plan"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class PlannedRange(_Strict):
    """Bytes of a block's file to write: whole windows of a chunk, from one source."""

    block: str
    chunk: int
    window: int
    windows: int
    offset: int
    length: int
    source: str


class ReplicaPlanDocument(_Strict):
    """The parts of an agent's plan that a command shows or checks."""

    format: str = Field(pattern=f"^{FORMAT}$")
    container: int
    datanode: str
    root: str = Field(pattern="^[0-9a-f]{1,16}$")
    peers: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]]
    unread: dict[str, str]
    bytes: int = Field(ge=0)
    writes: tuple[PlannedRange, ...]
    records: tuple[dict[str, object], ...]
    tombstones: tuple[str, ...]
    bcs_id: int | None = Field(alias="bcsID")
    returns_to_service: bool = Field(alias="returnsToService")
    left: tuple[dict[str, object], ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        has_writes = bool(self.writes or self.records or self.tombstones)
        return not (has_writes or self.bcs_id is not None or self.returns_to_service)


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """The plan of one replica, its digest, and its document as the agent sent it."""

    digest: str
    plan: ReplicaPlanDocument
    document: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ContainerEntry:
    """The plans of one container's replicas. `unplanned` are the replicas without one,
    each with the reason; the plans know nothing of those that sent no tree.
    """

    container_id: int
    replicas: tuple[ReplicaEntry, ...]
    unplanned: Mapping[str, str]
    # Whether an agent was asked for a plan and made none.
    has_failures: bool = False

    @property
    def unknown(self) -> list[str]:
        """What the plans do not know, in words."""
        found = [f"{peer} has no plan: {reason}" for peer, reason in self.unplanned.items()]
        for entry in self.replicas:
            for peer, code in entry.plan.unread.items():
                found.append(f"the plan of {entry.plan.datanode} lacks {peer}: {code}")
        return found

    @property
    def to_write(self) -> tuple[ReplicaEntry, ...]:
        """The replicas whose plans have something to do."""
        return tuple(entry for entry in self.replicas if not entry.plan.is_empty)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The plans of some containers."""

    containers: tuple[ContainerEntry, ...]

    @property
    def container_ids(self) -> list[int]:
        """The containers with something to do."""
        return [one.container_id for one in self.containers if one.to_write]

    def is_partial(self, container_id: int) -> bool:
        """Whether the plans of a container lack a replica that is not read-only."""
        return any(
            set(one.unplanned.values()) - {_READ_ONLY}
            or any(entry.plan.unread for entry in one.replicas)
            for one in self.containers
            if one.container_id == container_id
        )

    @property
    def replicas(self) -> list[PlannedOrder]:
        """The replicas with something to do, as the controller gets them."""
        return [
            PlannedOrder(
                ContainerId(one.container_id),
                PeerId(entry.plan.datanode),
                entry.digest,
                _signed(int(entry.plan.root, 16)),
            )
            for one in self.containers
            for entry in one.to_write
        ]

    def changed_peers(self, views: Mapping[int, ContainerStatus]) -> list[str]:
        """The replicas that have another root than the plans were made with, in
        words.
        """
        found = dict[str, None]()
        for one in self.containers:
            view = views.get(one.container_id)
            now = {
                replica.datanode.peer: replica.replica.data_checksum
                for replica in (view.replicas if view else ())
            }
            for entry in one.to_write:
                for peer, root in entry.plan.peers.items():
                    if now.get(PeerId(peer)) != _signed(int(root, 16)):
                        start = f"container {one.container_id}: the replica of {peer}"
                        found[f"{start} no longer has the root {root}"] = None
        return list(found)


def check_new_file(path: Path) -> None:
    """Call this before plans are made: agents read and fetch all that they plan.

    Raises:
        UsageError: a plan file cannot be written there.
    """
    folder = path.absolute().parent
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
            raise UsageError(f"--plan: {path} exists", hint="Give another name, or remove it.")
        if not folder.is_dir():
            raise UsageError(f"--plan: {folder} is not a folder", hint="Make it first.")
        # Without a name: it leaves nothing behind.
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"--plan: {path} cannot be written: {error.strerror or error}"
        raise UsageError(text, hint="Give the name of a file in a folder of yours.") from error


def make_plans(controller: ControllerClient, views: Sequence[ContainerStatus]) -> PlanFile:
    """Have the agents plan the repair of each live and writable replica.

    Raises:
        UsageError: there are too many containers.
        _NoPlanError: no replica has a plan.
    """
    if len(views) > _CONTAINERS_MAX:
        raise UsageError(
            f"a plan file has at most {_CONTAINERS_MAX} containers, not {len(views)}",
            hint="Make several, or reconcile without one.",
        )
    made = PlanFile(tuple(_planned(controller, view) for view in views))
    if not any(one.replicas for one in made.containers):
        texts = [f"container {one.container_id}: {text}" for one in made.containers
                 for text in one.unknown]  # fmt: skip
        more = f" and {len(texts) - _REASONS_MAX} more" if len(texts) > _REASONS_MAX else ""
        raise _NoPlanError(
            f"no replica has a plan, and no file was written: {'; '.join(texts[:_REASONS_MAX])}"
            f"{more}"
        )
    return made


def save_plans(plans: PlanFile, path: Path) -> None:
    """Write a plan file, durably.

    Raises:
        UsageError: there is such a file, or none can be written there.
        DiskError: it cannot be written.
    """
    # It may have come to be while the plans were made.
    check_new_file(path)
    document: dict[str, object] = {
        "schema_version": _SCHEMA_VERSION,
        "format": FORMAT,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "containers": [
            {
                "containerID": one.container_id,
                "replicas": [
                    {"digest": entry.digest, "plan": entry.document} for entry in one.replicas
                ],
                "unplanned": dict(one.unplanned),
                "unknown": one.unknown,
            }
            for one in plans.containers
        ],
    }
    document["digest"] = plan_digest(canonical_json(document))
    Disk().replace(path.absolute(), json.dumps(document, indent=1).encode() + b"\n")


def load_plans(path: Path) -> PlanFile:
    """The plans in a file.

    Raises:
        UsageError: it is no plan file, a plan in it was changed, or stands where it
            does not belong.
        DiskError: it cannot be read.
    """
    hint = "Make one with `treefold reconcile ID --plan FILE`."
    raw = Disk().read(path)
    try:
        values, document = parse_json(raw), _Document.model_validate_json(raw)
    except ValueError as error:
        text = f"--apply: {path} is no plan file: {_fault(error)}"
        raise UsageError(text, hint=hint) from error
    containers: list[ContainerEntry] = []
    for one in document.containers:
        entries = []
        for stored in one.replicas:
            entry = _entry(canonical_json(stored.plan))
            if entry.digest != stored.digest:
                name = f"the plan of {entry.plan.datanode} for container {one.container_id}"
                raise UsageError(f"--apply: {path}: {name} was changed", hint=hint)
            entries.append(entry)
        _check_places(path, one.container_id, entries, containers)
        containers.append(ContainerEntry(one.container_id, tuple(entries), one.unplanned))
    # What is missing has no digest of its own.
    signed = {name: value for name, value in values.items() if name != "digest"}
    if document.digest != plan_digest(canonical_json(signed)):
        raise UsageError(f"--apply: {path} was changed after it was written", hint=hint)
    return PlanFile(tuple(containers))


def _check_places(
    path: Path,
    container_id: int,
    entries: Sequence[ReplicaEntry],
    before: Sequence[ContainerEntry],
) -> None:
    """The digests are of single plans: where each stands is checked here."""
    hint = "Make a new plan file; this one was changed after it was written."
    if container_id in {one.container_id for one in before}:
        raise UsageError(f"--apply: {path}: container {container_id} is there twice", hint=hint)
    seen = set[str]()
    for entry in entries:
        name = f"the plan of {entry.plan.datanode}"
        if entry.plan.container != container_id:
            text = f"{name} is for container {entry.plan.container}, and not for {container_id}"
            raise UsageError(f"--apply: {path}: {text}, where it stands", hint=hint)
        if entry.plan.datanode in seen:
            text = f"{name} for container {container_id} is there twice"
            raise UsageError(f"--apply: {path}: {text}", hint=hint)
        seen.add(entry.plan.datanode)


def print_plans(plans: PlanFile) -> None:
    """Print what each replica would get, and from where."""
    rows = []
    for one in plans.containers:
        for entry in one.replicas:
            plan = entry.plan
            sources = sorted({write.source for write in plan.writes})
            rows.append(
                (
                    one.container_id,
                    plan.datanode,
                    size_text(plan.bytes),
                    len(plan.writes),
                    len(plan.records),
                    len(plan.tombstones),
                    "; ".join((*_extras(plan), *(f"from {source}" for source in sources))),
                )
            )
    columns = ("CONTAINER", "DATANODE", "WRITES", "RANGES", "RECORDS", "DELETES", "AND")
    print_table(columns, rows[:_ROWS_MAX], numbers=columns[0:1] + columns[2:6], folded=("AND",))
    if len(rows) > _ROWS_MAX:
        print_line(f"... and {len(rows) - _ROWS_MAX} more")


class _StoredReplica(_Strict):
    digest: str
    plan: dict[str, object]


class _StoredContainer(_Strict):
    container_id: int = Field(ge=1, lt=1 << 63, alias="containerID")
    replicas: tuple[_StoredReplica, ...]
    unplanned: dict[str, str]


class _Document(_Strict):
    schema_version: int = Field(ge=_SCHEMA_VERSION, le=_SCHEMA_VERSION)
    format: str = Field(pattern=f"^{FORMAT}$")
    containers: tuple[_StoredContainer, ...]
    digest: str


def _planned(controller: ControllerClient, view: ContainerStatus) -> ContainerEntry:
    addresses = {one.datanode.peer: one.datanode.address for one in view.replicas if one.is_live}
    entries, unplanned, has_failures = [], dict[str, str](), False
    for one in view.replicas:
        peer = one.datanode.peer
        if not one.is_live:
            unplanned[peer] = "it does not report"
            continue
        if one.replica.read_only:
            unplanned[peer] = _READ_ONLY
            continue
        others = {other: address for other, address in addresses.items() if other != peer}
        try:
            entries.append(_fetch(controller, view.container_id, peer, addresses[peer], others))
        except ReconcileError as error:
            unplanned[peer] = f"{error.code}: {error.message}"
            has_failures = True
    missing = view.expected_replicas - len(view.replicas)
    if missing > 0:
        unplanned["unknown datanode"] = f"{missing} of {view.expected_replicas} are not reported"
    return ContainerEntry(view.container_id, tuple(entries), unplanned, has_failures)


def _fetch(
    controller: ControllerClient,
    container_id: int,
    peer: PeerId,
    address: str,
    peers: Mapping[PeerId, str],
) -> ReplicaEntry:
    channel = controller.agent_channel(peer, address)
    try:
        client = AgentClient(channel, address)
        return _entry(client.plan_repair(ContainerId(container_id), peers, timeout_s=_TIMEOUT_S))
    finally:
        channel.close()


def _entry(document: bytes) -> ReplicaEntry:
    try:
        values, plan = parse_json(document), ReplicaPlanDocument.model_validate_json(document)
    except ValueError as error:
        raise UsageError(f"a plan is invalid: {_fault(error)}") from error
    return ReplicaEntry(plan_digest(document), plan, values)


def _fault(error: ValueError) -> str:
    """What is wrong with a document, and where if that is known."""
    if not isinstance(error, ValidationError):
        return str(error)
    where = ".".join(map(str, error.errors()[0]["loc"])) or "it"
    return f"{where}: {error.errors()[0]['msg']}"


def _extras(plan: ReplicaPlanDocument) -> list[str]:
    found = []
    if plan.bcs_id is not None:
        found.append(f"commit {plan.bcs_id}")
    if plan.returns_to_service:
        found.append("returns to service")
    if plan.left:
        found.append(f"{len(plan.left)} not healed")
    return found


def _signed(root: int) -> int:
    """A root as messages have it: 64 bits with a sign."""
    return root - (1 << 64) if root >= 1 << 63 else root
