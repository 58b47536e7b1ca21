"""`bucket sync --watch --verifier`: both processes are killed while changes come.
Nothing is lost, and fewer bytes cross than without a verifier.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from replicator.stores.local import LocalBucket
from replicator.stores.opening import open_store
from runtime.disk import Disk
from tests.support.bucket_commands import s3_address
from tests.support.processes import ROOT, TreefoldProcess
from tests.support.s3_servers import S3Bucket, S3Endpoint, free_port
from tests.support.stores import put
from tests.support.verifiers import held
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

pytestmark = [pytest.mark.e2e, pytest.mark.crashes]

OBJECTS = 240
PATIENCE_S = 120.0
BODY_BYTES = 512


@dataclass
class Site:
    """A source here, a target beyond counting links, and a verifier beside that."""

    folder: Path
    source: LocalBucket
    bucket: S3Bucket
    to_store: WanLink
    to_verifier: WanLink
    port: int

    def verifier(self) -> TreefoldProcess:
        """The verifier, which listens at the same port each time."""
        path = self.folder / "verifier.toml"
        path.write_text(
            f'bucket = "{s3_address(self.bucket)}"\nstate_folder = "{self.folder / "state"}"\n'
            f'listen = "127.0.0.1:{self.port}"\nwrites = true\n'
        )
        environment = os.environ | self.bucket.endpoint.environment
        command = ("verifier", "run", "--config", str(path))
        return TreefoldProcess(self.folder / "verifier", *command, environment=environment)

    @contextmanager
    def watching(self, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        """The command that follows the source, across the links."""
        target = s3_address(self.bucket, self.to_store.through(self.bucket.endpoint))
        command = [sys.executable, "-m", "admin.cli", "bucket", "sync", "--watch", "--json"]
        command += [*options, "--state", str(self.folder / "watch")]
        command += [f"local:{self.folder / 'source'}", target]
        environment = os.environ | self.bucket.endpoint.environment
        with (
            (self.folder / "printed").open("ab") as out,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def write(self, first: int, count: int) -> None:
        """So many objects, of which no two are equal."""
        store = self.source.store()
        for number in range(first, first + count):
            put(store, f"k{number:05}", number.to_bytes(4, "big") * (BODY_BYTES // 4))

    def count(self) -> int:
        """How many objects the target has."""
        with self.bucket.endpoint.client() as client:
            return int(client.list_objects_v2(Bucket=self.bucket.name)["KeyCount"])

    def crossed(self) -> int:
        """The bytes on both links, in both directions."""
        links = (self.to_store, self.to_verifier)
        return sum(link.traffic().total.length_bytes for link in links)

    def await_count(self, count: int) -> None:
        """Wait until the target has so many objects."""
        what = f"{count} objects at the target"
        wait_until(lambda: self.count() == count, what, timeout_s=PATIENCE_S)


@contextmanager
def site(folder: Path, server: S3Endpoint) -> Iterator[Site]:
    folder.mkdir()
    with ExitStack() as opened:
        source = opened.enter_context(LocalBucket(folder / "source", Disk(), create=True))
        bucket, port = server.fresh_bucket(), free_port()
        to_store = opened.enter_context(WanLink(server.address))
        to_verifier = opened.enter_context(WanLink(f"127.0.0.1:{port}"))
        yield Site(folder, source, bucket, to_store, to_verifier, port)


def test_killed_processes_lose_nothing_and_less_crosses(
    tmp_path: Path, ministack_server: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site(tmp_path / "plain", ministack_server) as plain, plain.watching():
        plain.write(0, OBJECTS)
        plain.await_count(OBJECTS)
        without = plain.crossed()
    ministack_server.set_environment(monkeypatch)
    with site(tmp_path / "verified", ministack_server) as verified:
        option = ("--verifier", verified.to_verifier.address)
        with verified.verifier() as process:
            # Who asks one that does not listen yet, writes without it.
            process.address()
            with verified.watching(*option) as watcher:
                verified.write(0, 80)
                wait_until(lambda: verified.count() > 20, "some objects", timeout_s=PATIENCE_S)
                watcher.kill()
            with verified.watching(*option):
                verified.write(80, 80)
                wait_until(lambda: verified.count() > 100, "more objects", timeout_s=PATIENCE_S)
                process.process.kill()
                verified.await_count(160)
        with verified.verifier() as process, ExitStack() as watched:
            process.address()
            watched.enter_context(verified.watching(*option))
            verified.write(160, OBJECTS - 160)
            verified.source.store().writer.delete(["k00000"])
            verified.await_count(OBJECTS - 1)
            crossed = verified.crossed()
            with open_store(s3_address(verified.bucket), may_write=False) as target:
                # The server adds a content type to each.
                theirs, ours = (held(one) for one in (target, verified.source.store()))
            bodies = {key: body for key, (body, _) in ours.items()}
            assert {key: body for key, (body, _) in theirs.items()} == bodies
        assert (verified.folder / "state" / "audit.jsonl").stat().st_size
        assert verified.to_verifier.traffic().total.length_bytes > OBJECTS * BODY_BYTES / 2
        assert crossed < without, (crossed, without)
