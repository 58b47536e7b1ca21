"""Carry out what was decided for one key, and record it."""

from collections.abc import Callable
from typing import TypeAlias

from replicator.assumed_acls import AssumedAcls
from replicator.copier import Copier
from replicator.copy import copy_object
from replicator.copy_requests import CopyResult, Steps
from replicator.copy_task import CopyLimits, CopyTask
from replicator.crossing import Crossing
from replicator.difference import Action
from replicator.ledger import LedgerRow, PairLedger
from replicator.origin import OriginMarks
from replicator.patch import patch_object, put_properties
from replicator.stores.port import ObjectFacts, Store

# Takes the facts of the source's object and of the target's.
PatchObject: TypeAlias = Callable[[ObjectFacts, ObjectFacts], CopyResult | None]


class KeyCopier:
    """Copies, patches and describes single keys of one pair. Thread-safe."""

    def __init__(
        self,
        target: Store,
        ledger: PairLedger,
        copier: Copier,
        *,
        crossing: Crossing,
        limits: CopyLimits,
        origins: OriginMarks | None = None,
        patch: PatchObject | None = None,
        acls: AssumedAcls | None = None,
    ) -> None:
        """`copier` is one to this target. `origins` marks what is copied. `patch` may
        make the target's object that of the source, given the facts of both, with fewer
        bytes; None where it does not. `acls` says of which objects the ACL is not read.
        """
        self._target = target
        self._ledger = ledger
        self._copier = copier
        self._crossing = crossing
        self._limits = limits
        self._origins = origins
        self._patch = patch
        self._acls = acls

    @property
    def part_bytes(self) -> int:
        """Larger objects are sent in parts."""
        return self._limits.part_bytes

    def carry_out(
        self,
        action: Action,
        source: ObjectFacts,
        target: ObjectFacts | None,
        row: LedgerRow | None,
    ) -> CopyResult | None:
        """Bring a key to the target, where it is as `target` says, and record it in the
        ledger, which has this `row` of it; None if the source has it no more.

        Raises:
            StoreError: it was not brought there.
            OperationInterruptedError: it was interrupted.
        """
        result = None
        if self._patch is not None and target is not None and action is not Action.PROPERTIES:
            result = self._patch(source, target)
        if result is None:
            result = self._copier.run(self._steps(action, source, target, row))
        if result is not None:
            self._ledger.save_copy(result)
            if self._acls is not None:
                # Then: whoever reads it looks for its row.
                self._acls.note(result)
        return result

    def _steps(
        self,
        action: Action,
        source: ObjectFacts,
        target: ObjectFacts | None,
        row: LedgerRow | None,
    ) -> Steps[CopyResult | None]:
        if row is not None and (target is None or not row.target.agrees(target)):
            row = None
        windows = None
        if row is not None and action is not Action.COPY:
            windows = self._ledger.windows(source.key, row.target.size_bytes)
        task = CopyTask(
            source=source,
            target=target,
            capabilities=self._target.capabilities,
            crossing=self._crossing,
            window_key=self._ledger.secret,
            limits=self._limits,
            source_etags_prove=self._copier.source_etags_prove,
            source_records_hashes=self._copier.source_records_hashes,
            sends_pieces=self._target.piece_writer is not None,
            upload=self._ledger.upload(source.key),
            windows=windows,
            content=row.hashes if row is not None else (),
            properties=row.properties if row is not None else b"",
            origins=self._origins,
            reads_acl=self._crossing.acl and not (self._acls and self._acls.may_assume),
        )
        if action is Action.PROPERTIES:
            return put_properties(task)
        return copy_object(task) if windows is None else patch_object(task)
