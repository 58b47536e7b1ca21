"""A row of delete_txns that cannot be parsed costs the blocks that it may name, not
their container.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from merkle.outcome import EvidenceKind, OutcomeState, Verdict
from merkle.record import DeleteTransaction
from merkle.tree import BlockId, ContainerId
from ozone.rocks import Batch, OzoneTable, container_prefix, delete_key
from ozone.volume import Version
from protos.convert import delete_transaction_to_bytes, may_delete_block
from tests.support.in_process import Datanode, datanodes, reconcile
from tests.support.volumes import content, flip, new_volume, owned, write_block

SEVEN = ContainerId(7)
# As long as those of a cluster.
NAMED, OTHER, DELETED = (BlockId(115_816_896_921_600_000 + i) for i in (1, 2, 3))
# Its last field is cut short.
UNPARSABLE = delete_transaction_to_bytes(DeleteTransaction(4, SEVEN, (NAMED,)))[:-1]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Datanode]]:
    """Two datanodes; on the first both live blocks are damaged, and a delete cannot be
    parsed.
    """
    roots = {}
    for number in (1, 2):
        node_id = f"00000000-0000-4000-8000-00000000000{number}"
        root = roots[f"dn{number}"] = new_volume(
            tmp_path / f"dn{number}", version=Version(f"DS-{number}", "CID-x", node_id)
        )
        with owned(root, tmp_path / "writer" / str(number)) as made:
            made.writer.create_container(SEVEN)
            for bcs_id, block_id in enumerate((NAMED, OTHER, DELETED), start=1):
                write_block(made.writer, SEVEN, block_id, 3000, bcs_id=bcs_id)
            made.writer.close(SEVEN)
            if number == 1:
                batch = Batch()
                batch.put(OzoneTable.DELETE_TXNS, delete_key(SEVEN, 4), UNPARSABLE)
                made.volume.database.write(batch)
                for block_id in (NAMED, OTHER):
                    flip(made.store.open(SEVEN).block_path(block_id), 100)
    with datanodes(roots, tmp_path / "state") as opened:
        yield opened


def test_the_other_blocks_are_repaired(nodes: dict[str, Datanode]) -> None:
    outcome = reconcile(nodes, "dn1", SEVEN)
    assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.UNKNOWN)
    facts = [fact for fact in outcome.evidence if fact.kind == EvidenceKind.FILE_UNREADABLE]
    assert [fact.block_id for fact in facts] == [NAMED]
    assert "delete transaction" in facts[0].detail
    store = nodes["dn1"].store
    assert store.read(SEVEN, OTHER, 0, 3000) == content(OTHER, 3000)
    assert store.read(SEVEN, NAMED, 0, 3000) != content(NAMED, 3000)


def test_the_other_deletes_are_carried_out(nodes: dict[str, Datanode]) -> None:
    held = nodes["dn1"].held
    assert held.writer is not None
    held.writer.receive_delete(DeleteTransaction(5, SEVEN, (DELETED,)))
    assert held.writer.delete_blocks(SEVEN) == [DELETED]
    left = [
        row
        for _, row in held.volume.database.items(OzoneTable.DELETE_TXNS, container_prefix(SEVEN))
    ]
    assert left == [UNPARSABLE]


def test_a_transaction_names_its_blocks_and_no_others() -> None:
    raw = delete_transaction_to_bytes(DeleteTransaction(4, SEVEN, (NAMED, BlockId(5))))
    assert [may_delete_block(raw, b) for b in (NAMED, BlockId(5), OTHER)] == [True, True, False]
