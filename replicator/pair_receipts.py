"""The receipts of a pair of buckets, in its state folder.

`receipts.jsonl` is the chain, which the first comparison that ends begins.
`receipts.key` is the key that signs it. The caller holds the lock of the folder.
"""

from pathlib import Path

from proof.receipts import (
    ChainHead,
    Receipt,
    ReceiptChain,
    create_signing_key,
    load_signing_key,
    public_key_bytes,
)
from runtime.disk import Disk

_RECEIPTS_FILE = "receipts.jsonl"
_SIGNING_KEY_FILE = "receipts.key"


class PairReceipts:
    """The chain of one pair; `public_key` (32 bytes) proves its signatures."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Open the chain and its key, or begin both.

        Raises:
            ReceiptChainError: the records do not follow each other.
            SigningKeyError: the key cannot be used.
            DiskError: a file cannot be read or written.
        """
        self.path = folder / _RECEIPTS_FILE
        key_path = folder / _SIGNING_KEY_FILE
        self._chain = ReceiptChain(self.path, disk)
        is_new = disk.length(key_path) is None
        make = create_signing_key if is_new else load_signing_key
        self._key = make(key_path, disk)
        self.public_key = public_key_bytes(self._key)

    def append(self, receipt: Receipt) -> ChainHead:
        """Sign a receipt and append it; durable on return.

        Raises:
            DiskError: it is unknown whether the receipt is in the file.
        """
        return self._chain.append(self._chain.next_record(receipt).signed_by(self._key))


def signing_key_beside(path: Path) -> Path:
    """Where the key of a chain file lies in its state folder."""
    return path.with_name(_SIGNING_KEY_FILE)
