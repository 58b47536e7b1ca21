"""The verifier's audit file: who wrote, patched and deleted what in its bucket, and
what was refused. A line is on disk before what it records is done.
"""

from collections.abc import Sequence

from replicator.verifier.values import KeyWrite, PatchOrder, RangePatch, Write
from runtime.audit_chain import AuditFile


class VerifierAudit(AuditFile):
    """Records what a verifier does for others. Thread-safe."""

    def put(self, who: str, batch: int, writes: Sequence[Write]) -> None:
        """Record that a batch of writes is about to be applied.

        Raises:
            DiskError: the line is not on disk; the batch must not be applied.
        """
        keys = sorted(write.key for write in writes)
        self.append(
            [
                {
                    "kind": "put",
                    "who": who,
                    "batch": batch,
                    "objects": len(keys),
                    "replaced": sum(write.replaced_id is not None for write in writes),
                    "bytes": sum(len(write.body or b"") for write in writes),
                    "first": keys[0] if keys else "",
                    "last": keys[-1] if keys else "",
                }
            ]
        )

    def write_keys(self, who: str, writes: Sequence[KeyWrite]) -> None:
        """Record that changes of keys are about to be applied.

        Raises:
            DiskError: the lines are not on disk; nothing may be applied.
        """
        kept = sorted((write for write in writes if not write.deletes), key=lambda one: one.key)
        if kept:
            replaced = [one for one in kept if one.replaced is not None or one.condition.etag]
            size = sum(len(write.body or b"") for write in kept)
            named = {"first": kept[0].key, "last": kept[-1].key}
            counts = {"objects": len(kept), "replaced": len(replaced), "bytes": size}
            self.append([{"kind": "put", "who": who, **counts, **named}])
        deleted = [write.key for write in writes if write.deletes]
        if deleted:
            self.delete(who, deleted)

    def patch(self, who: str, order: PatchOrder, patches: Sequence[RangePatch]) -> None:
        """Record that ranges of an object are about to be replaced.

        Raises:
            DiskError: the line is not on disk; the object must stay as it is.
        """
        size = sum(len(patch.data) for patch in patches)
        changed = {"key": order.key, "ranges": len(patches), "bytes": size}
        self.append([{"kind": "patch", "who": who, **changed}])

    def delete(self, who: str, keys: Sequence[str]) -> None:
        """Record that these objects are about to be deleted.

        Raises:
            DiskError: the lines are not on disk; nothing may be deleted.
        """
        self.append([{"kind": "delete", "who": who, "key": key} for key in keys])
