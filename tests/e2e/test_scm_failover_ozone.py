"""Three real SCMs of one group: a follower names the leader, a leader that dies is
followed, and a membership of our own is known to each of them.
"""

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from merkle.replica import PeerId
from ozone.scm_client import NodeOperation, ScmClient
from ozone.scm_membership import ScmMembership
from runtime.errors import PeerUnavailableError
from tests.support.ozone import eventually
from tests.support.ozone_scms import ScmProcesses

# Alone, an election and the end of a lease take some seconds.
ELECTION_S = 40.0

pytestmark = [pytest.mark.ozone, pytest.mark.datanodes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def scms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScmProcesses]:
    with ScmProcesses(tmp_path_factory.mktemp("scms") / "group") as found:
        yield found


def leader_of(scms: ScmProcesses) -> int:
    """The number of the SCM that leads."""
    with closing(ScmClient(scms.addresses, election_s=ELECTION_S)) as client:
        client.identity()
        return scms.addresses.index(client.leader_address)


def test_a_leader_that_dies_is_followed_and_knows_our_membership(scms: ScmProcesses) -> None:
    first = leader_of(scms)
    followers = [number for number in range(3) if number != first]
    for number in followers:
        with (
            closing(ScmClient([scms.addresses[number]])) as client,
            pytest.raises(PeerUnavailableError) as caught,
        ):
            client.nodes()
        assert "ServerNotLeaderException" in caught.value.message
        # By its name, and with the port of whoever answers.
        named = f"Suggested leader is Server:localhost:{scms.addresses[number].rpartition(':')[2]}."
        assert named in caught.value.message
    own = PeerId(str(uuid.uuid4()))
    order = [scms.addresses[number] for number in (*followers, first)]
    with (
        closing(ScmClient(order, election_s=ELECTION_S)) as client,
        closing(ScmMembership(scms.datanode_addresses, own, 24_998)) as member,
    ):
        identity = client.identity()
        assert sum("LEADER" in line for line in identity.scms) == 1
        assert len(identity.scms) == 3
        member.register(())
        assert member.silent == ()

        def is_known() -> bool:
            return [(one.peer, one.operation) for one in client.nodes()] == [
                (own, NodeOperation.DECOMMISSIONED)
            ]

        eventually("the leader lists us", is_known)
        scms.kill(first)
        # The next leader was told too, and answers as soon as it leads.
        assert is_known()
        assert client.leader_address != scms.addresses[first]
        assert client.identity().cluster_id == identity.cluster_id
        assert not member.heartbeat()
        assert member.silent == (scms.datanode_addresses[first],)
        # It comes back without what it was told before its end.
        scms.start(first)
        eventually("it does not know us", member.heartbeat)
        member.register(())
        eventually("all of them know us", lambda: not member.heartbeat())
        assert member.silent == ()
