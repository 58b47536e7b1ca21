"""A pair of buckets of which the target has a verifier."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import click

from admin.answer import check_option_address, tls_of, tls_options
from admin.bucket_pair import default_state
from proof.column_naming import difference_names
from proof.item import EvidenceLevel
from proof.naming import ItemDifference
from proof.stored_index import StoredIndex
from replicator.ledger import PairLedger
from replicator.pair import check_pair
from replicator.proving import PairProof
from replicator.refresh import IndexedBucket
from replicator.stores.address import canonical_address
from replicator.stores.opening import open_store
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.output import print_json, print_line, size_text
from runtime.progress import ProgressSink
from runtime.rate_limit import SystemClock

# Differences that are printed for people; --json has all.
_LINES_SHOWN = 50


@dataclass(frozen=True, slots=True)
class ProvenPair:
    """A source with its index, and the ledger and folder of the pair."""

    bucket: IndexedBucket
    ledger: PairLedger
    state: Path


def verifier_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--verifier` and how to reach it. The command gets a client as `verifier`,
    which is closed afterwards, or None.
    """

    @click.option(
        "--verifier",
        "address",
        metavar="HOST:PORT",
        help=(
            "The verifier beside TARGET (`treefold verifier run`): keys are compared by some bytes"
            " for each difference, and small writes cross in batches."
        ),
    )
    @tls_options("verifier")
    @wraps(command)
    def connected(
        *,
        address: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_ca: str | None,
        insecure: bool,
        **options: object,
    ) -> None:
        tls = tls_of(tls_cert, tls_key, tls_ca)
        if address is None:
            if tls is not None or insecure:
                raise UsageError("--tls-cert, --tls-key, --tls-ca and --insecure need --verifier")
            command(verifier=None, **options)
            return
        check_option_address("--verifier", address)
        client = VerifierClient(address, tls=tls, insecure=insecure)
        try:
            command(verifier=client, **options)
        finally:
            client.close()

    return connected


@contextmanager
def open_proven_pair(
    source: str, target: str, state: Path | None, client: VerifierClient, progress: ProgressSink
) -> Iterator[ProvenPair]:
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
        yield ProvenPair(IndexedBucket(store, index, said.profile, SystemClock()), ledger, folder)


def print_proof(proof: PairProof, client: VerifierClient, *, as_json: bool) -> None:
    """What a comparison with a verifier found, and what it does not show."""
    found = proof.comparison
    for one in proof.differences if as_json else ():
        version = {"version": one.version} if one.version else {}
        print_json({"kind": one.kind.value, "key": one.key, **version, "level": _level(one)})
    for kind, key, _ in islice(difference_names(proof.differences), 0 if as_json else _LINES_SHOWN):
        print_line(f"{kind.value:10} {key}")
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
