"""Sweeps into a bucket of a real Ozone, by its S3 gateway. Run by `make test-ozone`."""

from pathlib import Path

import pytest

from admin.demo.synthetic import SyntheticCluster, synthetic
from chunktable.files import Files, ObjectPath
from runtime.disk import Disk
from runtime.errors import BusyError
from sweep.output import SweepStore, SweepTable
from sweep.report import write_report
from tests.support.s3_servers import S3Bucket
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of

# With the tests of datanodes, which take less time than the others.
pytestmark = [pytest.mark.ozone, pytest.mark.datanodes, pytest.mark.timeout(900)]

TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS)


def test_two_nights_in_a_bucket_of_ozone_one_of_them_killed(
    tmp_path: Path, ozone_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exports are there too: their times must be those of the night before. While
    one sweep writes, another one is refused, by the gateway's conditional puts.
    """
    ozone_bucket.endpoint.set_environment(monkeypatch)
    root = ObjectPath.of(f"s3://{ozone_bucket.name}?endpoint_url={ozone_bucket.endpoint.url}")
    out, files = root / "out", Files(Disk())
    cluster = SyntheticCluster(seed=4, datanodes=3, containers=30, blocks=4, chunks=4)
    synthetic(tmp_path / "first", cluster, healthy=True)
    synthetic(tmp_path / "second", cluster)
    for path in tmp_path.glob("*/**/*"):
        if path.is_file():
            files.replace(root / str(path.relative_to(tmp_path)), path.read_bytes())

    class Second(Quiet):
        def begin(self, what: str, total: int | None, unit: str) -> None:
            if not self.begun:
                self.begun.append(what)
                with pytest.raises(BusyError, match="another sweep is running in s3://"):
                    run(out, root / "first")

    watched = Second()
    healthy = run(out, root / "first", progress=watched)
    # The gateway obeys conditions.
    assert (watched.begun != [], watched.notes) == (True, [])
    dying = OnePartWaves(tmp_path / "spill", dies_after=1)
    with pytest.raises(Killed):
        run(out, root / "second", engine=dying)
    progress, store = Quiet(), SweepStore(out, Disk())
    summary = run(
        out, root / "second", progress=progress, report=lambda found: write_report(store, found)
    )
    assert any("resuming sweep" in note for note in progress.notes)
    assert (store.sweeps(), summary.notes) == ([healthy.sweep_id, summary.sweep_id], ())
    assert b"<html" in files.read(store.report(summary.sweep_id))
    run(tmp_path / "out", tmp_path / "first")
    local = run(tmp_path / "out", tmp_path / "second")
    assert summary.findings == local.findings
    assert summary.findings["silent_change"] > 0
    for table in TABLES:
        held, expected = (
            sorted(map(str, table_of(place, table, sweep_id)))
            for place, sweep_id in ((out, summary.sweep_id), (tmp_path / "out", local.sweep_id))
        )
        assert held == expected
    assert not files.files_below(out / "work")
