"""A pair of buckets of which the target has a verifier."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from admin.bucket_pair import append_receipt, default_state
from proof.item import EvidenceLevel
from proof.naming import ItemDifference
from proof.stored_index import StoredIndex
from replicator.ledger import PairLedger
from replicator.pair import check_pair
from replicator.proven_receipt import proven_receipt
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProof, PairProver
from replicator.refresh import IndexedBucket
from replicator.stores.address import canonical_address
from replicator.stores.opening import open_store
from replicator.sync import SyncOptions
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import print_json, print_line, size_text
from runtime.progress import ProgressSink
from runtime.rate_limit import SystemClock

# Differences that are printed for people; --json has all.
_LINES_SHOWN = 50


@dataclass(frozen=True, slots=True)
class _ProvenPair:
    """A source with its index, and the ledger and folder of the pair."""

    bucket: IndexedBucket
    ledger: PairLedger
    state: Path


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


def prove(
    source: str,
    target: str,
    state: Path | None,
    verifier: VerifierClient,
    level: EvidenceLevel,
    prefix: str,
    progress: ProgressSink,
    *,
    as_json: bool,
) -> None:
    """Compare by the indexes of both sides, which each side brings up to date, and
    print what was found.

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
    read_since_s = clock.now_ms() // 1000 if level is EvidenceLevel.READ else 0
    with _open_proven_pair(source, target, state, verifier, progress) as pair:
        prover = PairProver(pair.bucket, verifier, prefix=prefix, stopped=lambda: False)
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
        append_receipt(pair.state, receipt, progress)
        _print_proof(proof, verifier, as_json=as_json)
    if proof.differences:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if not proof.is_equal:
        raise click.exceptions.Exit(ExitCode.PARTLY)


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
    check_pair(source, target)
    said = client.describe()
    if _bucket_of(said.address) != _bucket_of(target):
        raise UsageError(
            f"the verifier at {client.address} is of {said.address}, not of {target}",
            hint="Name its bucket as TARGET, or another verifier.",
        )
    progress.note(f"verifier {client.address}: beside {said.address}")
    folder = (state or default_state(source, target)).absolute()
    with ExitStack() as opened:
        store = opened.enter_context(open_store(source, may_write=False))
        ledger = PairLedger(folder, source=source, target=target)
        opened.callback(ledger.close)
        # A verifier with another secret gives other IDs: its index is another one.
        name = f"index-{said.profile.digest.hex()}"
        index = StoredIndex(folder / name, said.profile, disk=Disk())
        opened.callback(index.close)
        yield _ProvenPair(IndexedBucket(store, index, said.profile, SystemClock()), ledger, folder)


def _print_proof(proof: PairProof, client: VerifierClient, *, as_json: bool) -> None:
    """What a comparison with a verifier found, and what it does not show."""
    found = proof.comparison
    for number, one in enumerate(proof.differences):
        if as_json:
            version = {"version": one.version} if one.version else {}
            print_json({"kind": one.kind.value, "key": one.key, **version, "level": _level(one)})
        elif number < _LINES_SHOWN:
            print_line(f"{one.kind.value:10} {one.key}")
    crossed = client.bytes_sent + client.bytes_received
    listed = max(found.ours_evidence.listed, found.theirs_evidence.listed)
    read = min(found.ours_evidence.read, found.theirs_evidence.read)
    known = max(found.ours.count - listed, 0)
    levels = {"listed": listed, "recorded": max(known - read, 0), "read": min(read, known)}
    if as_json:
        print_json(
            {
                "equal": proof.is_equal,
                "objects": found.ours.count,
                "differences": len(proof.differences),
                "bytesCrossed": crossed,
                "roundTrips": client.calls,
                "levels": levels,
            }
        )
        return
    if len(proof.differences) > _LINES_SHOWN:
        print_line("... and more; --json prints all")
    print_line(
        f"{found.ours.count} objects at the source, {found.theirs.count} at the target; of both"
        f" sides at least {levels['read']} read, {levels['recorded']} by recorded hashes, and at"
        f" most {levels['listed']} by listing"
    )
    print_line(
        f"{size_text(crossed)} crossed in {client.calls} calls; the comparison took"
        f" {proof.round_trips} trips and {proof.bytes_crossed} bytes"
    )
    if proof.in_flight:
        print_line(f"{proof.in_flight} differences are in flight: what they are is not known yet")
    if proof.is_equal:
        print_line(f"equal: root {found.ours.total:032x}", style="green")
    elif proof.differences:
        print_line(f"not equal: {len(proof.differences)} differences", style="red")
    else:
        print_line("unknown whether they are equal", style="yellow")
    if levels["read"] < found.ours.count:
        print_line("Damage behind a store's own index is found by --level read only.")


def _level(difference: ItemDifference) -> str:
    sides = [
        side.evidence.level for side in (difference.ours, difference.theirs) if side is not None
    ]
    return min(sides, default=EvidenceLevel.LISTED).name.lower()


def _bucket_of(address: str) -> tuple[str, ...]:
    """Which bucket an address names, whatever the endpoint that it is reached by."""
    address = canonical_address(address)
    if address.startswith("local:"):
        return (address,)
    parts = urlsplit(address)
    return (parts.scheme, parts.netloc, parts.path.strip("/"))
