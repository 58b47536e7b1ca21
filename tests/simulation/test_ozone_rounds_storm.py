"""Ozone's own reconciliation is driven on a twin of the cluster, through lost requests,
restarts and silence of SCM. Every container ends; what is said of it holds.
"""

import pytest

from runtime.errors import PeerUnavailableError
from scm.ozone_driver import OzoneDriver
from scm.ozone_rounds import OZONE_ROUNDS_MAX, OzoneOutcome, OzoneRun
from scm.pace import PaceLimits
from tests.support.ozone_cluster_twin import SETTLE_S, OzoneClusterTwin

POLL_S = 5.0
# Far longer than the rounds of all containers one after the other.
END_S = 200_000.0


def drive(twin: OzoneClusterTwin, driver: OzoneDriver, *, faults: bool) -> dict[int, OzoneRun]:
    """Poll until all have ended; what is said of each is checked when it is said."""
    ended = dict[int, OzoneRun]()
    while driver.runs:
        assert twin.now_s < END_S
        if faults:
            twin.is_down = twin.random.random() < 0.1
            twin.drop_requests = twin.random.random() < 0.05
            if twin.random.random() < 0.005:
                twin.restart_scm()
        try:
            finished = driver.poll(twin.now_s)
        except PeerUnavailableError:
            finished = []
        for run in finished:
            assert run.container_id not in ended
            ended[run.container_id] = run
            one = twin.containers[run.container_id]
            known = set(one.reported.values())
            if run.outcome is OzoneOutcome.EQUAL:
                assert len(known) == 1
                assert None not in known
            if run.outcome is OzoneOutcome.NOT_CONVERGING:
                assert len(known - {None}) > 1
        twin.advance(POLL_S)
    return ended


@pytest.mark.parametrize("seed", range(8))
def test_every_container_ends_and_only_hopeless_ones_do_not_converge(seed: int) -> None:
    twin = OzoneClusterTwin(seed, datanodes=5)
    for number in range(1, 13):
        twin.add(number, rounds=twin.random.randint(0, 3), hopeless=number % 4 == 0)
    driver = OzoneDriver(twin, PaceLimits(per_datanode=2), settle_s=SETTLE_S)
    driver.add(twin.containers)
    ended = drive(twin, driver, faults=False)
    assert set(ended) == set(twin.containers)
    for number, one in twin.containers.items():
        is_hopeless = one.hopeless and not one.is_equal
        wanted = OzoneOutcome.NOT_CONVERGING if is_hopeless else OzoneOutcome.EQUAL
        assert ended[number].outcome is wanted
    assert twin.concurrent_max <= 2


@pytest.mark.parametrize("seed", range(8))
def test_faults_of_scm_cost_rounds_and_never_a_false_word(seed: int) -> None:
    twin = OzoneClusterTwin(seed, datanodes=4)
    for number in range(1, 9):
        twin.add(number, rounds=twin.random.randint(1, 2), hopeless=number % 4 == 0)
    driver = OzoneDriver(twin, PaceLimits(per_datanode=3), settle_s=SETTLE_S)
    driver.add(twin.containers)
    ended = drive(twin, driver, faults=True)
    assert set(ended) == set(twin.containers)
    assert max(twin.requests.values()) <= OZONE_ROUNDS_MAX
    assert not any(
        run.outcome is OzoneOutcome.EQUAL
        for number, run in ended.items()
        if twin.containers[number].hopeless
    )


def test_a_replica_that_goes_away_leaves_its_container_unknown_or_refused() -> None:
    twin = OzoneClusterTwin(1, datanodes=3)
    twin.add(1, rounds=0)
    driver = OzoneDriver(twin, PaceLimits(), settle_s=SETTLE_S)
    driver.add(twin.containers)
    driver.poll(twin.now_s)
    twin.lose_replica(1)
    twin.lose_replica(1)
    [run] = driver.poll(twin.now_s)
    assert run.outcome is OzoneOutcome.REFUSED
    assert "no peer to compare with" in run.detail
