"""Laws of the rounds of Ozone's reconciliation, and of their pace."""

from hypothesis import given
from hypothesis import strategies as st

from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.ozone_rounds import (
    OZONE_ROUNDS_MAX,
    OzoneOutcome,
    OzoneRun,
    RoundStep,
    observe,
    request_sent,
)
from scm.pace import Pace, PaceLimits
from scm.policy import Knowledge
from tests.support.ozone_cluster_twin import replica

SETTLE_S = 60.0
KNOWN = Knowledge(3)
PEERS = ("dn-0", "dn-1", "dn-2")

views = st.lists(
    st.tuples(
        st.tuples(*(st.one_of(st.none(), st.integers(1, 3)) for _ in PEERS)),
        st.floats(0, 200),
    ),
    min_size=1,
    max_size=40,
)


@given(views)
def test_a_run_is_bounded_and_says_only_what_the_last_roots_bear_out(
    history: list[tuple[tuple[int | None, ...], float]],
) -> None:
    run, now_s = OzoneRun(ContainerId(1)), 0.0
    for roots, passed_s in history:
        now_s += passed_s
        replicas = [replica(peer, root) for peer, root in zip(PEERS, roots, strict=True)]
        run, step = observe(run, replicas, KNOWN, now_s=now_s, settle_s=SETTLE_S)
        assert run.round <= OZONE_ROUNDS_MAX
        known = set(roots) - {None}
        if run.outcome is OzoneOutcome.EQUAL:
            assert len(known) == 1
            assert None not in roots
        elif run.outcome is OzoneOutcome.NOT_CONVERGING:
            assert len(known) > 1
            assert run.round >= 2
        elif run.outcome is OzoneOutcome.UNKNOWN:
            assert run.detail
        if run.outcome is not None:
            again = observe(run, replicas, KNOWN, now_s=now_s + 1e6, settle_s=SETTLE_S)
            assert again == (run, RoundStep.END)
            return
        if step is RoundStep.REQUEST:
            # A request that waits for its turn is wanted still, and costs nothing.
            waited, same = observe(run, replicas, KNOWN, now_s=now_s, settle_s=SETTLE_S)
            assert (waited, same) == (run, RoundStep.REQUEST)
            run = request_sent(run, replicas, now_s)


@given(
    st.integers(1, 3),
    st.integers(0, 5),
    st.lists(
        st.tuples(st.integers(1, 8), st.sets(st.sampled_from(PEERS), min_size=2), st.booleans()),
        max_size=60,
    ),
)
def test_no_datanode_and_no_hour_gets_more_than_its_limit(
    per_datanode: int, per_hour: int, events: list[tuple[int, set[str], bool]]
) -> None:
    pace = Pace(PaceLimits(per_datanode=per_datanode, per_hour=per_hour))
    running, times, now_s = dict[int, set[str]](), list[float](), 0.0
    for number, peers, ends in events:
        now_s += 400
        container_id, on = ContainerId(number), [PeerId(peer) for peer in peers]
        if ends:
            pace.ended(container_id)
            running.pop(number, None)
        elif pace.may_request(container_id, on, now_s):
            pace.requested(container_id, on, now_s)
            running[number] = peers
            times.append(now_s)
        for peer in PEERS:
            assert sum(peer in held for held in running.values()) <= per_datanode
        if per_hour:
            assert sum(time > now_s - 3600 for time in times) <= per_hour
