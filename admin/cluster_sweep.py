"""`treefold sweep run --cluster`: the trees of a running cluster as chunk tables.

Each datanode gets a table in DIR, as its agent would export it, so that either engine
sweeps them. Tables stay for the next sweep, which writes only what changed. A file
beside them names the datanodes that are done, so that an interrupted run reads the
others alone; it goes when the sweep is complete.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from threading import Event, Lock

import click
import pyarrow as pa

from admin.clusters import cluster_option, open_cluster, open_datanode
from chunktable.files import AnyPath, Files
from chunktable.places import destination_of
from dnagent.export import ExportProgress, export
from live.diagnosis import reason_not_compared
from live.survey import ClusterSurvey
from live.wire_survey import WireSurvey
from merkle.replica import ContainerReplica, ContainerState, PeerId, TreeSource
from merkle.tree import ContainerId
from ozone.scm_client import ClusterNode, ScmClient
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import UsageError
from runtime.output import JsonObject
from runtime.progress import ProgressSink
from runtime.setting_values import parse_rate
from sweep.engine import Engine, SweepRequest
from sweep.ledger import REQUIRED_SCHEMA
from sweep.output import Summary, SweepStore
from sweep.report import write_report
from sweep.run import sweep
from sweep.truth import BEFORE

_RATE = "100MB/s"
_PAGE = 1_000
# Exports at once; each has one stream, and a file that it writes.
_DATANODES_AT_ONCE = 8


@dataclass
class _ClusterTables:
    """The tables of a cluster, one of each datanode, and what they rest on."""

    tables: tuple[str, ...] = ()
    cluster_id: str = ""
    containers: int = 0
    replicas: int = 0
    # By closed container, how many replicas there must be, and how many SCM knows.
    required: dict[ContainerId, int] = field(default_factory=dict)
    known: Counter[ContainerId] = field(default_factory=Counter)
    progress_file: AnyPath | None = None

    def json(self) -> JsonObject:
        """For the document of the sweep."""
        return {
            "clusterID": self.cluster_id,
            "datanodes": len(self.tables),
            "containers": self.containers,
            "replicas": self.replicas,
            "incompleteContainers": sum(
                self.known[number] < required for number, required in self.required.items()
            ),
        }

    def forget_progress(self) -> None:
        """The next sweep reads all datanodes again."""
        if self.progress_file is not None:
            Files(Disk()).remove(self.progress_file)


def cluster_sweep_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--cluster` and `--rate`."""

    @cluster_option()
    @click.option(
        "--rate",
        help="With --cluster: read at most this much from each datanode in a second; 0 is no"
        f" limit. [default: {_RATE}]",
    )
    @wraps(command)
    def with_cluster(*, cluster: str | None, rate: str | None, **options: object) -> None:
        if cluster is None and rate is not None:
            raise UsageError("--rate is for --cluster")
        try:
            limit = parse_rate(rate or _RATE)
        except ValueError as error:
            raise UsageError(f"--rate: {error}") from error
        command(cluster=cluster, rate=limit, **options)

    return with_cluster


def sweep_with_cluster(
    request: SweepRequest,
    engine: Engine,
    progress: ProgressSink,
    sweeps: SweepStore,
    cluster: str | None,
    limit: int,
) -> tuple[Summary, JsonObject]:
    """Read the trees of a cluster, if there is one, into tables, and sweep them with
    all other inputs. Returns the summary, and what the document has besides.

    Raises:
        ReconcileError: SCM does not answer, or a table cannot be written; or as a
            sweep. What a datanode does not answer is in its table.
    """
    if request.volumes:
        progress.note(BEFORE[request.source])
    read = None
    if cluster is not None:
        with open_cluster(cluster) as directory:
            read = _Run(directory, request.out, progress).write(limit, fresh=request.fresh)
        request = replace(
            request, tables=(*request.tables, *read.tables), required=_required_table(read.required)
        )
    summary = sweep(request, engine, progress, report=lambda found: write_report(sweeps, found))
    if read is None:
        return summary, {}
    read.forget_progress()
    return summary, {"cluster": read.json()}


def _required_table(required: dict[ContainerId, int]) -> pa.Table:
    return pa.table([list(required), list(required.values())], REQUIRED_SCHEMA)


class _Run:
    """One reading of a cluster."""

    def __init__(self, directory: ScmClient, out: AnyPath, progress: ProgressSink) -> None:
        self._directory, self._progress = directory, progress
        identity = directory.identity()
        if identity.in_safe_mode:
            progress.note("SCM is in safe mode: it may not know all replicas yet")
        self._found = _ClusterTables(cluster_id=identity.cluster_id)
        self._folder = out / "clusters" / identity.cluster_id
        self._found.progress_file = self._folder / "progress.json"
        self._disk = Disk()
        self._lock = Lock()
        self._done = set[str]()
        self._stopped = Event()

    def write(self, limit: int, *, fresh: bool) -> _ClusterTables:
        """Write what is not done yet."""
        replicas = self._list()
        nodes = [node for node in self._directory.nodes() if replicas.get(node.peer)]
        self._found.tables = tuple(str(self._folder / node.peer) for node in nodes)
        if not fresh:
            self._load_progress()
        waiting = [node for node in nodes if node.peer not in self._done]
        total = sum(len(replicas[node.peer]) for node in nodes)
        self._progress.begin("reading trees", total, "replicas")
        self._progress.skip(total - sum(len(replicas[node.peer]) for node in waiting))
        with (
            ClusterSurvey(self._directory, open_datanode, limit) as survey,
            ThreadPoolExecutor(_DATANODES_AT_ONCE, thread_name_prefix="export") as pool,
        ):
            try:
                for _ in pool.map(
                    lambda node: self._export(survey, node, replicas[node.peer]), waiting
                ):
                    pass
            finally:
                self._stopped.set()
        return self._found

    def _list(self) -> dict[PeerId, list[ContainerReplica]]:
        """All replicas that SCM knows of, by datanode."""
        found: dict[PeerId, list[ContainerReplica]] = {}
        page = list[ContainerId]()

        def read_page() -> None:
            for group in self._directory.replicas(page).values():
                for one in group:
                    found.setdefault(one.peer, []).append(one)
                    self._found.replicas += 1
            page.clear()

        for container in self._directory.containers():
            if container.state is ContainerState.DELETED:
                continue
            self._found.containers += 1
            if not reason_not_compared(container):
                self._found.required[container.container_id] = container.required_replicas
            page.append(container.container_id)
            if len(page) == _PAGE:
                read_page()
        read_page()
        for group in found.values():
            self._found.known.update(one.container_id for one in group)
        return found

    def _export(
        self, survey: ClusterSurvey, node: ClusterNode, replicas: Sequence[ContainerReplica]
    ) -> None:
        counted = 0

        def count(done: ExportProgress) -> None:
            nonlocal counted
            with self._lock:
                self._progress.advance(done.containers - counted)
            counted = done.containers

        export(
            [WireSurvey(survey, node, replicas)],
            [],
            destination_of(str(self._folder), node.peer, self._disk),
            source=TreeSource.TREE,
            on_done=count,
            cancelled=self._stopped.is_set,
        )
        with self._lock:
            self._done.add(node.peer)
            assert self._found.progress_file is not None
            document = {"done": sorted(self._done)}
            Files(self._disk).replace(self._found.progress_file, json.dumps(document).encode())

    def _load_progress(self) -> None:
        path = self._found.progress_file
        assert path is not None
        files = Files(self._disk)
        if not files.exists(path):
            return
        # What is not readable is read anew.
        with suppress(ValueError):
            document = parse_json(files.read(path))
            done = document.get("done") if isinstance(document, dict) else None
            self._done = {str(one) for one in done} if isinstance(done, list) else set()
