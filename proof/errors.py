"""Errors of comparing buckets and of their indexes."""

from merkle.errors import ReconcileError


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


class SpansInvalidError(ReconcileError):
    """The stored sums of spans are damaged; they can be made again from the items."""

    code = "spans_invalid"
