"""`treefold bucket receipts`: show and check the receipts of a pair, offline."""

import string
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import click
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from admin.bucket_pair import json_option
from admin.paths import LocalPath
from proof.errors import ReceiptChainError
from proof.lthash import sha256
from proof.receipts import (
    HASH_BYTES,
    ChainBreak,
    ChainFault,
    ChainReport,
    ReceiptRecord,
    load_signing_key,
    parse_record,
    public_key_bytes,
    verify_chain,
)
from replicator.pair_receipts import signing_key_beside
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_json, print_line, print_table

_file = click.argument(
    "path", metavar="FILE", type=LocalPath(exists=True, dir_okay=False, path_type=Path)
)


@click.group(short_help="Show and check signed outcomes, offline.")
def receipts() -> None:
    """Show and check receipts: what comparisons of two buckets found, signed.

    Each `bucket sync` and `bucket verify` that ends appends one to receipts.jsonl in
    its state folder, unless it is not known which set of keys a side holds. Each names
    the hash of the one before it.
    """


@receipts.command(short_help="Check every receipt of a file.")
@_file
@click.option(
    "--key",
    "keys",
    metavar="HEX|FILE",
    multiple=True,
    help=(
        "A key that may sign: 64 hexadecimal digits, or a PEM file. May be repeated. Default: that"
        " of receipts.key beside FILE."
    ),
)
@click.option(
    "--head",
    metavar="HASH",
    help="The head that a run has printed: it must be in the chain. Finds a missing end.",
)
@json_option
def verify(path: Path, keys: tuple[str, ...], head: str | None, as_json: bool) -> None:
    """Check every receipt of FILE: its form, its signatures and its place. Asks nobody.

    Without --head receipts that are missing at the end are not seen.

    Exit status: 0 every receipt holds, 3 one does not, which is named.
    """
    disk = Disk()
    data = disk.read(path)
    known = _hash(head) if head is not None else None
    trusted = frozenset(_key(text, disk) for text in keys) or _key_beside(path, data, disk)
    report = verify_chain(data, trusted=trusted)
    if known is not None and report.broken is None:
        report = _with_head(report, known, data)
    _print_report(report, has_head=known is not None, as_json=as_json)
    if report.broken is not None:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


@receipts.command()
@_file
@json_option
def show(path: Path, as_json: bool) -> None:
    """Print the receipts of FILE. They are not checked; see `receipts verify`.

    Exit status: 0 all were printed, 3 a line is not a receipt.
    """
    *lines, tail = Disk().read(path).split(b"\n")
    records, invalid = list[ReceiptRecord](), list[int]()
    for number, line in enumerate([*lines, *([tail] if tail else [])]):
        try:
            records.append(parse_record(line))
        except ReceiptChainError:
            invalid.append(number)
    if as_json:
        for record in records:
            print_json(_document(record))
    else:
        print_table(
            ("number", "time", "equal", "level", "items", "source", "target"),
            (_row(record) for record in records),
            numbers=("number", "items"),
            folded=("source", "target"),
        )
    for number in invalid:
        click.echo(f"line {number + 1} is not a receipt", err=True)
    if invalid:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _with_head(report: ChainReport, known: bytes, data: bytes) -> ChainReport:
    """The report, broken where no record of a sound chain has the known hash."""
    if known in (sha256(line) for line in data.split(b"\n")[:-1]):
        return report
    text = f"no record has the known head {known.hex()}: the end is missing, or was replaced"
    broken = ChainBreak(report.head.records, ChainFault.TRUNCATED, text)
    return ChainReport(report.head, broken)


def _print_report(report: ChainReport, *, has_head: bool, as_json: bool) -> None:
    broken = report.broken
    if as_json:
        fault: JsonObject | None = None
        if broken is not None:
            fault = {
                "record": broken.number,
                "fault": broken.fault.value,
                "detail": broken.detail,
            }
        document: JsonObject = {"valid": broken is None, "records": report.head.records}
        print_json({**document, "head": report.head.hash.hex(), "broken": fault})
        return
    if broken is not None:
        print_line(f"broken [{broken.fault}]: {broken.detail}", style="red")
        print_line(f"receipts that hold before it: {report.head.records}")
        return
    print_line(
        f"all receipts hold: {report.head.records}, head {report.head.hash.hex()}", style="green"
    )
    if not has_head:
        print_line("Whether receipts are missing at the end shows with --head only.")


def _document(record: ReceiptRecord) -> JsonObject:
    receipt = record.receipt
    return {
        "number": record.sequence,
        "time": _time_text(receipt.time_ms),
        "equal": receipt.is_equal,
        "level": receipt.level.name.lower(),
        **{
            name: {
                "address": side.address,
                "items": side.listed + side.recorded + side.read,
                "root": side.root.hex(),
                "setDigest": side.set_digest.hex(),
            }
            for name, side in (("source", receipt.source), ("target", receipt.target))
        },
        "keys": [one.key.hex() for one in record.signatures],
    }


def _row(record: ReceiptRecord) -> tuple[object, ...]:
    receipt = record.receipt
    source = receipt.source
    return (
        record.sequence,
        _time_text(receipt.time_ms),
        "yes" if receipt.is_equal else "no",
        receipt.level.name.lower(),
        source.listed + source.recorded + source.read,
        source.address,
        receipt.target.address,
    )


def _time_text(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _key(text: str, disk: Disk) -> bytes:
    """A public key, from its digits or a file with it or with its private part."""
    if (found := _digits(text)) is not None:
        return found
    if disk.length(Path(text)) is None:
        raise UsageError(
            f"--key: {text} is no key and no file",
            hint="Give 64 hexadecimal digits, or the path of a PEM file.",
        )
    data = disk.read(Path(text))
    if b"PRIVATE KEY" in data:
        return public_key_bytes(load_signing_key(Path(text), disk))
    if (found := _digits(data.decode("ascii", "replace").strip())) is not None:
        return found
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"--key: {text} has no key", hint="Give 64 hexadecimal digits, or a PEM file."
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"--key: the key in {text} is not of Ed25519")
    return key.public_bytes_raw()


def _key_beside(path: Path, data: bytes, disk: Disk) -> frozenset[bytes]:
    key = signing_key_beside(path)
    if disk.length(key) is None:
        signers = ", ".join(sorted(_signers(data.split(b"\n")))) or "nobody"
        raise UsageError(
            f"it is not known whose signatures count: there is no {key}",
            hint=f"Name the keys by --key, as the runs printed them. Signed is by {signers}.",
        )
    return frozenset({public_key_bytes(load_signing_key(key, disk))})


def _signers(lines: Iterable[bytes]) -> set[str]:
    found = set[str]()
    for line in lines:
        try:
            found |= {one.key.hex() for one in parse_record(line).signatures}
        except ReceiptChainError:
            continue
    return found


def _hash(text: str) -> bytes:
    found = _digits(text)
    if found is None:
        raise UsageError(f"--head: {text!r} is not a hash of 64 hexadecimal digits")
    return found


def _digits(text: str) -> bytes | None:
    is_hex = len(text) == 2 * HASH_BYTES and set(text) <= set(string.hexdigits)
    return bytes.fromhex(text) if is_hex else None
