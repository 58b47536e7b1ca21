"""Who follows the README word by word comes from the built wheel to a healed container,
over mutual TLS.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from merkle.replica import TreeSource
from merkle.tree import ContainerId
from ozone.containers import ContainerStore
from ozone.survey import survey_container
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from tests.support.processes import ROOT
from tests.support.readme import Block, Machine, blocks, build_wheel, share_packages
from tests.support.volumes import copy_volume, unpack

CONTAINER = ContainerId(3)
NODES = ("dn1", "dn2", "dn3")
PORTS = {"treefold scm run": 9896, "treefold agent run": 9893}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, list[Machine]]]:
    # Addresses of our own: the ports are those of the README.
    network = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}."
    shared = tmp_path / "shared"

    def machine(name: str, number: int) -> Machine:
        (tmp_path / name / "home").mkdir(parents=True)
        return Machine(tmp_path / name, f"{network}{number}", shared, network)

    datanodes = [machine(name, number) for number, name in enumerate(NODES, start=5)]
    moments = unpack("damaged", tmp_path / "moments")
    for name, one in zip(NODES, datanodes, strict=True):
        copy_volume(moments, name, one.root / "data" / "hdds")
    made = {
        "the controller": [machine("controller", 2)],
        "each datanode": datanodes,
        "the operator": [machine("operator", 9)],
    }
    yield made | {"every machine": made["the operator"]}
    for several in made.values():
        for one in several:
            one.stop()


def follow(block: Block, machine: Machine, folder: Path) -> str:
    """Do on a machine what a block says; what was printed."""
    if block.kind == "toml":
        machine.write(block.text)
        return ""
    for command, port in PORTS.items():
        if block.text.startswith(command):
            machine.start(block.text.strip(), port)
            return ""
    environment, made, rest = block.text.partition("/bin/pip ")
    if not made:
        return machine.run(block.text, folder)
    # The packages that pip would load are shared as soon as there is an environment.
    *before, last = environment.splitlines()
    machine.run("\n".join(before), folder)
    share_packages(Path(machine.here(last)))
    return machine.run(last + made + rest, folder)


def root_of(volume: Path, scratch: Path) -> tuple[int, tuple[object, ...]]:
    """Root and findings of the container on this volume, by its data alone."""
    with open_volume(volume, hold=Hold.READ_ONLY, state_folder=scratch, disk=Disk()) as opened:
        container = ContainerStore(opened, Disk()).get(CONTAINER)
        found = survey_container(container, TreeSource.DATA, fall_back=False)
        return found.tree.data_checksum, found.findings


def test_from_the_wheel_to_a_healed_container(
    machines: dict[str, list[Machine]], tmp_path: Path
) -> None:
    steps = blocks((ROOT / "README.md").read_text())
    assert {one.on for one in steps} == machines.keys()
    build_wheel(sys.executable, tmp_path)
    printed = ""
    for step in steps:
        for machine in machines[step.on]:
            printed += follow(step, machine, tmp_path)

    assert "3 scans ordered\ncontainer 3: diverged" in printed
    assert "Reconciliation has been triggered for container 3" in printed
    assert "  replicas:    match" in printed
    [controller] = machines["the controller"]
    audit = controller.root / "var/lib/treefold/controller/audit.jsonl"
    assert '"who": "operator/alice", "why": "bit rot"' in audit.read_text()
    assert printed.count("dnagent_chunks_repaired_total{") >= len(NODES)
    for several in machines.values():
        assert all(status == 0 for one in several for status in one.stop())
    healed = [
        root_of(one.root / "data" / "hdds", tmp_path / f"scratch-{number}")
        for number, one in enumerate(machines["each datanode"])
    ]
    assert len(set(healed)) == 1
    assert healed[0][1] == ()
