"""`treefold tree`: build, show, compare and check trees offline, from tree files,
container folders and volumes.

Volumes are opened read-only, through a shadow of their database in a temporary folder,
so a running datanode may use them. An error affects only its own container.
"""

from contextlib import ExitStack
from functools import partial

import click

from admin.option_types import WholeNumber
from admin.tree_build import ReplicaTree, TreeBuild, open_results, replica_tree
from admin.tree_diff import (
    ReplicaComparison,
    compare_replicas,
    print_comparisons,
    replica_comparison_json,
)
from admin.tree_files import print_tree, stored_trees, tree_json
from admin.tree_sources import ContainerFailures, begin_scan, containers_of, open_paths, paths_of
from merkle.comparison import Comparison
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.replica import TreeSource
from ozone.mapped import MappedReader
from runtime.errors import UsageError
from runtime.output import print_json, print_table
from runtime.progress import ProgressStyle, progress_sink

_paths = click.argument("paths", metavar="PATH...", nargs=-1, required=True)
_ids = click.option(
    "--container",
    "ids",
    metavar="ID",
    type=WholeNumber(0, (1 << 63) - 1),
    multiple=True,
    help="Only this container. May be repeated.",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line, for each container."
)


@click.group()
def tree() -> None:
    """Build, show, compare and check trees offline.

    PATH is the root of a volume, or the folder of a container in a volume. `show` and
    `check` also accept tree files. Nothing is changed.
    """


@tree.command()
@_paths
@_ids
@click.option(
    "--source",
    type=click.Choice([TreeSource.DATA.value, TreeSource.METADATA.value]),
    default=TreeSource.DATA.value,
    show_default=True,
    help="Read and verify all data, or use the recorded checksums.",
)
@click.option(
    "--mapped",
    is_flag=True,
    help="Map block files into the memory of a worker process instead of copying their data.",
)
@click.option(
    "--resume",
    is_flag=True,
    help=(
        "Continue an interrupted build of the same paths: containers that it read are read again"
        " only if they have changed since."
    ),
)
@_json
@click.pass_obj
def build(
    output: ProgressStyle,
    paths: tuple[str, ...],
    ids: tuple[int, ...],
    source: str,
    mapped: bool,
    resume: bool,
    as_json: bool,
) -> int:
    """Build the trees of containers and list the findings.

    Each container is printed as it ends. Deleted blocks are taken from the stored tree.
    Notes are not findings. What is done is kept below ~/.local/state/treefold until the
    build ends: after Ctrl-C or a crash --resume continues it.

    Exit status: 0 no findings, 3 findings, 1 a container could not be read, 8 another
    build of the same paths is running.
    """
    if mapped and TreeSource(source) is not TreeSource.DATA:
        raise UsageError("--mapped needs --source data: --source metadata reads no data")
    named = paths_of(paths)
    with (
        open_paths(named) as places,
        open_results(named, source, resume=resume) as results,
        ExitStack() as stack,
    ):
        reader = stack.enter_context(MappedReader()) if mapped else None
        jobs = containers_of(places, ids)
        sink = stack.enter_context(progress_sink(output))
        on_bytes = begin_scan(sink, "building", jobs, TreeSource(source))
        run = TreeBuild(results, sink, as_json=as_json)
        try:
            for place, container_id in jobs:
                container = place.store.get(container_id)
                run.take(
                    place.name,
                    container,
                    partial(replica_tree, container, TreeSource(source), on_bytes, reader),
                    reads_data=on_bytes is not None,
                )
        except KeyboardInterrupt:
            run.note_interruption(len(jobs))
            raise
        run.finish()
    return run.failures.exit_status(found=run.found)


@tree.command()
@_paths
@_ids
@_json
def show(paths: tuple[str, ...], ids: tuple[int, ...], as_json: bool) -> int:
    """Show stored trees: root, blocks, chunks and deleted blocks.

    Exit status: 0 shown, 1 a tree is missing or could not be read.
    """
    failures = ContainerFailures()
    with stored_trees(paths, ids) as files:
        for file in files:
            with failures.catch(file.name, file.container_id):
                container_id, stored = file.parse()
                if as_json:
                    print_json(tree_json(container_id, stored))
                else:
                    print_tree(file.name, container_id, stored)
    return failures.exit_status(found=False)


@tree.command()
@_paths
@_ids
@_json
def check(paths: tuple[str, ...], ids: tuple[int, ...], as_json: bool) -> int:
    """Check that stored trees are well formed. Block data are not read.

    Checks order, ranges, limits and the tree's own checksums, and compares the root
    with the volume's database. A wrong tree is listed with its reasons. A well formed
    tree says nothing about the data since the scan that built it: use `treefold tree
    build` to read them.

    Exit status: 0 all trees are well formed, 3 some are not, 1 a tree could not be
    read.
    """
    failures, rows, wrong = ContainerFailures(), [], False
    with stored_trees(paths, ids) as files:
        for file in files:
            with failures.catch(file.name, file.container_id):
                checked = file.check()
                wrong = wrong or bool(checked.reasons)
                if as_json:
                    print_json(checked.json(file.path))
                else:
                    # If a file is not a tree, its name may not contain an ID either.
                    which = "unknown" if checked.container_id is None else checked.container_id
                    notes = "; ".join(checked.notes)
                    rows.append((which, checked.root, checked.verdict, notes, file.name))
    if not as_json:
        columns = ("CONTAINER", "ROOT", "VERDICT", "NOTES", "PATH")
        print_table(columns, rows, numbers=("CONTAINER", "ROOT"), folded=("NOTES", "PATH"))
    return failures.exit_status(found=wrong)


@tree.command("diff")
@_paths
@_ids
@click.option(
    "--source",
    type=click.Choice([source.value for source in TreeSource]),
    default=TreeSource.DATA.value,
    show_default=True,
    help=("Read and verify all data, use the recorded checksums, or compare the stored trees."),
)
@_json
@click.pass_obj
def diff_command(
    output: ProgressStyle, paths: tuple[str, ...], ids: tuple[int, ...], source: str, as_json: bool
) -> int:
    """Compare the replicas of containers.

    Lists for each difference the replicas that lack the data and those that have it,
    and for each container a verdict. If a PATH is the folder of a container, only that
    container is compared.

    Verdicts: MATCH, REPAIRABLE, UNRECOVERABLE, CONFLICT, UNKNOWN. A container is
    UNKNOWN if it is erasure-coded, has only one replica here, or has a replica that
    cannot be read; the reason is shown. With --source data, UNRECOVERABLE is also the
    verdict of `treefold reconcile`, which finds good data even in files whose record is
    lost. With other sources it is preliminary. Contradicting records, also a CONFLICT,
    show only in a reconciliation.

    Exit status: 0 no differences, 3 differences, 1 a replica could not be read.
    """
    if len(set(paths)) < 2 or len(set(paths)) < len(paths):
        raise UsageError("give two or more different paths to compare")
    failures, compared = ContainerFailures(), list[ReplicaComparison]()
    with open_paths(paths_of(paths)) as places:
        folders = tuple(place.container_id for place in places if place.container_id is not None)
        jobs = containers_of(places, ids or folders)
        with progress_sink(output) as sink:
            on_bytes = begin_scan(sink, "comparing", jobs, TreeSource(source))
            for container_id in sorted({container_id for _, container_id in jobs}):
                holders = [place for place, held in jobs if held == container_id]
                replicas, unread = dict[str, ReplicaTree](), dict[str, str]()
                for place in holders:
                    try:
                        built = replica_tree(
                            place.store.get(container_id), TreeSource(source), on_bytes
                        )
                        if built.unread is not None:
                            raise built.unread
                        replicas[place.name] = built
                    except ReconcileError as error:
                        failures.report(place.name, container_id, error)
                        unread[place.name] = error.message
                # Without all replicas, the verdict could report data as lost that only
                # the missing one holds.
                if unread:
                    one = ReplicaComparison(
                        Comparison(container_id, Verdict.UNKNOWN), unread=unread
                    )
                else:
                    live = {
                        name: replica for name, replica in replicas.items() if not replica.deleted
                    }
                    stores = {place.name: place.store for place in holders}
                    files = {name: stores[name].get(container_id) for name in live}
                    one = compare_replicas(container_id, live, files)
                if as_json:
                    print_json(replica_comparison_json(one))
                compared.append(one)
    if not as_json:
        print_comparisons(compared)
    return failures.exit_status(found=any(one.comparison.differs for one in compared))


@tree.result_callback()
@click.pass_context
def _exit(ctx: click.Context, status: int) -> None:
    ctx.exit(status)
