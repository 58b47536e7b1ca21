"""`treefold bucket demo`: two buckets and a verifier, and what a proof costs; then a
replication whose processes and disks fail (admin.demo.replication_demo).

Nothing is simulated: the verifier runs as it does beside a real bucket, the bytes are
those of its messages, and damage is a bit in a data file.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from admin.bucket_pair import json_option
from admin.demo.picture import write_picture
from admin.demo.replicated_pair import LocalPair, OzonePair
from admin.demo.replicated_writers import flip_bit
from admin.demo.replication_demo import ReplicationResult, ReplicationScale, replicate
from admin.option_types import WholeNumber
from admin.paths import LocalPath
from proof.stored_index import StoredIndex
from replicator.copier import CopierLimits
from replicator.ledger import PairLedger
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProof, PairProver
from replicator.refresh import IndexedBucket
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectProperties, Store, WriteCondition
from replicator.sync import SyncOptions
from replicator.verifier.client import VerifierClient
from replicator.verifier.config import ScrubSettings, VerifierConfig
from replicator.verifier.process import VerifierProcess
from runtime.disk import Disk
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, console, print_json, size_text
from runtime.progress import ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock

_ANYTHING = WriteCondition()
# Large enough to have a data file of its own.
_OBJECT_BYTES = 20_000
# The width of the picture.
_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class _Pair:
    """A source with its index near us, and a target behind a verifier."""

    source: Store
    target: Store
    target_folder: Path
    bucket: IndexedBucket
    ledger: PairLedger
    client: VerifierClient

    def prove(self, *, read_since_s: int = 0) -> PairProof:
        prover = PairProver(self.bucket, self.client, stopped=lambda: False)
        return prover.settle(read_since_s=read_since_s)

    def sync(self) -> int:
        """Make the sides equal; the bytes of messages that crossed."""
        before = self.client.bytes_sent + self.client.bytes_received
        clock = SystemClock()
        with (
            progress_sink(ProgressStyle()) as progress,
            ProvenSync(
                self.bucket,
                self.target,
                self.ledger,
                self.client,
                SyncOptions(delete=True, copier_limits=CopierLimits(objects=4, parts=4)),
                progress=progress,
                clock=clock,
                sleep=lambda _s: None,
                is_cancelled=lambda: False,
            ) as run,
        ):
            run.execute(run.plan())
        return self.client.bytes_sent + self.client.bytes_received - before


@click.command(short_help="Break a copy and a replication, and see what proves them.")
@click.option(
    "--objects",
    type=WholeNumber(20, 100_000),
    default=1_000,
    show_default=True,
    help="Objects in each bucket.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Also compare every key and byte of the replica with what the writers wrote.",
)
@click.option(
    "--svg",
    type=LocalPath(file_okay=False, exists=True, path_type=Path),
    metavar="FOLDER",
    help="Also draw both parts: bucket-proof.svg and replication.svg in FOLDER.",
)
@click.option(
    "--ozone",
    nargs=2,
    metavar="SOURCE TARGET",
    help=(
        "Replicate between two empty buckets of Apache Ozone, as ozone://OM:PORT/VOLUME/BUCKET?s3="
        "URL, best of two clusters; they are emptied at the end."
    ),
)
@json_option
def demo(
    objects: int, check: bool, svg: Path | None, ozone: tuple[str, str] | None, as_json: bool
) -> None:
    """Copy and replicate a bucket on loopback, break everything, and prove the result.

    Makes a bucket, a copy, and a verifier beside the copy, in a temporary folder. Then
    it changes the copy in four ways, one of which its own store does not see, and
    proves each by the verifier.

    Then a replication master and two syncers replicate a bucket while four writers
    change it. The syncer that has it is killed, the other one is cut off from the
    master, and a bit flips in a file of the target. Shown are the lag of every change,
    what took over, what was found and repaired, and the signed proof at the end.

    With --ozone the second part is between two real buckets of Ozone. Their OMs' logs
    show the lag, and the damage is an object that somebody else overwrites.

    Takes less than a minute on local buckets, and leaves nothing.

    Exit status: 0 each proof found just what was changed and the replica is equal, 1 it
    is not so.
    """
    out = Console(
        file=console(stderr=as_json).file,
        record=svg is not None,
        highlight=False,
        width=_COLUMNS if svg else None,
    )
    with ExitStack() as opened:
        # First of all, for what is wrong with them.
        pair = opened.enter_context(OzonePair(*ozone)) if ozone is not None else None
        with tempfile.TemporaryDirectory(prefix="treefold-demo-") as folder:
            is_right, rows = _prove_copy(Path(folder), objects, out)
            if svg:
                write_picture(out, svg / "bucket-proof.svg", "treefold bucket demo")
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="treefold-demo-"))
        result = _replicate(Path(folder), pair, objects, out, check=check)
    is_right &= result.is_as_expected
    if svg:
        Disk().replace(svg / "replication.svg", result.picture().encode())
    if as_json:
        print_json(
            {
                "objects": objects,
                "asExpected": is_right,
                "steps": rows,
                "replication": result.as_json(),
            }
        )
    if not is_right:
        raise click.exceptions.Exit(ExitCode.FAILED)


def _prove_copy(folder: Path, objects: int, out: Console) -> tuple[bool, list[JsonObject]]:
    """Break a copy and prove what differs: whether each proof was right, and a row for
    each step.
    """
    table = _table(out, ("what happened to the copy", "what the proof says"), ("bytes", "trips"))
    rows = list[JsonObject]()
    is_right = True
    with _pair(folder) as pair:
        for number in range(objects):
            _put(pair.source, _key(number), random.Random(number).randbytes(_OBJECT_BYTES))
        crossed = pair.sync()
        out.print(
            f"{objects} objects, {size_text(objects * _OBJECT_BYTES)}, copied with"
            f" {size_text(crossed)} in messages"
        )
        for name, act, expected, reads in _STEPS:
            act(pair)
            since_s = pair.bucket.clock.now_ms() // 1000 if reads else 0
            proof = pair.prove(read_since_s=since_s)
            found = tuple(sorted((one.kind.value, one.key) for one in proof.differences))
            as_expected = found == tuple(sorted(expected))
            is_right &= as_expected
            said = "equal" if proof.is_equal else ", ".join(" ".join(one) for one in found)
            style = "green" if proof.is_equal else "yellow"
            table.add_row(
                name,
                Text(said if as_expected else f"WRONG: {said}", style if as_expected else "red"),
                str(proof.bytes_crossed),
                str(proof.round_trips),
            )
            rows.append(
                {
                    "step": name,
                    "equal": proof.is_equal,
                    "differences": [{"kind": kind, "key": key} for kind, key in found],
                    "bytesCrossed": proof.bytes_crossed,
                    "roundTrips": proof.round_trips,
                }
            )
    out.print(table)
    out.print(
        "Bytes of the proof's messages in both directions; a difference is proven twice.",
        style="dim",
    )
    return is_right, rows


def _replicate(
    folder: Path, ozone: OzonePair | None, objects: int, out: Console, *, check: bool
) -> ReplicationResult:
    """Replicate a bucket under faults, and print what happens and how late changes
    were; a local one without buckets of Ozone.
    """
    began_s = time.monotonic()

    def say(line: str) -> None:
        out.print(Text(f"[{time.monotonic() - began_s:5.1f}s] {line}"))

    what = "local bucket" if ozone is None else "bucket of Ozone"
    out.print(f"\nA master, two syncers and a {what} that is written to:")
    scale = ReplicationScale(objects)
    if ozone is not None:
        result = replicate(folder, ozone, scale, say, check=check)
    else:
        with LocalPair(folder) as pair:
            result = replicate(folder, pair, scale, say, check=check)
    table = _table(out, ("while",), ("changes", "lag p50", "lag p99", "most"))
    for name, lag in result.lags().items():
        times = (lag.p50_ms, lag.p99_ms, lag.max_ms)
        table.add_row(name, str(lag.changes), *(_time_text(one) for one in times))
    out.print(table)
    is_right = result.is_as_expected
    out.print(
        Text(
            f"{'nothing lost, everything found and repaired' if is_right else 'WRONG: see above'},"
            f" in {result.elapsed_s:.0f} s",
            "green" if is_right else "red",
        )
    )
    return result


def _table(out: Console, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    # No boxes in a log.
    is_boxed = out.record or out.file.isatty()
    table = Table(box=box.ROUNDED if is_boxed else None, header_style="bold")
    for column in (*texts, *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def _time_text(time_ms: int | None) -> str:
    if time_ms is None:
        return "unknown"
    return f"{time_ms} ms" if time_ms < 1_000 else f"{time_ms / 1_000:.1f} s"


@contextmanager
def _pair(folder: Path) -> Iterator[_Pair]:
    with ExitStack() as opened:
        addresses = {side: f"local:{folder / side}" for side in ("source", "target")}
        source, target = (
            opened.enter_context(open_store(one, may_write=True, create=True))
            for one in addresses.values()
        )
        config = VerifierConfig(
            bucket=addresses["target"],
            state_folder=folder / "verifier",
            listen="127.0.0.1:0",
            writes=True,
            scrub=ScrubSettings(enabled=False),
        )
        process = VerifierProcess(config)
        opened.callback(process.stop)
        client = VerifierClient(process.address)
        opened.callback(client.close)
        profile = client.describe().profile
        index = StoredIndex(folder / "index", profile, disk=Disk())
        opened.callback(index.close)
        ledger = PairLedger(folder / "state", source=source.address, target=target.address)
        opened.callback(ledger.close)
        bucket = IndexedBucket(source, index, profile, SystemClock())
        yield _Pair(source, target, folder / "target", bucket, ledger, client)


def _key(number: int) -> str:
    return f"photos/{number:05}.jpg"


def _put(store: Store, key: str, body: bytes) -> None:
    store.writer.put(key, body, ObjectProperties(metadata=(("owner", "ann"),)), _ANYTHING)


def _nothing(_pair: _Pair) -> None:
    """It was just copied."""


def _lose(pair: _Pair) -> None:
    pair.target.writer.delete([_key(7)])


def _change(pair: _Pair) -> None:
    """What the last step did is undone by a sync."""
    pair.sync()
    _put(pair.target, "photos/stray.jpg", b"nobody copied this")
    facts = pair.target.reader.facts(_key(8))
    assert facts is not None
    pair.target.writer.put_properties(facts, ObjectProperties(metadata=(("owner", "bob"),)))


def _damage(pair: _Pair) -> None:
    """Flip a bit of the copy in its data file, of which its store knows nothing."""
    pair.sync()
    facts = pair.target.reader.facts(_key(9))
    assert facts is not None
    with pair.target.reader.read(facts) as pieces:
        flip_bit(pair.target_folder, b"".join(pieces))


def _repair(pair: _Pair) -> None:
    pair.sync()


# What happens, by what, what the proof must then say, and whether both sides are read.
_STEPS: tuple[tuple[str, Callable[[_Pair], None], tuple[tuple[str, str], ...], bool], ...] = (
    ("nothing", _nothing, (), False),
    ("an object was lost", _lose, (("missing", _key(7)),), False),
    (
        "one was added, and of one the metadata changed",
        _change,
        (("changed", _key(8)), ("extra", "photos/stray.jpg")),
        False,
    ),
    ("a bit flipped on its disk; recorded hashes", _damage, (), False),
    ("the same, after each side has read its objects", _nothing, (("changed", _key(9)),), True),
    ("a sync replaced it; both sides are read again", _repair, (), True),
)
