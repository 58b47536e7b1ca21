"""What a comparison with a verifier says of levels: never more than holds of the keys,
though each side tells only how many of its items it knows how.
"""

from hypothesis import given
from hypothesis import strategies as st

from proof.comparison import BucketComparison
from proof.index import AppliedPositions, EvidenceCounts, Position
from proof.item import EvidenceLevel
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.root import SetRoot
from replicator.part_proofs import DifferenceTally
from replicator.proving import PairProof

# How each side knows a key; None where it does not have it.
levels = st.none() | st.sampled_from(EvidenceLevel)
keys = st.lists(st.tuples(levels, levels), max_size=30)


def evidence(known: list[EvidenceLevel | None]) -> EvidenceCounts:
    """The counts of one side."""
    listed, recorded, read = (known.count(level) for level in EvidenceLevel)
    return EvidenceCounts(listed, recorded, read, 5 if read else None)


@given(compared=keys, outside=keys, names=st.booleans())
def test_no_key_counts_at_a_level_that_it_may_not_have(
    compared: list[tuple[EvidenceLevel | None, EvidenceLevel | None]],
    outside: list[tuple[EvidenceLevel | None, EvidenceLevel | None]],
    names: bool,
) -> None:
    # The evidence is of the whole bucket, also where only a part is compared.
    ours, theirs = ([pair[at] for pair in compared + outside] for at in (0, 1))
    alone = [pair for pair in compared if (pair[0] is None) != (pair[1] is None)]
    kinds = [
        ItemDifferenceKind.EXTRA if near is None else ItemDifferenceKind.MISSING
        for near, _ in alone
    ]
    found = BucketComparison(
        job=b"",
        ours=SetRoot(sum(near is not None for near, _ in compared), 1),
        theirs=SetRoot(sum(far is not None for _, far in compared), 2),
        cut=AppliedPositions(Position(0)),
        position=Position(0),
        ours_evidence=evidence(ours),
        theirs_evidence=evidence(theirs),
    )
    differences = tuple(ItemDifference(kind, f"{at}", "") for at, kind in enumerate(kinds))
    # What is in flight has no name yet.
    named = differences if names else ()
    tally = DifferenceTally(len(named))
    proof = PairProof(found, named, len(alone) - len(named), 0, 1, is_settled=True, tally=tally)
    both = [min(near, far) for near, far in compared if near is not None and far is not None]
    assert proof.objects == (len(both) + len(alone) if names else found.ours.count)
    assert sum(proof.levels.values()) == proof.objects
    read, recorded = (proof.levels[one] for one in (EvidenceLevel.READ, EvidenceLevel.RECORDED))
    assert read <= both.count(EvidenceLevel.READ)
    assert read + recorded <= len(both) - both.count(EvidenceLevel.LISTED)
    if not outside and not alone and both and set(ours) == set(theirs) == {EvidenceLevel.READ}:
        assert (read, proof.oldest_read_at_s) == (len(both), 5)
