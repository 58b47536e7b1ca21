"""A running cluster in memory that a rescue can join: its datanodes reconcile as Ozone
2.2 does, from every replica that SCM lists.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId
from merkle.windows import bad_windows
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from protos.convert import tree_from_bytes
from runtime.rpc import Deadlines, open_channel
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import MemoryReplica


@dataclass
class RescueTwin:
    """The cluster."""

    live: LiveTwin
    reconciles: int = 0
    # Requests for chunks that a peer refused or answered with other bytes.
    refused: list[str] = field(default_factory=list)

    def damage(self, container_id: int, datanode: int, block_id: int, *offsets: int) -> None:
        """Flip bits of one replica; its scanner finds them, and SCM hears of it."""
        found = self.live.sources[datanode - 1].replicas[ContainerId(container_id)]
        for offset in offsets:
            found.flip(block_id, offset)
        self.scan(found)
        self.live.report(container_id)

    def scan(self, found: MemoryReplica) -> None:
        tree = found.scanned_tree()
        if not all(chunk.checksum_matches for block in tree.blocks for chunk in block.chunks):
            found.state = ReplicaState.UNHEALTHY
        found.tree = encode_tree(tree)

    def reconcile(self, container_id: ContainerId) -> None:
        """What each datanode does with SCM's order: per peer it fetches the tree, the
        record of each block that it holds damaged and the peer healthy, and the chunks.
        """
        self.reconciles += 1
        scm = self.live.scm
        addresses = {node.peer: node.address for node in scm.nodes}
        listed = [one.peer for one in scm.replicas[container_id]]
        for peer, source in zip(PEERS, self.live.sources, strict=True):
            found = source.replicas[container_id]
            for other in listed:
                if other != peer:
                    with suppress(ReconcileError):
                        self._pull(found, addresses[other])
            self.scan(found)
        self.live.report(container_id)

    def _pull(self, ours: MemoryReplica, address: str) -> None:
        number = ours.container_id
        deadlines = Deadlines(tree_s=5, records_s=5, read_s=5)
        client = DatanodeClient(open_channel(address), address, deadlines=deadlines)
        try:
            theirs = tree_from_bytes(client.tree_bytes(number), number)
            for block in ours.scanned_tree().blocks:
                found = theirs.block(block.block_id)
                chunks = found.chunks if found else ()
                healthy = {one.offset for one in chunks if one.checksum_matches}
                wanted = [
                    one.offset
                    for one in block.chunks
                    if not one.checksum_matches and one.offset in healthy
                ]
                if wanted:
                    self._pull_block(client, ours, block.block_id, wanted)
        finally:
            client.close()

    def _pull_block(
        self, client: DatanodeClient, ours: MemoryReplica, block_id: BlockId, offsets: list[int]
    ) -> None:
        for record in client.records(ours.container_id, [block_id]):
            for offset in offsets:
                chunk = record.by_offset[offset]
                ranges = [ByteRange(offset, chunk.length_bytes)]
                try:
                    [(_, pieces)] = client.read(ours.container_id, block_id, chunk, ranges)
                except ReconcileError as error:
                    self.refused.append(error.message)
                    continue
                data = b"".join(pieces)
                # A piece of another size hangs a real datanode.
                assert all(len(one) == chunk.bytes_per_checksum for one in pieces[:-1])
                if bad_windows(chunk, data):
                    self.refused.append(f"block {block_id} at {offset}: wrong bytes")
                    continue
                ours.files[block_id][offset : chunk.end] = data
                known = ours.records[block_id]
                chunks = tuple(chunk if one.offset == offset else one for one in known.chunks)
                ours.records[block_id] = replace(known, chunks=chunks)

    def extra_replicas(self, container_id: int) -> list[PeerId]:
        """Replicas that SCM lists of nodes that joined."""
        found = self.live.scm.replicas[ContainerId(container_id)]
        return [one.peer for one in found if one.peer not in PEERS]


@contextmanager
def rescue_twin(scms: int = 1) -> Iterator[RescueTwin]:
    """A cluster of three datanodes without containers, with so many SCMs."""
    with live_twin(scms) as live:
        twin = RescueTwin(live)
        for scm in live.group.members:
            scm.on_reconcile = twin.reconcile
        yield twin
