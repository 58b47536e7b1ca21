"""What the demo calls healed: what was reconciled, and is proven."""

from admin.demo.cluster import ScannedReplica
from admin.demo.offline_check import Flaw, Proof
from admin.demo.result import DemoResult, report
from merkle.outcome import Verdict
from merkle.tree import ContainerId

ONE, TWO = ContainerId(1), ContainerId(2)
CODED = "INELIGIBLE_REPLICATION_TYPE"


def result(*, unverifiable: frozenset[ContainerId] = frozenset(), flaw: str = "") -> DemoResult:
    """Container 1 erasure-coded, its replicas of different roots."""
    after = [
        ScannedReplica(name, ONE, "CLOSED", root, replica_index=root)
        for root, name in enumerate(("dn1", "dn2"), start=1)
    ]
    flaws = (Flaw(ONE, "dn1", flaw),) if flaw else ()
    proof = Proof(1, 100, 0, flaws, unverifiable)
    return DemoResult(("dn1", "dn2"), after=after, refused={ONE: CODED}, proof=proof)


def test_what_was_read_and_not_reconciled_is_not_healed() -> None:
    coded = result()

    assert (coded.healed, coded.not_reconciled, coded.unhealed) == ([], [ONE], [])
    assert coded.exit_status == 6
    assert "HEALED" not in coded.summary
    assert "READ AND CHECKED, NONE RECONCILED" in coded.summary
    assert report(coded)["notReconciled"] == [ONE]


def test_what_was_read_with_a_flaw_is_not_healed_either() -> None:
    coded = result(flaw="CORRUPT_CHUNK")

    assert (coded.unhealed, coded.not_reconciled, coded.exit_status) == ([ONE], [], 1)
    assert coded.summary == "NOT HEALED"


def test_beside_a_healed_container_it_is_named_and_not_counted() -> None:
    both = result()
    both.after += [ScannedReplica(name, TWO, "CLOSED", 5) for name in ("dn1", "dn2")]
    both.verdicts[TWO] = Verdict.MATCH

    assert (both.healed, both.not_reconciled, both.exit_status) == ([TWO], [ONE], 0)
    assert both.summary == "HEALED"


def test_without_any_checksum_there_is_nothing_to_heal() -> None:
    bare = result(unverifiable=frozenset({ONE}))

    assert (bare.healed, bare.unverifiable, bare.exit_status) == ([], [ONE], 0)
    assert bare.summary.startswith("NOTHING TO HEAL")
