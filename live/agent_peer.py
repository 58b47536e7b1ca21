"""A datanode's replica as a rescue reads it where an agent runs on the datanode's host.

The tree is always the datanode's own: by it the datanode decides what it repairs.
Records and bytes are the agent's, which costs the datanode nothing, and no scan after a
request that fails. What the agent does not give is read from the datanode; all of it is
proven by whoever reads, whichever it is from.
"""

from collections.abc import Iterator, Sequence

from merkle.check import check_chunk_names
from merkle.errors import ReconcileError, RecordInvalidError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange
from repair.ports import LACKING_RESULTS, Peer, Piece
from runtime.errors import PeerRefusedError


class AgentFirstPeer:
    """A peer of both; the methods are those of repair.ports.Peer."""

    def __init__(self, datanode: Peer, agent: Peer) -> None:
        """Takes ownership of both, which are of one datanode."""
        assert datanode.peer_id == agent.peer_id
        self._datanode, self._agent = datanode, agent
        # One that failed is not asked again: each try may cost a deadline.
        self._is_agent_usable = True

    @property
    def peer_id(self) -> PeerId:
        """See Peer.peer_id."""
        return self._datanode.peer_id

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """See Peer.tree; the datanode's."""
        return self._datanode.tree(container_id)

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """See Peer.records. An agent reads a snapshot: what it lacks may be newer. A
        record with a foreign name counts as one that it lacks.
        """
        found: dict[BlockId, BlockRecord] = {}
        if self._is_agent_usable:
            try:
                answered = self._agent.records(container_id, block_ids)
                found = {number: one for number, one in answered.items() if _has_own_names(one)}
            except ReconcileError:
                self._is_agent_usable = False
        rest = [block_id for block_id in block_ids if block_id not in found]
        return found | self._datanode.records(container_id, rest) if rest else found

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """See Peer.read. What an agent found lacking is not asked for again."""
        rest = list(ranges)
        if self._is_agent_usable:
            try:
                for piece in self._agent.read(container_id, block_id, record_chunk, rest):
                    rest = _after(rest, piece.offset + len(piece.data))
                    yield piece
                return
            except PeerRefusedError as error:
                if error.facts["result"] in LACKING_RESULTS:
                    raise
                self._is_agent_usable = False
            except ReconcileError:
                self._is_agent_usable = False
        yield from self._datanode.read(container_id, block_id, record_chunk, rest)

    def close(self) -> None:
        """Close both connections."""
        self._agent.close()
        self._datanode.close()


def _has_own_names(record: BlockRecord) -> bool:
    try:
        check_chunk_names(record)
    except RecordInvalidError:
        return False
    return True


def _after(ranges: Sequence[ByteRange], offset: int) -> list[ByteRange]:
    """What of ascending ranges lies from an offset on."""
    starts = [(max(one.offset, offset), one.end) for one in ranges]
    return [ByteRange(start, end - start) for start, end in starts if start < end]
