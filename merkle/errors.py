"""Base classes of Treefold's errors.

An exception means that the caller does not get what it was promised. A fault that a
scan or a comparison looks for is a finding, a value in a report, and not an exception.

`code` is stable and appears in logs, metrics, RPC details and JSON. `retryable` is true
if the same call may succeed later. `exit_status` is the exit status of a command that
ends with this error.
"""

from typing import ClassVar, Self


class ReconcileError(Exception):
    """Base of all errors that Treefold raises itself; `facts` holds the keywords."""

    code: ClassVar[str] = "failed"
    retryable: ClassVar[bool] = False
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    @classmethod
    def received(cls, message: str, *, hint: str, reason: str) -> Self:
        """The error that another process sent; `reason` may be empty."""
        return cls(message, hint=hint, **({"reason": reason} if reason else {}))

    @classmethod
    def by_code(cls) -> dict[str, type["ReconcileError"]]:
        """The error classes loaded in this process that define a `code`, by code."""
        found = {cls.code: cls} if "code" in vars(cls) else {}
        for kind in cls.__subclasses__():
            found |= kind.by_code()
        return found


class RefusalError(ReconcileError):
    """External data breaks a rule; `reason` is stable and names the rule."""

    code = "refused"

    def __init__(self, reason: str, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, reason=reason, **facts)
        self.reason = reason

    @classmethod
    def received(cls, message: str, *, hint: str, reason: str) -> Self:
        """The refusal that another process sent."""
        return cls(reason, message, hint=hint)


class TreeRefusedError(RefusalError):
    """A tree breaks a rule: `reason` is a value of merkle.check.TreeRefusal."""

    code = "tree_refused"


class RecordInvalidError(ReconcileError):
    """A block record cannot be parsed or contradicts itself."""

    code = "record_invalid"
