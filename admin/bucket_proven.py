"""A pair of buckets of which the target has a verifier."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click

from admin.bucket_output import (
    HIDDEN_KEYS,
    LEVELS,
    counted,
    levels_text,
    not_equal_text,
    nothing_text,
    time_text,
    uncompared_notes,
)
from admin.bucket_pair import append_receipt, check_addresses, open_receipts, state_folder
from proof.column_naming import difference_names
from proof.item import EvidenceLevel
from proof.naming import ItemDifferenceKind
from proof.stored_index import StoredIndex
from replicator.ledger import PairLedger
from replicator.proven_receipt import proven_receipt
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProof, PairProver
from replicator.refresh import READ_ALL_S, IndexedBucket
from replicator.stores.address import canonical_address, same_bucket
from replicator.stores.opening import open_store
from replicator.sync import SyncOptions
from replicator.verifier.client import VerifierClient
from replicator.verify import KeyDifferenceKind
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.output import print_json, print_line, size_text
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock

# Differences that are printed for people; --json has all.
_LINES_SHOWN = 50


@dataclass(frozen=True, slots=True)
class _ProvenPair:
    """A source with its index, and the ledger and folder of the pair. Unless both sides
    list all keys, equality cannot be shown.
    """

    bucket: IndexedBucket
    ledger: PairLedger
    state: Path
    lists_all: bool


@contextmanager
def open_proven_sync(
    source: str,
    target: str,
    state: Path | None,
    verifier: VerifierClient,
    options: SyncOptions,
    progress: ProgressSink,
) -> Iterator[tuple[ProvenSync, Path]]:
    """A sync with a verifier, and the state folder of the pair.

    Raises:
        ReconcileError: see `_open_proven_pair`; the target's store was not opened.
    """
    with (
        _open_proven_pair(source, target, state, verifier, progress) as pair,
        open_store(target, may_write=True) as store,
    ):
        run = ProvenSync(
            pair.bucket,
            store,
            pair.ledger,
            verifier,
            options,
            progress=progress,
            clock=SystemClock(),
            sleep=time.sleep,
            is_cancelled=lambda: False,
        )
        yield run, pair.state


@contextmanager
def _open_proven_pair(
    source: str, target: str, state: Path | None, client: VerifierClient, progress: ProgressSink
) -> Iterator[_ProvenPair]:
    """Open the source and its index under the verifier's profile, in the state folder
    of the pair, which is locked until the end.

    Raises:
        UsageError: an address is invalid, or the verifier is that of another bucket.
        VerifierUnavailableError: the verifier does not answer.
        PairRefusedError, ConfigError, BusyError, StoreError, DatabaseError, DiskError:
            see `open_pair`.
    """
    source, target = canonical_address(source), canonical_address(target)
    check_addresses(source, target)
    said = client.describe()
    if not same_bucket(said.address, target):
        raise UsageError(
            f"the verifier at {client.address} is of {said.address}, not of {target}",
            hint="Name its bucket as TARGET, or another verifier.",
        )
    progress.note(f"verifier {client.address}: beside {said.address}")
    folder = state_folder(state, source, target)
    with ExitStack() as opened:
        store = opened.enter_context(open_store(source, may_write=False))
        ledger = PairLedger(folder, source=source, target=target)
        opened.callback(ledger.close)
        # A verifier with another secret gives other IDs: its index is another one.
        name = f"index-{said.profile.digest.hex()}"
        index = StoredIndex(folder / name, said.profile, disk=Disk())
        opened.callback(index.close)
        lists_all = store.capabilities.lists_all_keys and said.lists_all_keys
        bucket = IndexedBucket(store, index, said.profile, SystemClock())
        yield _ProvenPair(bucket, ledger, folder, lists_all)


def prove(
    source: str,
    target: str,
    state: Path | None,
    verifier: VerifierClient,
    level: EvidenceLevel,
    prefix: str,
    style: ProgressStyle | None,
    *,
    as_json: bool,
) -> tuple[int, bool]:
    """Compare by the indexes of both sides, which each side brings up to date, and
    print what was found: how many differences, and whether the sides are equal.

    Raises:
        UsageError: the level is one that a verifier has no use for.
        ReconcileError: see `_open_proven_pair`; the comparison failed.
    """
    if level is EvidenceLevel.LISTED:
        raise UsageError(
            "--level listed and --verifier exclude each other",
            hint="A verifier knows more than a listing: leave --level out, or --verifier.",
        )
    clock = SystemClock()
    read_since_s = READ_ALL_S if level is EvidenceLevel.READ else 0
    with ExitStack() as opened, ExitStack() as bar:
        progress = bar.enter_context(progress_sink(style or ProgressStyle()))
        pair = opened.enter_context(_open_proven_pair(source, target, state, verifier, progress))
        receipts = open_receipts(pair.state)
        prover = PairProver(
            pair.bucket, verifier, prefix=prefix, stopped=lambda: False, progress=progress
        )
        progress.note("both sides bring their indexes up to date, each near its store")
        proof = prover.settle(read_since_s=read_since_s)
        receipt = proven_receipt(
            pair.bucket,
            proof,
            source=canonical_address(source),
            target=canonical_address(target),
            prefix=prefix,
            time_ms=clock.now_ms(),
        )
        bar.close()
        try:
            append_receipt(receipts, receipt if pair.lists_all else None)
        finally:
            _print_proof(proof, pair, verifier, prefix, as_json=as_json)
    return len(proof.differences), proof.is_equal and pair.lists_all


def _print_proof(
    proof: PairProof, pair: _ProvenPair, client: VerifierClient, prefix: str, *, as_json: bool
) -> None:
    """What a comparison with a verifier found of the keys below a prefix, and what it
    does not show; with `as_json` the latter goes to stderr.
    """
    for one in proof.differences if as_json else ():
        version = {"version": one.version} if one.version else {}
        level = proof.level_of(one).name.lower()
        shown = _kind_text(proof, one.kind, one.key)
        print_json({"kind": shown, "key": one.key, **version, "level": level})
    for kind, key, _ in islice(difference_names(proof.differences), 0 if as_json else _LINES_SHOWN):
        print_line(f"{_kind_text(proof, kind, key):10} {key}")
    crossed = client.bytes_sent + client.bytes_received
    notes = _proof_notes(proof, prefix, pair.bucket.profile.properties, lists_all=pair.lists_all)
    if as_json:
        for note in notes:
            click.echo(note, err=True)
        print_json(
            {
                "equal": proof.is_equal and pair.lists_all,
                "objects": proof.objects,
                "differences": len(proof.differences),
                "inFlight": proof.in_flight,
                "bytesCrossed": crossed,
                "roundTrips": client.calls,
                "levels": {name: proof.levels[level] for name, level in LEVELS.items()},
                "oldestReadAt": time_text(proof.oldest_read_at_s),
            }
        )
        return
    if len(proof.differences) > _LINES_SHOWN:
        print_line("... and more; --json prints all")
    print_line(levels_text(proof.objects, proof.levels, proof.oldest_read_at_s))
    print_line(
        f"{size_text(crossed)} crossed in {counted(client.calls, 'call')}; the comparison"
        f" took {counted(proof.round_trips, 'trip')} and {proof.bytes_crossed} bytes"
    )
    if proof.is_equal and pair.lists_all:
        print_line(f"equal: root {proof.comparison.ours.total:032x}", style="green")
    elif proof.differences:
        kinds = Counter(_kind_text(proof, one.kind, one.key) for one in proof.differences)
        print_line(not_equal_text(len(proof.differences), kinds), style="red")
    else:
        print_line("unknown whether they are equal", style="yellow")
    for note in notes:
        print_line(note)


def _kind_text(proof: PairProof, kind: ItemDifferenceKind, key: str) -> str:
    """How an item differs, as the commands without a verifier say it."""
    return KeyDifferenceKind.DAMAGED.value if key in proof.damaged else kind.value


def _proof_notes(
    proof: PairProof, prefix: str, groups: Sequence[str], *, lists_all: bool
) -> list[str]:
    """What a comparison with a verifier does not show, in sentences."""
    notes = list[str]()
    if proof.in_flight:
        notes.append(f"{counted(proof.in_flight, 'key')} changed while they were compared.")
    if not lists_all:
        notes.append(HIDDEN_KEYS)
    if not proof.objects and not proof.in_flight:
        notes.append(nothing_text(prefix))
    elif proof.levels[EvidenceLevel.READ] < proof.objects:
        notes.append(
            "Not every object was read at both sides: damage behind a store's own index is found"
            " by --level read only."
        )
    # An item has none: they name accounts of one store.
    return [*notes, *uncompared_notes((*groups, "acl")), "ACLs were not compared."]
