"""A datanode that invents names, places and lengths of chunks and files in its answers.

A diagnosis, a deep one, the plan of a rescue and the rescue itself refuse it by name,
or say and do what they would without it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.datanode import Response
from protos.ozone_datanode_pb2 import BlockData, GetBlock, ListBlock, ReadChunk, Result
from tests.support.bounded_memory import bounded_memory
from tests.support.live_twin import PEERS
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES
from tests.support.rescue_twin import RescueTwin, rescue_twin

NUMBER, BLOCK = ContainerId(1), BlockId(20)
LIAR = PEERS[2]
Change = Callable[[BlockData], object]


def name(text: str, chunk: int = 0) -> Change:
    return lambda record: setattr(record.chunks[chunk], "chunkName", text)


def numbers(chunk: int = 0, **fields: int) -> Change:
    """Set these of a chunk, and leave out the size that would give it away."""

    def change(record: BlockData) -> None:
        record.ClearField("size")
        for key, value in fields.items():
            setattr(record.chunks[chunk], key, value)

    return change


def twice(record: BlockData) -> None:
    record.ClearField("size")
    record.chunks.insert(1, record.chunks[0])


# What it invents, and the code by which a deep diagnosis refuses it; "" is harmless.
INVENTIONS: dict[str, tuple[Change, str]] = {
    "a name of another block's chunk": (name("21_chunk_1"), "record_invalid"),
    "a name of its next chunk": (
        lambda record: name(record.chunks[1].chunkName)(record), "record_invalid"),
    "a name with a slash": (name("20_chunk_1/x"), "record_invalid"),
    "a name that leads out": (name("../../../hdds/VERSION"), "record_invalid"),
    "a name that is its folder": (name(".."), "record_invalid"),
    "a name with a null": (name("20_chunk_1\0"), "record_invalid"),
    "a name for a terminal": (name("\x1b]0;x\x07"), "record_invalid"),
    "a name too long for a file": (name("n" * 256), "record_invalid"),
    "no name at all": (name(""), ""),
    "a name of its own": (name("20_chunk_999"), ""),
    "a chunk that runs into the next": (numbers(1, offset=CHUNK_BYTES - 1), "record_invalid"),
    "two chunks of one offset": (twice, "record_invalid"),
    "an offset of 2^63": (numbers(offset=1 << 63), "record_invalid"),
    "an offset of -1": (numbers(offset=(1 << 64) - 1), "record_invalid"),
    "an offset at the end of time": (numbers(3, offset=(1 << 63) - 1), "record_invalid"),
    "a length of 2^63": (numbers(len=1 << 63), "record_invalid"),
    "a length of -1": (numbers(len=(1 << 64) - 1), "record_invalid"),
    "a length of 2^63 - 1": (numbers(len=(1 << 63) - 1), "record_invalid"),
    "a size of -1": (lambda record: setattr(record, "size", -1), "record_invalid"),
    "a size of 2^63 - 1": (
        lambda record: setattr(record, "size", (1 << 63) - 1), "record_invalid"),
    "a block ID of -1": (lambda record: setattr(record.blockID, "localID", -1), "remote_protocol"),
    "a block ID of another block": (
        lambda record: setattr(record.blockID, "localID", 21), "record_invalid"),
    "a block ID of 2^63 - 1": (
        lambda record: setattr(record.blockID, "localID", (1 << 63) - 1), "record_invalid"),
    "the ID of another container": (
        lambda record: setattr(record.blockID, "containerID", 2), "remote_protocol"),
}  # fmt: skip


# A rescue asks for records by their IDs: these are no answers.
OTHER_RECORDS = {one for one in INVENTIONS if one.startswith(("a block ID", "the ID"))}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RescueTwin]:
    """Container 1: each replica has another window of the same chunk damaged."""
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with rescue_twin() as found:
        found.live.add(NUMBER)
        for datanode in (1, 2, 3):
            found.damage(NUMBER, datanode, BLOCK, datanode * WINDOW_BYTES + 7)
        yield found


def lie(cluster: RescueTwin, change: Change) -> None:
    """The third datanode tells this of its block 20."""

    def answered(reply: Response) -> Response:
        rows = [reply.getBlock.blockData] if reply.cmdType == GetBlock else []
        if reply.cmdType == ListBlock:
            rows = list(reply.listBlock.blockData)
        for row in rows:
            if row.blockID.localID == BLOCK:
                change(row)
        return reply

    cluster.live.services[2].change = answered


def content(cluster: RescueTwin) -> list[tuple[bytes, dict[BlockId, BlockRecord]]]:
    """The damaged block and the records of each replica."""
    found = [source.replicas[NUMBER] for source in cluster.live.sources]
    return [(bytes(one.files[BLOCK]), dict(one.records)) for one in found]


def rescue(cluster: RescueTwin, *words: str) -> tuple[int, dict[str, Any]]:
    given = ["rescue", "1", "--cluster", cluster.live.address, "--listen", "127.0.0.1:0", "--json"]
    result = CliRunner().invoke(treefold, [*given, *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("what", INVENTIONS)
def test_a_diagnosis_names_what_a_datanode_invents_or_is_not_changed_by_it(
    what: str, cluster: RescueTwin
) -> None:
    change, code = INVENTIONS[what]
    honest, deep = cluster.live.diagnose()[1], cluster.live.diagnose(deep=True)[1]
    lie(cluster, change)
    with bounded_memory():
        assert cluster.live.diagnose()[1] == honest
        found = cluster.live.diagnose(deep=True)[1]
    if not code:
        assert found.comparison == deep.comparison
        return
    [reading] = [one for one in found.readings if one.replica.peer == LIAR]
    assert reading.tree is None
    assert reading.reason.startswith(f"{code}: ")
    assert reading.reason.isprintable()
    # What nobody read could change the verdict.
    assert f"{LIAR}: {code}" in found.doubt


@pytest.mark.parametrize("what", INVENTIONS)
def test_a_plan_stages_what_is_proven_or_names_the_liar(what: str, cluster: RescueTwin) -> None:
    change, _ = INVENTIONS[what]
    before = content(cluster)
    _, honest = rescue(cluster, "--dry-run")
    lie(cluster, change)
    with bounded_memory():
        status, document = rescue(cluster, "--dry-run")
    assert content(cluster) == before
    if what in OTHER_RECORDS:
        [error] = document["errors"]
        assert (status, error["code"]) == (1, "remote_protocol")
        assert LIAR in error["message"]
        return
    # Without its record its bytes still count, if they match that of the others.
    assert status == 3, document
    assert document["data"]["containers"] == honest["data"]["containers"]


RESCUED = [
    "a name of another block's chunk", "a name that leads out", "a name of its own",
    "two chunks of one offset", "a length of 2^63",
]  # fmt: skip


@pytest.mark.parametrize("what", RESCUED)
def test_a_rescue_heals_the_others_and_spreads_nothing_invented(
    what: str, cluster: RescueTwin
) -> None:
    change, _ = INVENTIONS[what]
    records = [found for _, found in content(cluster)]
    lie(cluster, change)
    status, document = rescue(cluster, "--yes")
    assert status == 0, document
    healed = content(cluster)
    assert len({data for data, _ in healed}) == 1
    for (_, found), known in zip(healed, records, strict=True):
        assert found == known or what == "a name of its own"
        # A name that could be any other's never reaches a datanode.
        assert all("21_" not in c.name and "/" not in c.name for c in found[BLOCK].chunks)


LENGTHS = ["-1", "0", "1", "-9", str(1 << 31), str(1 << 63), "9" * 40, "x"]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_invented_length_of_a_file_costs_few_requests(length: str, cluster: RescueTwin) -> None:
    """Its whole file is lost to us; nobody believes more of it."""
    asked = 0

    def answered(reply: Response) -> Response:
        nonlocal asked
        if reply.cmdType != ReadChunk:
            return reply
        asked += 1
        text = f"Unexpected read size. expected: {WINDOW_BYTES}, actual: {length}"
        return Response(
            cmdType=ReadChunk, traceID="", result=Result.CONTAINER_INTERNAL_ERROR, message=text
        )

    before = content(cluster)
    cluster.live.services[2].change = answered
    with bounded_memory():
        found = cluster.live.diagnose(deep=True)[1]
        assert {place for r in found.readings if r.deep for place in r.deep.lost} >= {(BLOCK, 0)}
        # At most two for each chunk: all of it, and once what is said to be there.
        assert asked <= 2 * sum(len(r.chunks) for r in before[2][1].values())
        asked = 0
        status, document = rescue(cluster, "--dry-run")
        assert asked <= 4
    assert content(cluster) == before
    # Two replicas prove all windows but those that only the third one has: none here.
    assert status == 3, document
