"""A replication whose target has a verifier: what goes through it, what is proven."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest

from replicator.refresh import READ_ALL_S
from replicator.replication import Condition, ReplicationFault, ReplicationOptions
from replicator.stores.port import ObjectProperties
from replicator.syncer.lease import LocalLease
from replicator.syncer.target_verifier import TargetVerifier
from replicator.verifier.client import VerifierClient, VerifierUnavailableError
from replicator.verifier.values import KeyWrite
from tests.support.bucket_command import flip_a_bit
from tests.support.replications import Replication, step_limits
from tests.support.stores import put
from tests.support.verifiers import VerifiedPair, fill, held, verified_pair

MIB = 1 << 20
LIMITS = replace(step_limits(), prove_every_s=10.0)


@dataclass
class Followed:
    """A pair of buckets, and a replication that follows its source."""

    pair: VerifiedPair
    replication: Replication

    def settle(self, steps: int = 400) -> None:
        """Go on until the target is proven equal."""
        for _ in range(steps):
            self.replication.step(0.2)
            report = self.replication.engine.report()
            is_done = not (report.queued or report.failed)
            if (
                is_done
                and report.differences == 0
                and held(self.pair.source) == held(self.pair.target)
            ):
                return
        raise AssertionError(report)


@contextmanager
def followed(folder: Path, lease: LocalLease | None = None) -> Iterator[Followed]:
    """Two local buckets with a verifier beside the target."""
    with verified_pair(folder) as pair:
        fill(pair.source, 8)
        replication = Replication(
            pair.source,
            pair.target,
            folder / "state",
            limits=LIMITS,
            lease=lease or LocalLease(),
            verifier=pair.client,
        )
        try:
            yield Followed(pair, replication)
        finally:
            replication.engine.close()


def audited(one: Followed) -> dict[str, list[str]]:
    """The keys of the verifier's audit file, by kind."""
    found = dict[str, list[str]]()
    for line in (one.pair.folder / "verifier" / "audit.jsonl").read_text().splitlines():
        entry = json.loads(line)
        keys = (entry[name] for name in ("first", "last", "key") if name in entry)
        found.setdefault(entry["kind"], []).extend(keys)
    return found


def test_all_changes_go_through_the_verifier_and_are_proven(tmp_path: Path) -> None:
    with followed(tmp_path) as one:
        one.settle()
        put(one.pair.source, "new", b"x" * 3000)
        put(one.pair.source, "00001-é", b"changed")
        one.pair.source.writer.delete(["00002-é"])
        facts = one.pair.source.reader.facts("00004-é")
        assert facts is not None
        properties = ObjectProperties(metadata=(("m", "1"),))
        one.pair.source.writer.put_properties(facts, properties)
        one.settle()
        report = one.replication.engine.report()
        assert (report.condition, report.fault) == (Condition.ACTIVE, None)
        assert report.proof_level == "recorded:blake3"
        assert report.proven_position is not None
        found = audited(one)
        assert {"new", "00001-é", "00004-é"} <= set(found["put"])
        assert found["delete"] == ["00002-é"]
        # Its index has followed: a refresh finds nothing else.
        assert one.pair.client.refresh(one.pair.profile).settled is not None


def test_what_a_stranger_did_at_the_target_is_found_by_the_proof(tmp_path: Path) -> None:
    with followed(tmp_path) as one:
        one.settle()
        put(one.pair.target, "00001-é", b"a stranger's")
        put(one.pair.target, "extra", b"a stranger's")
        one.pair.target.writer.delete(["00002-é"])
        listed = one.pair.client.calls
        one.replication.run(100, seconds=0.2)
        one.settle()
        assert one.pair.client.calls > listed


def test_rounds_know_what_a_comparison_by_indexes_has_found_equal(tmp_path: Path) -> None:
    """A syncer on another machine has no ledger. What the source's listing lacks later
    must be known to be at the target.
    """
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 8)
        assert pair.sync().equal
        source = replace(pair.source, feed=None, snapshots=None)
        replication = Replication(
            source,
            pair.target,
            tmp_path / "state",
            limits=replace(LIMITS, prove_every_s=3600.0),
            options=ReplicationOptions(interval_s=5.0),
            verifier=pair.client,
        )
        one, engine = Followed(pair, replication), replication.engine
        one.settle()
        while engine.report().proof_level != "recorded:blake3":
            replication.step(0.2)
        pair.source.writer.delete(["00003-é"])
        deleted_ms = replication.clock.ms
        for _ in range(400):
            replication.step(0.2)
            if (engine.report().oldest_unproven_ms or 0) > deleted_ms:
                break
        assert "00003-é" not in held(pair.target)
        engine.close()


def test_damage_behind_the_targets_own_records_is_repaired(tmp_path: Path) -> None:
    """The ledger takes both sides for equal, and so do the stamps of the target."""
    with followed(tmp_path) as one:
        one.settle()
        put(one.pair.source, "rots", b"what is stored by itself" * 2_000)
        one.settle()
        flip_a_bit(one.pair.folder / "target", b"what is stored by itself" * 2_000)
        assert held(one.pair.source) != held(one.pair.target)
        one.pair.client.refresh(one.pair.profile, read_since_s=READ_ALL_S)
        one.settle()


def test_of_a_large_object_only_the_changed_windows_cross(tmp_path: Path) -> None:
    with followed(tmp_path) as one:
        body = bytearray(random.Random(3).randbytes(4 * MIB))
        put(one.pair.source, "large", bytes(body))
        one.settle()
        sent = one.replication.engine.report().sent_bytes
        body[2 * MIB] ^= 1
        put(one.pair.source, "large", bytes(body))
        one.settle()
        assert one.replication.engine.report().sent_bytes - sent == 16 << 10
        assert audited(one)["patch"] == ["large"]


class _EpochLease(LocalLease):
    """A lease of a later epoch."""

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def epoch(self) -> int:
        """See Lease."""
        return self._number


def test_a_verifier_refuses_a_syncer_of_an_older_epoch(tmp_path: Path) -> None:
    """OZ-048, OZ-049: also once it has restarted."""
    with followed(tmp_path, _EpochLease(7)) as one:
        one.settle()
        policy, clock = one.replication.policy, one.replication.clock
        client, profile = VerifierClient(one.pair.client.address), one.pair.profile
        for epoch, is_taken in ((6, False), (7, True), (8, True), (7, False)):
            other = TargetVerifier(client, policy, _EpochLease(epoch), clock)
            assert (other.session() is not None) == is_taken
            assert (other.trouble is None) == is_taken
        (outcome,) = client.write_keys(profile, [KeyWrite("none")])
        client.close()
        assert not outcome.error
        # The one of epoch 7 is told so, and writes by the target's own store.
        put(one.pair.source, "00001-é", b"by the store")
        for _ in range(10):
            one.replication.step(0.2)
        report = one.replication.engine.report()
        assert report.fault is ReplicationFault.VERIFIER_UNAVAILABLE
        assert "epoch 8" in report.message or "later run" in report.message
        assert held(one.pair.target)["00001-é"][0] == b"by the store"


def test_a_replication_goes_on_without_its_verifier_and_says_so(tmp_path: Path) -> None:
    with followed(tmp_path) as one, pytest.MonkeyPatch.context() as patch:
        one.settle()

        def silent(*_given: object, **_named: object) -> NoReturn:
            raise VerifierUnavailableError("no answer")

        for name in ("write_keys", "facts", "prove", "refresh", "describe", "begin"):
            patch.setattr(one.pair.client, name, silent)
        put(one.pair.source, "new", b"x")
        one.pair.source.writer.delete(["00002-é"])
        one.replication.run(20)
        report = one.replication.engine.report()
        assert report.condition is Condition.ACTIVE
        assert report.fault is ReplicationFault.VERIFIER_UNAVAILABLE
        assert held(one.pair.source) == held(one.pair.target)
        # A comparison lists the target meanwhile.
        put(one.pair.target, "00001-é", b"a stranger's")
        one.replication.run(100, seconds=0.2)
        assert held(one.pair.source) == held(one.pair.target)
        patch.undo()
        one.replication.run(20, seconds=2.0)
        put(one.pair.source, "newer", b"x")
        one.settle()
        report = one.replication.engine.report()
        assert report.fault is None
        assert "newer" in audited(one)["put"]
