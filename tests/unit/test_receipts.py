"""Receipts on disk: keys, appends, what a crash leaves, and what is refused."""

import errno
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from proof.errors import ReceiptChainError, SigningKeyError
from proof.item import EvidenceLevel
from proof.receipts import (
    HASH_BYTES,
    ChainFault,
    ChainHead,
    ReceiptChain,
    ReceiptRecord,
    create_signing_key,
    load_signing_key,
    parse_record,
    public_key_bytes,
    verify_chain,
)
from runtime.disk import Disk, Operation
from runtime.errors import DiskError
from tests.support.disk import Crash, FailingDisk, ImagingDisk, recorded_syncs
from tests.support.receipts import OUR_KEY, THEIR_KEY, TRUSTED, chain_of, receipt, side


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "receipts.jsonl"


def append(chain: ReceiptChain, count: int) -> ChainHead:
    for number in range(count):
        chain.append(chain.next_record(receipt(number)).signed_by(OUR_KEY))
    return chain.head


def test_a_chain_continues_after_it_was_opened_again(path: Path) -> None:
    append(ReceiptChain(path, Disk()), 2)
    head = append(ReceiptChain(path, Disk()), 2)
    report = verify_chain(path.read_bytes(), trusted=TRUSTED, known=head)
    assert (report.head, report.broken) == (head, None)
    assert head.records == 4


def test_an_append_syncs_the_record_before_its_newline(path: Path) -> None:
    chain = ReceiptChain(path, Disk())
    with recorded_syncs() as synced:
        append(chain, 1)
    assert synced == [path, path, path.parent]


def test_both_sides_may_sign(path: Path) -> None:
    chain = ReceiptChain(path, Disk())
    sent = chain.next_record(receipt(1)).signed_by(OUR_KEY).line
    chain.append(parse_record(sent).signed_by(THEIR_KEY))
    (line,) = path.read_bytes().splitlines()
    assert {one.key for one in parse_record(line).signatures} == TRUSTED
    assert verify_chain(path.read_bytes(), trusted=TRUSTED).broken is None


def test_a_removed_countersignature_is_found(path: Path) -> None:
    chain = ReceiptChain(path, Disk())
    chain.append(chain.next_record(receipt(0)).signed_by(OUR_KEY).signed_by(THEIR_KEY))
    head = append(chain, 1)
    _, second = path.read_bytes().splitlines(keepends=True)
    (alone,), _ = chain_of(1)
    report = verify_chain(alone + second, trusted=TRUSTED, known=head)
    assert report.broken is not None
    assert (report.head, report.broken.number) == (ChainHead(), 0)
    assert report.broken.fault is ChainFault.CHANGED


def test_a_record_without_its_signature_or_place_is_refused(path: Path) -> None:
    chain = ReceiptChain(path, Disk())
    first = chain.next_record(receipt(1)).signed_by(OUR_KEY)
    with pytest.raises(ReceiptChainError, match="not signed"):
        chain.append(chain.next_record(receipt(1)))
    chain.append(first)
    with pytest.raises(ReceiptChainError, match="is not number 1"):
        chain.append(first)
    assert path.read_bytes() == first.line + b"\n"


def test_a_receipt_never_claims_more_than_its_weakest_side() -> None:
    made = receipt(1, source=side(listed=1, recorded=5), level=EvidenceLevel.LISTED)
    assert not made.is_equal
    with pytest.raises(AssertionError):
        receipt(1, source=side(listed=1, recorded=5), level=EvidenceLevel.RECORDED)
    key = public_key_bytes(OUR_KEY).hex().encode()
    line = ReceiptRecord(0, bytes(HASH_BYTES), made).signed_by(OUR_KEY).line
    with pytest.raises(ReceiptChainError):
        parse_record(line.replace(b'"level":1', b'"level":3'))
    # No date can be shown of this time.
    beyond = line.replace(b'"time_ms":1001', b'"time_ms":' + b"9" * 18)
    for other in (line.replace(key, key.upper()), beyond, b" " + line, b"{}", b"", b"\xff"):
        with pytest.raises(ReceiptChainError):
            parse_record(other)


def test_a_broken_chain_takes_no_further_record(path: Path) -> None:
    append(ReceiptChain(path, Disk()), 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(ReceiptChainError, match=r"record 1 .* does not follow"):
        ReceiptChain(path, Disk())
    assert path.read_bytes() == lines[0] + lines[2]


def test_an_append_cut_at_any_byte_breaks_nothing(path: Path) -> None:
    before = append(ReceiptChain(path, Disk()), 2)
    earlier = path.read_bytes()
    after = append(ReceiptChain(path, Disk()), 1)
    whole = path.read_bytes()
    for length in range(len(earlier), len(whole)):
        path.write_bytes(whole[:length])
        report = verify_chain(path.read_bytes(), trusted=TRUSTED, known=before)
        assert report.head == before
        assert (report.broken is None) == (length == len(earlier))
        assert report.broken is None or report.broken.fault is ChainFault.CUT
        opened = ReceiptChain(path, Disk())
        assert opened.head == (after if length == len(whole) - 1 else before)
        assert verify_chain(path.read_bytes(), trusted=TRUSTED, known=opened.head).broken is None


def test_an_acknowledged_record_outlives_every_crash(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    disk = ImagingDisk(root, tmp_path / "images")
    chain = ReceiptChain(root / "r", disk)
    acknowledged = {0: 0}
    for number in range(3):
        chain.append(chain.next_record(receipt(number)).signed_by(OUR_KEY))
        acknowledged[len(disk.operations)] = number + 1
    images = disk.finish()
    assert {image.crash for image in images} >= {Crash.KILL, Crash.TORN, Crash.POWER_CUT}
    for image in images:
        least = max(count for at, count in acknowledged.items() if at <= image.number)
        opened = ReceiptChain(image.folder / "r", Disk())
        assert opened.head.records >= (3 if image.is_final else least), str(image)
        append(opened, 1)
        data = (image.folder / "r").read_bytes()
        assert verify_chain(data, trusted=TRUSTED, known=opened.head).broken is None, str(image)


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.SYNC, Operation.SYNC_FOLDER])
def test_after_a_failed_append_the_chain_is_opened_again(path: Path, operation: Operation) -> None:
    failing = {operation}
    chain = ReceiptChain(path, FailingDisk(errno.EIO, lambda one, _path: one in failing))
    record = chain.next_record(receipt(1)).signed_by(OUR_KEY)
    with pytest.raises(DiskError):
        chain.append(record)
    failing.clear()
    with pytest.raises(ReceiptChainError, match="unknown"):
        chain.append(record)
    append(ReceiptChain(path, Disk()), 1)
    assert verify_chain(path.read_bytes(), trusted=TRUSTED).broken is None


def test_a_key_is_private_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "receipts.pem"
    made = create_signing_key(path, Disk())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_key_bytes(load_signing_key(path, Disk())) == public_key_bytes(made)
    before = path.read_bytes()
    with pytest.raises(SigningKeyError, match="already"):
        create_signing_key(path, Disk())
    assert path.read_bytes() == before


def test_no_crash_leaves_a_key_that_others_may_read(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    disk = ImagingDisk(root, tmp_path / "images")
    create_signing_key(root / "key.pem", disk)
    seen = 0
    for folder in [root, *(image.folder for image in disk.finish() if image.crash is Crash.TORN)]:
        for path in folder.iterdir():
            seen += 1
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert seen >= 2


def test_a_key_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipts.pem"
    create_signing_key(path, Disk())
    path.chmod(0o640)
    with pytest.raises(SigningKeyError, match="others may read") as caught:
        load_signing_key(path, Disk())
    assert "chmod 600" in caught.value.hint
    path.chmod(0o600)
    agreement = X25519PrivateKey.generate()
    for data in (
        b"",
        b"not a key",
        agreement.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ):
        path.write_bytes(data)
        with pytest.raises(SigningKeyError):
            load_signing_key(path, Disk())
    with pytest.raises(DiskError):
        load_signing_key(tmp_path / "none.pem", Disk())


def test_another_signer_is_named(path: Path) -> None:
    chain = ReceiptChain(path, Disk())
    append(chain, 1)
    stranger = Ed25519PrivateKey.from_private_bytes(bytes([9] * 32))
    chain.append(chain.next_record(receipt(2)).signed_by(stranger))
    report = verify_chain(path.read_bytes(), trusted=TRUSTED)
    assert report.broken is not None
    assert (report.broken.number, report.broken.fault) == (1, ChainFault.FOREIGN_KEY)
    assert public_key_bytes(stranger).hex() in report.broken.detail
    assert report.head.records == 1
