"""Errors of comparing buckets, of their indexes and receipts."""

from enum import StrEnum

from merkle.errors import ReconcileError, RefusalError


class ProfileDiffersError(ReconcileError):
    """The two sides would give one item different IDs: their profiles or secrets
    differ.
    """

    code = "profile_differs"
    exit_status = 6


class JournalTrimmedError(ReconcileError):
    """The journal no longer reaches back to the position that was asked for."""

    code = "journal_trimmed"
    retryable = True


class CutUnknownError(ReconcileError):
    """A cut names a position that this journal has not reached yet, or never had."""

    code = "cut_unknown"
    retryable = True


class NotCertifiedError(ReconcileError):
    """The differences found do not add up to the difference of the roots: an index or
    the other side is wrong. Nothing found may be used.
    """

    code = "not_certified"


class ComparisonLimitError(ReconcileError):
    """A comparison would pass a limit of its size: symbols, items or trips."""

    code = "comparison_limit"


class TooManyDifferencesError(ComparisonLimitError):
    """A range has more differences than one comparison was to find: compare its parts.
    The facts `ours` and `theirs` count the items, `estimate` about the differences.
    """

    code = "too_many_differences"


class ReceiptChainError(ReconcileError):
    """A line is no receipt, or does not follow the chain that it should extend."""

    code = "receipt_chain_invalid"


class SigningKeyError(ReconcileError):
    """A file holds no usable signing key, or one that others may read."""

    code = "signing_key_invalid"


class IndexDamagedError(ReconcileError):
    """An index contradicts itself: its file was changed from outside, or a disk failed.
    It is rebuilt from a listing.
    """

    code = "index_damaged"


class RebuildLimitError(ReconcileError):
    """More keys changed during the rebuild of an index than it can take over."""

    code = "rebuild_limit"
    retryable = True


class IndexRefusal(StrEnum):
    """Why a file or folder cannot be used as this index."""

    NOT_AN_INDEX = "not_an_index"
    NEWER_SCHEMA = "newer_schema"
    OTHER_PROFILE = "other_profile"


class IndexRefusedError(RefusalError):
    """A folder or file cannot be used as this index; `reason` is a value of
    `IndexRefusal`.
    """

    code = "index_refused"
    exit_status = 6


class SpansInvalidError(ReconcileError):
    """The stored sums of spans are damaged; they can be made again from the items."""

    code = "spans_invalid"


class ListingInvalidError(ReconcileError):
    """A listing that an index was to be built from cannot be read, is not what its
    manifest says, or says too little.
    """

    code = "listing_invalid"
