"""What one repair was told, and what it may therefore do with its replica's commit and
state.

A `RunWitness` hears every event that the repair hears. It keeps the trees of the latest
round and the highest commit of any record, and judges the requests that promise
something about the whole replica: a block's commit, the container's commit, the return
to service. It looks at trees and bytes, never at what the repair thinks has failed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from merkle.replica import PeerId
from merkle.tree import BlockId, ChunkTree, ContainerTree
from merkle.windows import is_sound
from repair.requests import (
    AdvanceBcsId,
    BlockStored,
    Event,
    FetchTree,
    LocalRequest,
    OwnLoaded,
    OwnRecords,
    PutBlock,
    RecordsArrived,
    Request,
    ReturnToService,
    Scanned,
    TreeArrived,
    WindowsWritten,
)
from tests.support.memory import RepairableReplica
from tests.support.observer import Written, has_bytes, hold, is_whole
from tests.support.trace import Subject

_Entries = Mapping[tuple[BlockId, int], ChunkTree]


@dataclass(slots=True, eq=False)
class RunWitness:
    """What one repair was told so far; `faulted` are blocks whose bytes changed under
    it.
    """

    peers: Collection[PeerId]
    own: ContainerTree | None = None
    trees: dict[PeerId, ContainerTree] = field(default_factory=dict)
    # The highest commit of the container here, or of a record here or at a peer.
    commit_seen: int = 0
    # A scan found nothing, and nothing was written after it.
    is_scanned_clean: bool = False

    def hears(self, event: Event) -> None:
        """The repair is about to take in an event."""
        match event:
            case OwnLoaded():
                self.own = self.own or event.tree
                seen = self.commit_seen, event.bcs_id, event.recorded_bcs_id or 0
                self.commit_seen = max(seen)
            case TreeArrived(peer, tree):
                self.trees[peer] = tree
            case OwnRecords(records) | RecordsArrived(_, records):
                commits = (record.bcs_id for record in records.values())
                self.commit_seen = max(self.commit_seen, *commits, 0)
            case Scanned():
                if self.own is None or self.own.data_checksum is None:
                    self.own = event.tree
                self.is_scanned_clean = not event.findings
            case WindowsWritten() | BlockStored():
                self.is_scanned_clean = False
            case _:
                pass

    def asked(self, requests: Collection[Request]) -> None:
        """The repair has asked for something: with all trees another round begins."""
        if any(isinstance(request, FetchTree) for request in requests):
            self.own = None
            self.trees.clear()

    def judge(
        self,
        request: LocalRequest,
        replica: RepairableReplica,
        *,
        written: Written,
        faulted: Collection[BlockId],
    ) -> None:
        """Hold a request against all that was told; the replica is as it was before.

        inv-I7 for commits, CR-001 for the return to service.
        """
        stored = replica.stored
        subject = Subject(stored.container_id)
        match request:
            case PutBlock(record):
                before = stored.records.get(record.block_id)
                if record.bcs_id <= (before.bcs_id if before else 0):
                    return
                # Such a block has every chunk of its peer, and each is whole.
                for block_id, offset in self._lacked(replica, written, faulted):
                    text = f"block {block_id} takes a commit without its chunk at {offset}"
                    other = block_id != record.block_id
                    whole = has_bytes(stored, written, block_id, offset)
                    listed = whole and offset in record.by_offset
                    hold(other or listed, text, "inv-I7", Subject(stored.container_id, block_id))
            case AdvanceBcsId(bcs_id):
                if bcs_id <= stored.bcs_id:
                    return
                text = f"{replica.name} takes commit {bcs_id}, which no record has"
                hold(bcs_id <= self.commit_seen, text, "inv-I7", subject)
                self._hold_complete(replica, written, faulted, f"takes commit {bcs_id}")
            case ReturnToService():
                text = f"{replica.name} returns to service unscanned"
                hold(self.is_scanned_clean, text, "CR-001", subject)
                text = f"{replica.name} returns to service behind commit {self.commit_seen}"
                hold(stored.bcs_id >= self.commit_seen, text, "CR-001", subject)
                text = f"{replica.name} returns to service without a word of all peers"
                hold(self.trees.keys() == set(self.peers), text, "CR-001", subject)
                self._hold_complete(replica, written, faulted, "returns to service")
            case _:
                pass

    def _hold_complete(
        self,
        replica: RepairableReplica,
        written: Written,
        faulted: Collection[BlockId],
        act: str,
    ) -> None:
        lacked = self._lacked(replica, written, faulted, corrupt_too=True)
        for block_id, offset in lacked:
            # Its delete is recorded here, so every write to it is refused (inv-I5):
            # it is gone for this replica, though its tombstone is not in the tree yet.
            if block_id in replica.pending_deletes:
                continue
            text = f"{replica.name} {act} without the chunk of block {block_id} at {offset}"
            subject = Subject(replica.stored.container_id, block_id)
            hold(is_whole(replica.stored, written, block_id, offset), text, "inv-I7", subject)

    def _lacked(
        self,
        replica: RepairableReplica,
        written: Written,
        faulted: Collection[BlockId],
        *,
        corrupt_too: bool = False,
    ) -> Iterator[tuple[BlockId, int]]:
        """The chunks that our tree lacked, or called corrupt, when the round began, and
        that a peer's tree called healthy; with `corrupt_too` also those that none did.

        Not those of blocks that a tree calls deleted, or that a fault hit meanwhile;
        nor those that peers describe differently: one of them lies.
        """
        ours = _entries(self.own)
        deleted = {
            block.block_id
            for tree in (self.own, *self.trees.values())
            for block in (tree.blocks if tree else ())
            if block.deleted
        }
        found: dict[tuple[BlockId, int], set[tuple[int, int]]] = {}
        for tree in self.trees.values():
            for place, chunk in _entries(tree).items():
                if chunk.checksum_matches:
                    said = chunk.length_bytes, chunk.data_checksum
                    found.setdefault(place, set()).add(said)
        for place, chunk in ours.items() if corrupt_too else ():
            if not chunk.checksum_matches:
                found.setdefault(place, set())
        for (block_id, offset), told in sorted(found.items()):
            mine = ours.get((block_id, offset))
            if mine is not None and mine.checksum_matches:
                continue
            true = written[block_id][0].by_offset.get(offset)
            if true is None or not is_sound(true):
                continue
            if not told <= {(true.length_bytes, true.data_checksum)}:
                continue
            if block_id in deleted | replica.remembered.keys() or block_id in faulted:
                continue
            yield block_id, offset


def _entries(tree: ContainerTree | None) -> _Entries:
    return {
        (block.block_id, chunk.offset): chunk
        for block in (tree.blocks if tree else ())
        for chunk in block.chunks
    }
