"""The agent's audit file: each write into replica data, each deletion, each replica
that returns to service, each job with its reason, and each refusal.

A line is synced to disk before its write is reported, and before its deletion or return
begins. Every change of replica data or state therefore has a line. The lines are a
chain (runtime.audit_chain).
"""

from collections.abc import Mapping, Sequence

from merkle.outcome import RepairOutcome
from merkle.tree import root_hex
from runtime.audit_chain import AuditFile
from runtime.json_numbers import exact


class AuditLog(AuditFile):
    """Records what an agent does. Thread-safe."""

    def write(
        self,
        *,
        container: int,
        block: int,
        offset: int,
        length: int,
        source: str,
        job: str,
        unread: int = 0,
    ) -> None:
        """Record one write of `length` bytes at byte `offset` of the block's file,
        copied from the peer `source`.

        `unread` of the overwritten bytes could not be read and are in no undo copy; the
        line has this field only if it is not 0.

        Raises:
            DiskError: the line is not on disk; its write must not be reported as done.
        """
        place = {"kind": "write", "container": container, "block": exact(block), "offset": offset}
        copied = {"length": length, "source": source, "job": job}
        self.append([{**place, **copied, **({"unread": unread} if unread else {})}])

    def delete(self, container: int, blocks: Sequence[int] | None) -> None:
        """Record that blocks are about to be deleted, or marked as deleted in the tree;
        with None, the whole container.

        Raises:
            DiskError: the lines are not on disk; the delete must not be done.
        """
        unused = {"offset": None, "length": 0, "source": "", "job": ""}
        self.append(
            [
                {"kind": "delete", "container": container, "block": exact(block), **unused}
                for block in ([None] if blocks is None else blocks)
            ]
        )

    def return_to_service(self, container: int, state: str, job: str) -> None:
        """Record that an UNHEALTHY replica is about to return to service in `state`.

        Raises:
            DiskError: the line is not on disk; the replica must stay as it is.
        """
        place = {"container": container, "block": None, "offset": None, "length": 0}
        self.append([{"kind": "return", **place, "source": "", "job": job, "state": state}])

    def begin(
        self,
        kind: str,
        *,
        container: int,
        job: str,
        who: str,
        why: str,
        root: int | None,
        **facts: object,
    ) -> None:
        """Record that a job (`kind` "reconcile" or "undo") is about to begin, who
        ordered it and why, and the root of our replica before; None if it has none.

        Raises:
            DiskError: the line is not on disk; the job must not begin.
        """
        named = {"kind": kind, "container": container, "job": job, "who": who, "why": why}
        self.append([{**named, "root": _root_text(root), **facts}])

    def end(
        self,
        *,
        container: int,
        job: str,
        state: str,
        root: int | None,
        facts: Mapping[str, object],
    ) -> None:
        """Record how a job ended, and the root of our replica then. `facts` are what it
        decided and did.

        Raises:
            DiskError: the line is not on disk.
        """
        named = {"kind": "end", "container": container, "job": job, "state": state}
        self.append([{**named, "root": _root_text(root), **facts}])


def outcome_facts(outcome: RepairOutcome) -> dict[str, object]:
    """What the audit file says of the outcome of a reconciliation."""
    progress = outcome.progress
    return {
        "verdict": outcome.verdict.value if outcome.verdict else None,
        "windows_written": progress.windows_written,
        "bytes_written": progress.bytes_written,
        "chunks_repaired": progress.chunks_repaired,
        "blocks_added": progress.blocks_added,
        "tombstones_adopted": progress.tombstones_adopted,
        "replica_state": outcome.replica_state.value if outcome.replica_state else None,
        "error": outcome.error_code,
        "why": outcome.message,
    }


def _root_text(root: int | None) -> str | None:
    return None if root is None else root_hex(root)
