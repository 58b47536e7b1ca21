"""Errors of roots, indexes and receipts."""

from merkle.errors import ReconcileError


class ReceiptChainError(ReconcileError):
    """A line is no receipt, or does not follow the chain that it should extend."""

    code = "receipt_chain_invalid"


class SigningKeyError(ReconcileError):
    """A file holds no usable signing key, or one that others may read."""

    code = "signing_key_invalid"
