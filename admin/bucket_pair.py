"""The two stores and the state folder of a `treefold bucket` command."""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from admin.paths import LocalPath, state_home
from proof.item import EvidenceLevel
from proof.receipts import Receipt
from replicator.hashing import blake3_of
from replicator.ledger import PairLedger
from replicator.pair import check_pair
from replicator.pair_receipts import PairReceipts
from replicator.stores.address import (
    LocalAddress,
    canonical_address,
    check_outside,
    parse_address,
)
from replicator.stores.opening import effective_address, open_store
from replicator.stores.port import Store
from replicator.verify import BucketVerification
from runtime.disk import Disk
from runtime.output import print_line
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff

json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, a line each.")
prefix_option = click.option(
    "--prefix", metavar="P", default="", help="Only keys that begin with P, at both sides."
)
state_option = click.option(
    "--state",
    metavar="DIR",
    type=LocalPath(file_okay=False, path_type=Path),
    help=(
        "The folder of what earlier runs of this pair recorded, and of its receipts. Default: one"
        " for each pair below ~/.local/state/treefold/buckets."
    ),
)


@dataclass(frozen=True, slots=True)
class OpenPair:
    """Two open stores, and what earlier runs recorded of them. `state` is None where
    nothing is to be kept.
    """

    source: Store
    target: Store
    ledger: PairLedger
    state: Path | None


def check_addresses(source: str, target: str) -> None:
    """Check that two addresses are not one bucket, nor one inside the other, with the
    endpoints that the environment and profiles give them.

    Raises:
        PairRefusedError: they are.
        UsageError, ConfigError: an address is invalid, or names an unknown profile.
    """
    check_pair(source, target)
    check_pair(
        effective_address(source),
        effective_address(target),
    )


@contextmanager
def open_pair(
    source: str, target: str, state: Path | None, *, may_write: bool, is_trial: bool = False
) -> Iterator[OpenPair]:
    """Open both stores and the state folder, which is locked until the end. With
    `may_write` a local target is created if there is none; a trial leaves nothing that
    was not there before.

    Raises:
        UsageError: an address is invalid.
        PairRefusedError: source and target overlap.
        ConfigError: there are no credentials, or the state is that of another pair.
        BusyError: another process uses the state folder.
        StoreError: there is no such bucket, or a store did not answer.
        DatabaseError, DiskError: the state cannot be used.
    """
    source, target = canonical_address(source), canonical_address(target)
    check_addresses(source, target)
    folder = state_folder(state, source, target)
    is_known = PairLedger.exists_in(folder)
    with ExitStack() as opened:
        ours = opened.enter_context(open_store(source, may_write=False))
        if is_trial and not is_known:
            kept, folder = None, Path(opened.enter_context(_scratch_folder()))
        else:
            kept = folder

        def open_ledger() -> PairLedger:
            ledger = PairLedger(folder, source=source, target=target)
            opened.callback(ledger.close)
            return ledger

        # What is wrong with one must not have created the other.
        if is_known or (may_write and is_missing(target)):
            ledger = open_ledger()
            theirs = opened.enter_context(
                open_target(target, may_write=may_write, is_trial=is_trial)
            )
        else:
            theirs = opened.enter_context(
                open_target(target, may_write=may_write, is_trial=is_trial)
            )
            ledger = open_ledger()
        yield OpenPair(ours, theirs, ledger, kept)


def verification_of(
    pair: OpenPair, level: EvidenceLevel, readers: Executor, stop: threading.Event
) -> BucketVerification:
    """A verification of an open pair, which ends early once `stop` is set."""

    def wait(seconds: float) -> None:
        stop.wait(seconds)

    return BucketVerification(
        pair.source,
        pair.target,
        pair.ledger,
        level=level,
        readers=readers,
        clock=SystemClock(),
        sleep=wait,
        backoff=Backoff(),
        is_cancelled=stop.is_set,
    )


@contextmanager
def open_target(address: str, *, may_write: bool, is_trial: bool) -> Iterator[Store]:
    """The target's store. In a trial a local bucket that would be created is an empty
    one, which is removed at the end.

    Raises:
        StoreError, ConfigError, UsageError, DiskError: as `open_store`.
    """
    if not is_trial or not is_missing(address):
        with open_store(address, may_write=may_write, create=may_write) as store:
            yield store
        return
    with (
        _scratch_folder() as folder,
        open_store(f"local:{folder}", may_write=True, create=True) as store,
    ):
        yield replace(store, address=canonical_address(address))


def is_missing(address: str) -> bool:
    """Whether a sync to this address would create a local bucket."""
    match parse_address(address):
        case LocalAddress(folder):
            return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
        case _:
            return False


def open_receipts(state: Path | None) -> PairReceipts | None:
    """The receipts of a state folder, opened before the work that they are for: a
    damaged chain is refused before anything is copied. None where nothing is kept.

    Raises:
        ReceiptChainError, SigningKeyError: the receipts of the folder are damaged.
        DiskError: they cannot be read or written.
    """
    return None if state is None else PairReceipts(state, Disk())


def append_receipt(receipts: PairReceipts | None, receipt: Receipt | None) -> None:
    """Sign what a comparison found, and append it to the receipts of the pair.

    Raises:
        DiskError: it cannot be written.
    """
    if receipt is None:
        text = "no receipt: it is not known which set of keys a side holds"
        print_line(text, stderr=True)
    elif receipts is not None:
        head = receipts.append(receipt)
        print_line(
            f"receipt {head.records} in {receipts.path}: head {head.hash.hex()},"
            f" key {receipts.public_key.hex()}",
            stderr=True,
        )


def _scratch_folder() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="treefold-")


def state_folder(state: Path | None, source: str, target: str) -> Path:
    """The state folder of two canonical addresses: `state`, or one of their own.

    Raises:
        UsageError: it is inside one of the buckets.
    """
    folder = (state or _default_state(source, target)).absolute()
    for address in (source, target):
        check_outside(folder, address)
    return folder


def _default_state(source: str, target: str) -> Path:
    pair = blake3_of(f"{source}\n{target}".encode()).hex()[:16]
    return state_home() / "buckets" / pair
