"""`treefold tree build` prints each container as it ends, and what an interrupted build
has read is not read again, unless it has changed.
"""

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from admin.build_results import BuildResult, BuildResults
from admin.cli import treefold
from merkle.tree import ContainerId
from ozone.containers import ContainerStore
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from runtime.errors import BusyError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject
from tests.support.handmade import VolumeMaker, whole
from tests.support.volumes import flip

CONTAINERS = 3
SHOWN: JsonObject = {
    "containerID": 1, "state": "CLOSED", "dataChecksum": "0", "source": "data", "blocks": 0,
    "deletedBlocks": 0, "findings": [], "notes": [],
}  # fmt: skip


class InterruptedStream(io.StringIO):
    """Standard output of someone who presses Ctrl-C at the row of one container."""

    def __init__(self, container_id: int) -> None:
        super().__init__()
        self._row = f'{{"containerID": {container_id},'

    def write(self, text: str) -> int:
        if text.startswith(self._row):
            raise KeyboardInterrupt
        return super().write(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with VolumeMaker(tmp_path / "volume") as made:
        for number in range(1, CONTAINERS + 1):
            made.container(number)
            made.block(number, 20, whole(3000))
    return made.root


def runner(root: Path, state: str = "state") -> CliRunner:
    """Of a user whose state is kept beside the volume."""
    return CliRunner(env={"XDG_STATE_HOME": str(root.parent / state)})


def build(root: Path, *words: str, state: str = "state") -> Result:
    return runner(root, state).invoke(treefold, ["tree", "build", str(root), *words])


def interrupt(root: Path, at: int) -> tuple[list[int], str]:
    """A build that is interrupted at the row of a container: the containers that it
    printed, and what it said.
    """
    rows, said = InterruptedStream(at), io.StringIO()
    with (
        runner(root).isolation(),
        contextlib.redirect_stdout(rows),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        treefold.main(["tree", "build", str(root), "--json"], prog_name="treefold")
    assert ended.value.code == ExitCode.INTERRUPTED
    printed = [json.loads(line) for line in rows.getvalue().splitlines()]
    return [row["containerID"] for row in printed if "containerID" in row], said.getvalue()


def results_file(root: Path) -> Path:
    (file,) = (root.parent / "state" / "treefold" / "tree-build").iterdir()
    return file


def mark(root: Path) -> None:
    """Change the kept results, so that a row shows whether it is from there."""
    file = results_file(root)
    file.write_text(file.read_text().replace('"CLOSED"', '"KEPT"'))


def states(result: Result) -> dict[int, str]:
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {row["containerID"]: row["state"] for row in rows}


def test_each_container_is_printed_before_the_next_is_read(root: Path) -> None:
    for at in range(1, CONTAINERS + 1):
        printed, said = interrupt(root, at)
        assert printed == list(range(1, at))
        assert f"{at - 1} of {CONTAINERS} containers are done; the same command with" in said
        assert "--resume" in said


def test_what_was_read_is_not_read_again(root: Path) -> None:
    interrupt(root, 3)
    mark(root)

    result = build(root, "--resume", "--json")

    assert states(result) == {1: "KEPT", 2: "KEPT", 3: "CLOSED"}
    assert "2 containers were read by the interrupted build" in result.stderr
    assert result.exit_code == 0


def test_what_has_changed_since_is_read_again(root: Path) -> None:
    interrupt(root, 3)
    mark(root)
    (block,) = (root / "hdds").rglob("current/containerDir0/1/chunks/20.block")
    before = block.stat()
    flip(block, 100)
    # As a copy with its times would: only the time of the change shows it.
    os.utime(block, ns=(before.st_atime_ns, before.st_mtime_ns))

    result = build(root, "--resume", "--json")

    assert states(result) == {1: "CLOSED", 2: "KEPT", 3: "CLOSED"}
    assert "1 container was read" in result.stderr
    assert result.exit_code == ExitCode.FINDINGS


def test_findings_of_the_interrupted_build_count(root: Path) -> None:
    (block,) = (root / "hdds").rglob("current/containerDir0/1/chunks/20.block")
    flip(block, 100)
    interrupt(root, 2)

    result = build(root, "--resume")

    assert result.exit_code == ExitCode.FINDINGS
    assert "container 1: CORRUPT_CHUNK block 20 offset 0" in result.stdout


def test_without_the_option_all_is_read_and_a_build_that_ends_leaves_nothing(root: Path) -> None:
    interrupt(root, 3)
    mark(root)
    assert set(states(build(root, "--json")).values()) == {"CLOSED"}
    assert not list((root.parent / "state" / "treefold" / "tree-build").iterdir())
    result = build(root, "--resume", "--json")
    assert set(states(result).values()) == {"CLOSED"}
    assert "read by the interrupted build" not in result.stderr


def test_results_of_other_sources_are_not_taken(root: Path) -> None:
    interrupt(root, 3)
    mark(root)
    result = build(root, "--resume", "--source", "metadata", "--json")
    assert set(states(result).values()) == {"CLOSED"}


def test_with_nothing_to_resume_all_is_read_and_that_is_said(root: Path) -> None:
    result = build(root, "--resume", "--json")
    assert (result.exit_code, len(states(result))) == (0, CONTAINERS)
    assert "note: there is nothing to resume" in result.stderr


def damaged(line: bytes) -> Iterator[bytes]:
    """What a kept line may become."""
    root, number, version, result = json.loads(line)
    shown = result["shown"]
    odd = [{"a": 1}, [1], [], 7, None, "x", True, [root, number, version]]
    odd += [[7, number, version, result], [root, str(number), version, result]]
    odd += [[root, True, version, result], [root, number, None, result]]
    odd += [[root, number, version, one] for one in (None, [], {}, result | {"more": 1})]
    odd += [[root, number, version, result | {"shown": one}] for one in (None, [], {}, "x")]
    odd += [[root, number, version, result | {"findings": one}] for one in ("x", [1], {})]
    changes = {"blocks": "1", "deletedBlocks": -1, "containerID": 7, "state": None, "notes": 1}
    changes |= {"dataChecksum": 5}
    for name, value in (*changes.items(), ("blocks", 1 << 63), ("blocks", 1e300)):
        odd.append([root, number, version, result | {"shown": shown | {name: value}}])
    yield from (json.dumps(one).encode() for one in odd)
    for text in ("9" * 5000, "1e999", "NaN", "[" * 990 + "]" * 990, "[" * 99_999):
        yield line.strip().replace(b'"blocks": 1', b'"blocks": ' + text.encode())
    yield from (b"", b"\0\0\0", b"\xff\xfe", b"{", line[:40], line.strip() + b"]")


def test_a_damaged_result_is_named_by_its_line_and_nothing_is_lost(root: Path) -> None:
    interrupt(root, 3)
    file = results_file(root)
    first, second = file.read_bytes().splitlines(keepends=True)
    for text in damaged(second):
        assert text + b"\n" != second
        file.write_bytes(first + text + b"\n")
        for words in ([], ["--json"]):
            result = build(root, "--resume", *words)
            assert result.exit_code == 1, (text[:300], result.output)
            assert f"{file}: line 2 is not a result of an interrupted build: " in result.output
            assert "Build without --resume" in result.output
            assert "[internal]" not in result.output
        assert file.read_bytes() == first + text + b"\n"
    assert set(states(build(root, "--json")).values()) == {"CLOSED"}


def test_two_builds_of_the_same_paths_are_refused(root: Path) -> None:
    interrupt(root, 2)
    with results_file(root).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = build(root)
    assert result.exit_code == BusyError.exit_status
    assert "another build of the same paths is running" in result.stderr


def test_without_a_folder_for_state_nothing_can_be_resumed(root: Path) -> None:
    (root.parent / "file").touch()
    result = build(root, "--json", state="file")
    assert (result.exit_code, len(states(result))) == (0, CONTAINERS)
    assert "note: this build cannot be resumed" in result.stderr
    refused = build(root, "--resume", state="file")
    assert (refused.exit_code, refused.stdout) == (1, "")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerStore]:
    folder = tmp_path_factory.mktemp("results")
    with VolumeMaker(folder / "volume") as made:
        for number in range(1, CONTAINERS + 1):
            made.container(number)
    disk = Disk()
    with open_volume(
        made.root, hold=Hold.READ_ONLY, state_folder=folder / "scratch", disk=disk
    ) as volume:
        yield ContainerStore(volume, disk)


@settings(max_examples=30)
@given(
    lines=st.integers(0, CONTAINERS),
    torn=st.integers(0, 60),
    tail=st.sampled_from([b"", b"\0\0\0", b"[]", b"\xff", b"[" * 5000]),
)
@example(lines=2, torn=1, tail=b"")
def test_of_a_build_that_was_killed_whole_lines_are_taken_and_continued(
    store: ContainerStore, lines: int, torn: int, tail: bytes
) -> None:
    """Law: whatever is left of the file, what it gives is a beginning of what was
    added, and what is added then is found later.
    """
    folder = store.volume.root.parent / "kept"
    containers = [store.get(ContainerId(number)) for number in range(1, CONTAINERS + 1)]
    made = [BuildResult("x", SHOWN | {"containerID": n}, ("f",), ()) for n in range(1, 4)]

    def opened(*, resume: bool) -> contextlib.closing[BuildResults]:
        return contextlib.closing(BuildResults(folder, [store.volume.root], "data", resume=resume))

    with opened(resume=False) as results:
        for one, result in zip(containers, made, strict=True):
            results.add(one, one.version(), result)
    (file,) = folder.iterdir()
    left = b"".join(file.read_bytes().splitlines(keepends=True)[:lines])
    file.write_bytes(left[: max(0, len(left) - torn)] + tail)
    # Half a line may be whole JSON by chance, but never a whole line.
    with opened(resume=True) as results:
        kept = [results.earlier(one) for one in containers]
        known = sum(one is not None for one in kept)
        assert kept == [*made[:known], *([None] * (CONTAINERS - known))]
        results.add(containers[-1], containers[-1].version(), made[-1])
    with opened(resume=True) as results:
        assert results.earlier(containers[-1]) == made[-1]
        assert [results.earlier(one) for one in containers[:known]] == made[:known]
