"""What a caller of the controller's service may meet."""

from collections.abc import Sequence
from typing import TypeVar

from merkle.errors import ReconcileError

_NAMED_MAX = 10

IdT = TypeVar("IdT", bound=str)


class ControllerUnavailableError(ReconcileError):
    """The controller did not answer."""

    code = "controller_unavailable"
    retryable = True
    exit_status = 7


class JobNotFoundError(ReconcileError):
    """There is no such job."""

    code = "job_not_found"


class AmbiguousIdError(ReconcileError):
    """The beginning of an ID fits several; the message has them."""

    code = "ambiguous_id"
    exit_status = 2


def unambiguous(given: str, found: Sequence[IdT], what: str) -> IdT:
    """The only ID that begins as `given`; `found` are all that do, at least one.

    Raises:
        AmbiguousIdError: there are several.
    """
    if len(found) == 1:
        return found[0]
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    raise AmbiguousIdError(
        f"{given} is the beginning of several {what}: {', '.join(found[:_NAMED_MAX])}{more}",
        hint="Give more of it.",
    )
