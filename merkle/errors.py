"""The base of every error that Treefold raises on purpose.

An exception means that the caller does not get what it was promised. A fault that we
went looking for is a finding, a value in a report, and has no class here. `code` is
stable: it stands in logs, metrics, RPC details and JSON. `retryable` says whether the
same call may succeed later; `exit_status` is what a command that ends with this error
returns.
"""

from typing import ClassVar, Self


class ReconcileError(Exception):
    """Base of all errors raised on purpose.

    Facts given as keywords become part of the message's context and are kept in
    `facts`.
    """

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
        """The error as another process sent it; `reason` may be empty."""
        return cls(message, hint=hint, **({"reason": reason} if reason else {}))

    @classmethod
    def by_code(cls) -> dict[str, type["ReconcileError"]]:
        """Every error class with a code of its own that this process has loaded."""
        found = {cls.code: cls} if "code" in vars(cls) else {}
        for kind in cls.__subclasses__():
            found |= kind.by_code()
        return found


class RefusalError(ReconcileError):
    """Data from outside break a rule; `reason` is stable and names the rule."""

    code = "refused"

    def __init__(self, reason: str, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, reason=reason, **facts)
        self.reason = reason

    @classmethod
    def received(cls, message: str, *, hint: str, reason: str) -> Self:
        """The refusal as another process sent it."""
        return cls(reason, message, hint=hint)


class TreeRefusedError(RefusalError):
    """A tree breaks a rule: `reason` is a value of merkle.check.TreeRefusal."""

    code = "tree_refused"


class RecordInvalidError(ReconcileError):
    """A block record cannot be parsed or contradicts itself."""

    code = "record_invalid"
