"""A volume of another user: every command ends with a named error that says whom to run
as. What may not be read is never called damaged.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from merkle.columns import encode_tree
from merkle.tree import ContainerId, ContainerTree
from ozone.volume import permission_hint
from runtime.disk import owner_of
from tests.support.bad_input import another_user, forbidden, public_folder, run
from tests.support.handmade import CLUSTER, STORAGE, VolumeMaker, whole

# Below the root of a volume: every folder on the way, and every kind of file.
PLACES = {
    "the folder above": "..",
    "the volume": ".",
    "hdds": "hdds",
    "VERSION": "hdds/VERSION",
    "the cluster's folder": f"hdds/{CLUSTER}",
    "the database's folder": f"hdds/{CLUSTER}/{STORAGE}",
    "the database": f"hdds/{CLUSTER}/{STORAGE}/container.db",
    "a file of the database": f"hdds/{CLUSTER}/{STORAGE}/container.db/CURRENT",
    "current": f"hdds/{CLUSTER}/current",
    "the group's folder": f"hdds/{CLUSTER}/current/containerDir0",
    "the container": f"hdds/{CLUSTER}/current/containerDir0/1",
    "metadata": f"hdds/{CLUSTER}/current/containerDir0/1/metadata",
    "the descriptor": f"hdds/{CLUSTER}/current/containerDir0/1/metadata/1.container",
    "the tree": f"hdds/{CLUSTER}/current/containerDir0/1/metadata/1.tree",
    "chunks": f"hdds/{CLUSTER}/current/containerDir0/1/chunks",
    "a block": f"hdds/{CLUSTER}/current/containerDir0/1/chunks/20.block",
}
# Trees alone are read by these, and no data by the second of them.
NOT_NEEDED = {
    "show": {"the descriptor", "chunks", "a block"},
    "check": {"the descriptor", "chunks", "a block"},
}


@pytest.fixture(scope="module")
def volumes() -> Iterator[list[Path]]:
    with public_folder() as folder:
        roots = []
        for name in ("dn1", "dn2"):
            (folder / name).mkdir()
            with VolumeMaker(folder / name / "volume") as made:
                made.container()
                made.block(1, 20, whole(3000))
                tree = encode_tree(ContainerTree.of(ContainerId(1), []))
                (made.folder(1) / "metadata" / "1.tree").write_bytes(tree)
            roots.append(made.root)
        # The other user may not be able to import what commands import late.
        for words in ("tree build", "tree show", "tree check", "tree diff"):
            run(*words.split(), *roots)
        run("tree", "build", folder / "nothing")
        run("doctor", "--volume", roots[0])
        yield roots


@pytest.mark.parametrize("command", ["build", "show", "check", "diff"])
@pytest.mark.parametrize("place", PLACES)
def test_what_another_user_may_not_read_is_named_with_whom_to_run_as(
    volumes: list[Path], place: str, command: str
) -> None:
    paths = volumes if command == "diff" else volumes[:1]
    with forbidden((volumes[0] / PLACES[place]).resolve()), another_user():
        result = run("tree", command, *paths)

    if place in NOT_NEEDED.get(command, ()):
        assert result.exit_code in (0, 3)
        return
    assert result.exit_code == 1, result.output
    assert "error [" in result.stderr
    assert "ermission denied" in result.stderr
    assert owner_of(volumes[0]) in result.stderr
    # Nothing is known of the data, so nothing is said of them.
    for finding in ("CORRUPT", "MISSING", "INACCESSIBLE", "REPAIRABLE", "UNRECOVERABLE"):
        assert finding not in result.stdout, result.stdout


def test_the_hint_names_the_datanodes_user(volumes: list[Path]) -> None:
    with forbidden(volumes[0]), another_user():
        result = run("tree", "build", volumes[0])

    assert permission_hint(volumes[0]) in result.stderr
    assert f"datanode's user, {owner_of(volumes[0])}" in result.stderr


@pytest.mark.parametrize("place", PLACES)
def test_the_doctor_calls_it_a_problem_and_goes_on(volumes: list[Path], place: str) -> None:
    with forbidden((volumes[0] / PLACES[place]).resolve()), another_user():
        result = run("doctor", "--volume", volumes[0], "--volume", volumes[1], "--json")

    assert result.exit_code in (0, 3), result.output
    if place not in ("chunks", "a block"):
        assert "ermission denied" in result.stdout
        assert f"datanode's user, {owner_of(volumes[0])}" in result.stdout
