"""A pack holds all files of the libraries, or is refused."""

from pathlib import Path

import pytest

from runtime.disk import Disk
from runtime.errors import ConfigError
from spark.pack import pack


def test_a_library_whose_files_are_not_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors would say later that they lack it."""
    installed = tmp_path / "packages" / "crcmod-1.7.egg-info"
    installed.mkdir(parents=True)
    (installed / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: crcmod\nVersion: 1.7\n")
    monkeypatch.syspath_prepend(installed.parent)
    with pytest.raises(ConfigError, match="the files of crcmod are not recorded"):
        pack(tmp_path / "pack", Disk())
    assert not list((tmp_path / "pack").iterdir())
