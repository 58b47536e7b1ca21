"""The controller's state folder: what it numbers its terms by outlives a power cut."""

from pathlib import Path

from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.disk import recorded_syncs


def test_a_new_state_folder_is_durable(tmp_path: Path) -> None:
    state = tmp_path / "var" / "controller"
    with recorded_syncs() as synced:
        ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=state)).stop()
    assert synced == [tmp_path, tmp_path / "var", state]
