"""A crash at any operation on an audit file: what was acknowledged is there, and the
next start continues the chain.
"""

from pathlib import Path

import pytest

from runtime.audit_chain import AuditFile
from tests.support.audit_files import audit_lines, check_folder, write_lines
from tests.support.disk import ImagingDisk

pytestmark = pytest.mark.crashes


def test_a_crash_at_any_operation_leaves_a_chain_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    path = root / "audit.jsonl"
    write_lines(path, "before")
    # A torn line, so that its replacement is cut short, too.
    path.write_bytes(path.read_bytes() + b"torn")
    disk = ImagingDisk(root, tmp_path / "images")
    acknowledged: dict[int, int] = {}
    audit = AuditFile(path, disk=disk, file_bytes_max=500)
    for number in range(4):
        audit.append([{"name": f"{number}-{part}"} for part in range(2)])
        acknowledged[len(disk.operations)] = number + 1
    audit.close()
    images = disk.finish()
    assert len(images) > 30
    for image in images:
        done = max((n for at, n in acknowledged.items() if at <= image.number), default=0)
        write_lines(image.folder / "audit.jsonl", "after")
        report = check_folder(image.folder)
        assert report.broken is None, image
        found = [line.get("name") for file in report.files for line in audit_lines(file)]
        assert found[0] == "before"
        assert found[-1] == "after"
        wanted = [f"{number}-{part}" for number in range(done) for part in range(2)]
        named = [name for name in found[1:-1] if name is not None]
        assert named[: len(wanted)] == wanted, image
