"""`treefold verifier run` as a process: mutual TLS, one owner of a state folder,
damaged state, signals and kills.
"""

import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import UUID

import pytest
import trustme
from click.testing import CliRunner

from admin.cli import treefold
from merkle.errors import ReconcileError
from proof.stored_index import StoredIndex
from replicator.hashing import blake3_of
from replicator.ledger import PairLedger
from replicator.proven_sync import ProvenSync
from replicator.refresh import IndexedBucket
from replicator.stores.local import LocalBucket
from replicator.stores.opening import open_store
from replicator.stores.port import Store
from replicator.sync import SyncOptions, SyncReport
from replicator.verifier.client import VerifierClient, VerifierUnavailableError
from replicator.verifier.values import Write
from runtime.disk import Disk
from runtime.errors import AccessDeniedError
from runtime.rate_limit import SystemClock
from tests.support.bucket_command import BucketCommand
from tests.support.bucket_sync import Remarks
from tests.support.identities import certificate, tls_in
from tests.support.processes import TreefoldProcess
from tests.support.stores import NOTHING, keys, put
from tests.support.verifiers import held
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.e2e


def start(folder: Path, *, bucket: Path, settings: str = "", name: str = "run") -> TreefoldProcess:
    """A verifier whose state lies in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(
        f'bucket = "local:{bucket}"\nstate_folder = "{folder / "state"}"\n'
        f'listen = "127.0.0.1:0"\nwrites = true\n{settings}'
    )
    command = ("verifier", "run", "--config", str(path), "--log-format", "json")
    return TreefoldProcess(folder / name, *command)


@contextmanager
def buckets(folder: Path) -> Iterator[tuple[LocalBucket, LocalBucket]]:
    """A source and a target."""
    with (
        LocalBucket(folder / "source", Disk(), create=True) as source,
        LocalBucket(folder / "target", Disk(), create=True) as target,
    ):
        yield source, target


def sync(folder: Path, client: VerifierClient) -> SyncReport:
    """A run between the two, by the verifier's client."""
    profile = client.describe().profile
    with (
        open_store(f"local:{folder / 'source'}", may_write=False) as source,
        open_store(f"local:{folder / 'target'}", may_write=True) as target,
        closing(StoredIndex(folder / "index", profile, disk=Disk())) as index,
        PairLedger(folder / "ledger", source=source.address, target=target.address) as ledger,
        ProvenSync(
            IndexedBucket(source, index, profile, SystemClock()),
            target,
            ledger,
            client,
            SyncOptions(),
            progress=Remarks(),
            clock=SystemClock(),
            sleep=lambda _s: None,
            is_cancelled=lambda: False,
        ) as run,
    ):
        return run.execute(run.plan())


def test_a_sync_over_mutual_tls_wants_an_operator_and_a_stranger_is_kept_out(
    tmp_path: Path,
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    pems = certificate(authority, tmp_path / "pems", "verifier", "verifier/target")
    tls = "".join(f'{name} = "{pems / name}.pem"\n' for name in ("cert", "key", "ca"))
    with buckets(tmp_path) as (source, _):
        for number in range(50):
            put(source.store(), f"{number}", bytes([number]))
    with start(tmp_path / "v", bucket=tmp_path / "target", settings=f"[tls]\n{tls}") as verifier:
        address = verifier.address()

        def client(authority: trustme.CA, name: str, *role: str) -> "closing[VerifierClient]":
            files = tls_in(certificate(authority, tmp_path / "pems", name, *role))
            return closing(VerifierClient(address, tls=files))

        with (
            client(authority, "agent", f"datanode/{UUID(int=1)}") as agent,
            pytest.raises(AccessDeniedError, match="needs the role operator or syncer or verifier"),
        ):
            agent.describe()
        with client(authority, "syncer", "operator/sync") as trusted:
            report = sync(tmp_path, trusted)
        assert (report.equal, report.copied) == (True, 50)
        with client(stranger, "stranger") as other, pytest.raises(VerifierUnavailableError):
            other.describe()
        with closing(VerifierClient(address)) as plain, pytest.raises(VerifierUnavailableError):
            plain.describe()
        assert verifier.stop(signal.SIGTERM) == 0


def test_a_state_folder_belongs_to_one_verifier(tmp_path: Path) -> None:
    with buckets(tmp_path):
        pass
    with start(tmp_path / "v", bucket=tmp_path / "target") as first:
        first.address()
        with start(tmp_path / "v", bucket=tmp_path / "target", name="second") as second:
            assert second.ended() == 8
            assert "is in use by treefold verifier" in second.stderr
            assert "Traceback" not in second.stderr
        # A killed one does not block the next.
        first.stop(signal.SIGKILL)
    with start(tmp_path / "v", bucket=tmp_path / "target", name="third") as third:
        third.address()
        assert third.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '"x"',
        "\0",
        '{"bucket": "b", "secret": "00", "algorithm": "blake3", "properties": []}',
        '{"bucket": "b", "secret": "zz", "algorithm": "blake3", "properties": []}',
        '{"bucket": "b", "secret": "SECRET", "algorithm": "none", "properties": []}',
        '{"bucket": "b", "secret": "SECRET", "algorithm": "blake3", "properties": 5}',
        '{"bucket": "b", "secret": "SECRET", "algorithm": "blake3", "properties": [5]}',
        '{"secret": "SECRET", "algorithm": "blake3", "properties": []}',
    ],
)
def test_a_damaged_profile_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    with buckets(tmp_path):
        pass
    state = tmp_path / "state"
    state.mkdir()
    text = text.replace("SECRET", "00" * 32)
    (state / "profile.json").write_text(text)
    words = ["verifier", "run", "--bucket", f"local:{tmp_path / 'target'}"]
    words += ["--state-folder", str(state), "--listen", "127.0.0.1:0"]
    result = CliRunner().invoke(treefold, words)
    assert result.exit_code == 2
    assert "profile.json: is damaged" in result.stderr
    assert (state / "profile.json").read_text() == text


def test_the_state_of_another_bucket_is_refused(tmp_path: Path) -> None:
    with buckets(tmp_path):
        pass
    with start(tmp_path / "v", bucket=tmp_path / "target") as verifier:
        verifier.address()
        verifier.stop(signal.SIGTERM)
    profile = tmp_path / "v" / "state" / "profile.json"
    # The secret keys the IDs.
    assert profile.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(json.loads(profile.read_text())["secret"])) == 32
    with start(tmp_path / "v", bucket=tmp_path / "source", name="other") as other:
        assert other.ended() == 2
        assert "is the state of local:" in other.stderr


def test_sigterm_in_a_scrub_keeps_what_was_read(tmp_path: Path) -> None:
    with buckets(tmp_path) as (_, target):
        for number in range(40):
            put(target.store(), f"{number:02}", bytes(10_000))
    # 400,000 bytes at this rate take longer than the test waits.
    scrub = "[scrub]\nread_again_after_s = 1\nbytes_per_second = 20_000\n"
    with start(tmp_path / "v", bucket=tmp_path / "target", settings=scrub) as verifier:
        with closing(VerifierClient(verifier.address())) as client:
            profile = client.describe().profile
            wait_until(lambda: client.describe().index.evidence.read > 0, "an object to be read")
            # Nobody waits for a scrub.
            assert client.refresh(profile).listed_at_s is not None
            [result] = client.write(profile, [[Write("new", b"x", NOTHING, blake3_of(b"x"), None)]])
            assert result.results[0].error == ""
        assert verifier.stop(signal.SIGTERM) == 0
        assert "Traceback" not in verifier.stderr
    off = "[scrub]\nenabled = false\n"
    with (
        start(tmp_path / "v", bucket=tmp_path / "target", settings=off, name="2") as again,
        closing(VerifierClient(again.address())) as client,
    ):
        evidence = client.refresh(client.describe().profile).evidence
        assert 0 < evidence.read < 41
        assert evidence.read + evidence.recorded == 41


@pytest.mark.crashes
def test_a_verifier_killed_in_a_batch_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(1)
    with buckets(tmp_path) as (source, target):
        for number in range(600):
            put(source.store(), f"{number:04}", chance.randbytes(10_000))
        for number in range(3):
            killed_in_a_sync(tmp_path, target.store(), f"run-{number}")
            assert 0 < len(keys(target.store())) < 600
        with (
            start(tmp_path / "v", bucket=tmp_path / "target", name="last") as verifier,
            closing(VerifierClient(verifier.address())) as client,
        ):
            written = len(keys(target.store()))
            report = sync(tmp_path, client)
        # What was written once is not sent again.
        assert (report.equal, report.copied) == (True, 600 - written)
        assert held(target.store()) == held(source.store())


def killed_in_a_sync(folder: Path, target: Store, name: str) -> None:
    """Kill a verifier once a sync has written something through it."""
    failures, before = list[ReconcileError](), len(keys(target))
    with (
        start(folder / "v", bucket=folder / "target", name=name) as verifier,
        closing(VerifierClient(verifier.address())) as client,
    ):

        def run() -> None:
            try:
                sync(folder, client)
            except ReconcileError as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: len(keys(target)) > before + 20, "some writes")
        verifier.stop(signal.SIGKILL)
        thread.join()
    assert [error.code for error in failures] == ["verifier_unavailable"]


def words(folder: Path, address: str, *others: str) -> tuple[str, ...]:
    """The arguments of `treefold bucket` for a sync between the two."""
    sides = f"local:{folder / 'source'}", f"local:{folder / 'target'}"
    return ("sync", *sides, "--verifier", address, "--state", str(folder / "pair"), *others)


@pytest.mark.crashes
@pytest.mark.parametrize("killed", ["sync", "verifier"])
def test_either_process_killed_in_a_batch_is_continued(tmp_path: Path, killed: str) -> None:
    chance, command = random.Random(2), BucketCommand(tmp_path / "home")
    with buckets(tmp_path) as (source, target):
        for number in range(300):
            put(source.store(), f"{number:04}", chance.randbytes(10_000))
        with start(tmp_path / "v", bucket=tmp_path / "target") as verifier:
            # At this rate the first batch goes out after a third of the time.
            slowly = words(tmp_path, verifier.address(), "--rate", "500kB", "--json")
            with command.start(*slowly) as process:
                wait_until(lambda: len(keys(target.store())) > 20, "some writes")
                if killed == "sync":
                    process.kill()
                else:
                    verifier.stop(signal.SIGKILL)
                stdout, stderr = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == (-signal.SIGKILL if killed == "sync" else 7)
            assert killed == "sync" or "verifier_unavailable" in stdout
            assert "Traceback" not in stderr
            written = len(keys(target.store()))
            assert 20 < written < 300
            if killed == "sync":
                # Its last batches may still arrive while the next run goes on.
                again = command.run(*words(tmp_path, verifier.address(), "--json"))
        if killed == "verifier":
            with start(tmp_path / "v", bucket=tmp_path / "target", name="next") as verifier:
                again = command.run(*words(tmp_path, verifier.address(), "--json"))
        assert again.status == 0, again.stderr
        assert again.last["equal"] is True
        assert again.last["copied"] <= 300 - written
        assert held(target.store()) == held(source.store())
    receipts = command.call("receipts", "verify", str(tmp_path / "pair" / "receipts.jsonl"))
    assert receipts.status == 0, receipts.stderr
