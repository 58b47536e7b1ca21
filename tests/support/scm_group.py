"""The SCMs of one cluster in memory, of which one leads, each on sockets of its own and
with what datanodes told it. Tests kill them, start them again, and choose the leader.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer
from tests.support.scm_twin import ScmTwin, served

_TRIES = 20


class ScmGroup:
    """Some SCMs, each with its port for datanodes after its port for clients, as by
    Ozone's defaults. `leader` is the number of the one that leads, None during an
    election.
    """

    def __init__(self, count: int) -> None:
        # What Raft keeps equal at all of them.
        self.containers: dict[ContainerId, ClusterContainer] = {}
        self.members = [ScmTwin(containers=self.containers) for _ in range(count)]
        self._running: list[ExitStack | None] = [None] * count
        self._ports = [0] * count
        self.leader: int | None = 0
        for number in range(count):
            self.start(number)
        self.elect(0)

    @property
    def addresses(self) -> list[str]:
        """The ports for clients."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    @property
    def datanode_addresses(self) -> list[str]:
        """The ports for datanodes."""
        return [f"127.0.0.1:{port + 1}" for port in self._ports]

    @property
    def alive(self) -> list[ScmTwin]:
        """Those that run."""
        return [one for one, is_on in zip(self.members, self._running, strict=True) if is_on]

    def elect(self, number: int | None) -> None:
        """Let this one lead; the others name its host, as Ozone does, with a port of
        their own.
        """
        self.leader = number
        for at, member in enumerate(self.members):
            member.is_standby = at != number
            member.leader_hint = (
                "Could not determine the leader node."
                if number is None
                else f"Suggested leader is Server:127.0.0.1:{self._ports[at]}."
            )

    def kill(self, number: int) -> None:
        """End it at once: answers under way are lost."""
        if stack := self._running[number]:
            self._running[number] = None
            stack.close()

    def start(self, number: int) -> None:
        """Start it on its ports."""
        member = self.members[number]
        for _ in range(_TRIES):
            with ExitStack() as stack, suppress(OSError):
                address = stack.enter_context(served(member.serve, self._ports[number]))
                port = int(address.rpartition(":")[2])
                # Somebody else may have the port after a free one.
                stack.enter_context(served(member.serve_datanodes, port + 1))
                self._ports[number] = port
                self._running[number] = stack.pop_all()
                return
        raise AssertionError("no two ports in a row are free")

    def fail_over(self, number: int) -> None:
        """Kill the leader and let another one lead."""
        assert self.leader is not None
        died = self.leader
        self.elect(number)
        self.kill(died)

    def close(self) -> None:
        """End all of them."""
        for number in range(len(self.members)):
            self.kill(number)


@contextmanager
def scm_group(count: int) -> Iterator[ScmGroup]:
    """So many SCMs; the first one leads."""
    group = ScmGroup(count)
    try:
        yield group
    finally:
        group.close()
