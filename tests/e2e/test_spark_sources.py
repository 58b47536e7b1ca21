"""Stored trees and volumes as data sources: the rows that a sweep sees, filters that
open less, findings as rows.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import StructType

from merkle.columns import encode_tree
from merkle.replica import TreeSource
from ozone.survey import VolumeSurvey
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from spark.datasources import (
    ContainerPartition,
    OzoneTree,
    OzoneVolume,
    TreeFilePartition,
    register,
)
from tests.support.java import spark_options
from tests.support.sql_folds import fold_frame
from tests.support.trees import CHUNK_BYTES, block, chunk, container, deleted
from tests.support.volumes import state_of, unpack

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trees of two datanodes, one of them not whole, and one whose name tells
    nothing.
    """
    folder = tmp_path_factory.mktemp("trees")
    for node in ("one", "two"):
        (folder / f"datanode={node}").mkdir()
        for number in range(1, 6):
            tree = container(
                block(1, chunk(0), chunk(CHUNK_BYTES)), deleted(2, 7), container_id=number
            )
            (folder / f"datanode={node}" / f"{number}.tree").write_bytes(encode_tree(tree))
    (folder / "datanode=two" / "3.tree").write_bytes(b"\xff" * 20)
    os.truncate(folder / "datanode=two" / "4.tree", 11)
    (folder / "datanode=one" / "copy.tree").write_bytes(
        encode_tree(container(block(9), container_id=77))
    )
    return folder


def test_trees_become_rows_and_torn_ones_findings(trees: Path, session: SparkSession) -> None:
    register(session)
    rows = session.read.format("ozonetree").option("volume", "v").load(str(trees))
    given = {
        (row.datanode, row.volume, row.container_id, row.block_id, row.chunk_offset, row.deleted)
        for row in rows.where("findings IS NULL").collect()
    }
    whole = [("one", number) for number in range(1, 6)] + [("two", number) for number in (1, 2, 5)]
    expected = {
        (node, "v", number, *place)
        for node, number in whole
        for place in ((1, 0, False), (1, CHUNK_BYTES, False), (2, -1, True))
    }
    assert given == expected | {("one", "v", 77, 9, -1, False)}
    found = rows.where("findings IS NOT NULL").collect()
    assert {(row.datanode, row.container_id) for row in found} == {("two", 3), ("two", 4)}
    assert all(row.block_id is None and ".tree: tree_refused: " in row.findings for row in found)


def test_registering_again_changes_nothing(session: SparkSession) -> None:
    """Spark starts workers anew for each environment, and keeps the old ones."""
    register(session)
    before = dict(session.sparkContext.environment)
    register(session)
    assert session.sparkContext.environment == before


def test_rows_of_a_source_fold_in_sql_to_the_roots_of_their_trees(
    trees: Path, session: SparkSession
) -> None:
    register(session)
    rows = (
        session.read.format("ozonetree").load(str(trees / "datanode=one")).where("findings IS NULL")
    )
    folded = fold_frame(rows)
    root = container(block(1, chunk(0), chunk(CHUNK_BYTES)), deleted(2, 7)).data_checksum
    empty = container(block(9)).data_checksum
    roots = {row["container_id"]: row["root"] for row in folded.replicas.to_pylist()}
    assert roots == dict.fromkeys(range(1, 6), root) | {77: empty}
    assert not len(folded.exact)


def test_what_is_not_there_is_a_finding_and_fails_no_job(
    tmp_path: Path, session: SparkSession
) -> None:
    register(session)
    (tmp_path / "volume").mkdir()
    for name, text in (("ozonetree", "disk_failed"), ("ozonevolume", "volume_invalid")):
        path = str(tmp_path / ("nothing.tree" if name == "ozonetree" else "volume"))
        (row,) = session.read.format(name).load(path).collect()
        assert text in row.findings


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [
        # An unknown root is not that of an empty tree.
        ("6.tree", b"", "the tree has no root"),
        ("6.tree", bytes([8, 6]), "the tree has no root"),
        (
            "0.tree",
            encode_tree(container(block(9), container_id=6)),
            "its name is not a container ID",
        ),
        (
            f"{10**22}.tree",
            encode_tree(container(block(9), container_id=6)),
            "its name is not a container ID",
        ),
        (
            "datanode=\udcff/6.tree",
            encode_tree(container(block(9), container_id=6)),
            "is not UTF-8",
        ),
    ],
)
def test_a_tree_that_is_no_replicas_is_a_finding_alone(
    tmp_path: Path, name: str, raw: bytes, text: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    source = OzoneTree({"path": str(tmp_path), "datanode": "one", "only_containers": "6"})
    reader = source.reader(source.schema())
    ((row,),) = [batch.to_pylist() for part in reader.partitions() for batch in reader.read(part)]
    assert text in row["findings"]
    assert row["chunk_offset"] is None


def test_rows_that_nobody_asks_for_keep_files_from_being_opened(trees: Path) -> None:
    def opened(**only: str) -> list[str]:
        source = OzoneTree({"path": str(trees), **{f"only_{k}": v for k, v in only.items()}})
        # As Spark sends it.
        parts = pickle.loads(pickle.dumps(source.reader(source.schema()))).partitions()
        return [
            f"{path.parent.name[9:]} {path.stem}"
            for part in parts
            if isinstance(part, TreeFilePartition)
            for path in part.paths
        ]

    assert len(opened()) == 11
    # What its name does not tell has to be opened.
    assert opened(containers="2") == ["one 2", "one copy", "two 2"]
    assert opened(datanodes="two, three", containers="1,4,9") == ["two 1", "two 4"]
    assert opened(containers="2-3", datanodes="two") == ["two 2", "two 3"]
    # Trees of no known volume, all of CLOSED replicas.
    assert opened(volumes="", containers="2", datanodes="two") == ["two 2"]
    assert opened(volumes="v") == []
    assert len(opened(states="CLOSED,OPEN")) == 11
    assert opened(states="OPEN") == []


def test_a_volume_is_read_in_place(tmp_path: Path, session: SparkSession) -> None:
    register(session)
    roots = sorted(unpack("damaged", tmp_path / "volumes").glob("dn*/volume1"))
    before = state_of(tmp_path / "volumes")
    for source in TreeSource:
        rows = (
            session.read.format("ozonevolume")
            .option("source", source.value)
            .load([str(root) for root in roots])
        )
        rows = rows.where("findings IS NULL")
        folded = fold_frame(rows)
        expected = {}
        for number, root in enumerate(roots):
            with open_volume(
                root, hold=Hold.READ_ONLY, state_folder=tmp_path / f"s{number}", disk=Disk()
            ) as volume:
                survey = VolumeSurvey(volume, Disk())
                for found in survey.replicas(source):
                    expected[survey.datanode, found.container_id] = found.tree.data_checksum
        exact = set(folded.exact.tolist())
        got = {
            (row["datanode"], row["container_id"]): row["root"]
            for row in folded.replicas.to_pylist()
        }
        assert got == {key: root for key, root in expected.items() if key[1] not in exact}
        # A chunk of the middle is gone there.
        assert len(exact) <= 1
    assert state_of(tmp_path / "volumes") == before


def test_containers_of_a_volume_are_picked_before_they_are_read(tmp_path: Path) -> None:
    (root, *_) = sorted(unpack("healthy", tmp_path).glob("dn*/volume1"))

    def left(**only: str) -> list[tuple[int, ...]]:
        source = OzoneVolume({"path": str(root), **{f"only_{k}": v for k, v in only.items()}})
        found = source.reader(source.schema()).partitions()
        return [part.container_ids for part in found if isinstance(part, ContainerPartition)]

    assert left(containers="2,5,99") == [(2, 5)]
    assert left(datanodes="nobody") == []
    assert left(volumes="none") == []


def test_replicas_in_another_state_are_not_read(tmp_path: Path) -> None:
    """Their chunk files are gone, and nobody misses them."""
    (root, *_) = sorted(unpack("healthy", tmp_path).glob("dn*/volume1"))
    for path in root.rglob("*.block"):
        path.unlink()

    def found(state: str) -> list[dict[str, Any]]:
        source = OzoneVolume({"path": str(root), "source": "data", "only_states": state})
        reader = source.reader(source.schema())
        batches = (batch for part in reader.partitions() for batch in reader.read(part))
        return [row for batch in batches for row in batch.to_pylist()]

    closed = found("CLOSED")
    assert any(row["findings"] for row in closed)
    assert found("OPEN") == []


def test_columns_that_nobody_asks_for_are_left_out_of_the_plan_and_of_the_rows(
    trees: Path, session: SparkSession
) -> None:
    register(session)
    whole = session.read.format("ozonetree").load(str(trees))
    two = StructType([whole.schema["datanode"], whole.schema["container_id"]])
    narrow = session.read.format("ozonetree").schema(two).load(str(trees))
    (scan,) = [
        line
        for line in narrow._jdf.queryExecution().executedPlan().toString().splitlines()
        if "Scan" in line
    ]
    assert "datanode" in scan
    assert "container_id" in scan
    assert "checksum" not in scan
    expected = [(row.datanode, row.container_id) for row in whole.collect()]
    assert sorted(map(tuple, narrow.collect()), key=str) == sorted(expected, key=str)


def test_a_query_with_a_filter_leaves_others_of_the_same_frame_whole(
    trees: Path, session: SparkSession
) -> None:
    """Spark would keep a filter that a source takes for all that follow."""
    register(session)
    whole = session.read.format("ozonetree").load(str(trees))
    count, one, two = (
        whole.count(),
        whole.where("container_id = 1"),
        whole.where("container_id = 2"),
    )
    assert (one.count(), whole.count()) == (6, count)
    assert one.union(two).union(whole).count() == 6 + 6 + count
    # Spark makes a partition where none is left.
    empty = session.read.format("ozonetree").option("only_states", "OPEN").load(str(trees))
    assert empty.collect() == []


@pytest.mark.parametrize(
    ("name", "options", "schema", "text"),
    [
        ("ozonetree", {"vlume": "v"}, None, "ozonetree has no option vlume"),
        ("ozonetree", {"source": "data"}, None, "ozonetree has no option source"),
        ("ozonevolume", {"source": "disk"}, None, "ozonevolume has no source 'disk'"),
        ("ozonetree", {"only_containers": "1-x"}, None, "only_containers is '1-x'"),
        ("ozonevolume", {"only_states": "SHUT"}, None, "only_states has SHUT"),
        ("ozonetree", {"path": ""}, None, "say what to load: a path"),
        ("ozonetree", {}, "datanod string", "ozonetree has no column datanod"),
        ("ozonevolume", {}, "container_id string", "column container_id of ozonevolume is bigint"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused_in_words(
    trees: Path,
    session: SparkSession,
    name: str,
    options: dict[str, str],
    schema: str | None,
    text: str,
) -> None:
    register(session)
    reader = session.read.format(name).options(**{"path": str(trees), **options})
    with pytest.raises(PySparkException, match=text) as error:
        (reader.schema(schema) if schema else reader).load().collect()
    assert "Traceback" not in str(error.value)
    assert ".py" not in str(error.value)


def test_errors_of_others_show_their_code_after_a_refusal(
    trees: Path, session: SparkSession
) -> None:
    register(session)
    with pytest.raises(PySparkException, match="ozonetree has no option vlume"):
        session.read.format("ozonetree").option("vlume", "v").load(str(trees)).collect()
    fails = udf(lambda _: 1 // 0, "int")
    with pytest.raises(PySparkException, match="Traceback"):
        session.range(1).select(fails("id")).collect()


@pytest.mark.peers
def test_jobs_of_an_unactivated_environment_read_trees(tmp_path: Path, trees: Path) -> None:
    """The first `python3` of the PATH has no packages, as that of the system. A job may
    choose another, as the second one does.
    """
    (tmp_path / "bin").mkdir()
    bare = tmp_path / "bin" / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    jobs = f"""
from pyspark.sql import SparkSession
from spark.datasources import register
for chosen in ({{}}, {{"spark.pyspark.python": {sys.executable!r}}}):
    settings = {{"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", **chosen}}
    session = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    register(session)
    trees = session.read.format("ozonetree").load({str(trees)!r})
    print(trees.where("container_id = 1").count(), session.conf.get("spark.pyspark.python", ""))
    session.stop()
"""
    environment = {name: os.environ[name] for name in ("JAVA_HOME", "HOME") if name in os.environ}
    environment["SPARK_SUBMIT_OPTS"] = spark_options()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", jobs],
        cwd=ROOT,
        env={**environment, "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"6 \n6 {sys.executable}\n", done.stderr[-2000:]
