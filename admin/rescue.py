"""`treefold rescue`: heal containers of a running cluster that Ozone's own reconcile
cannot heal.
"""

import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from admin.answer import container_ids, json_option
from admin.client_config import client_config
from admin.cluster_agents import ClusterAgents, agents_option
from admin.clusters import (
    UNKNOWN_CONTAINER_HINT,
    cluster_option,
    open_cluster,
    open_datanode,
)
from admin.command_result import CommandResult, command_result
from admin.confirmation import is_confirmed
from admin.option_types import WholeNumber
from admin.paths import LocalPath, state_home
from live.agent_peer import AgentFirstPeer
from live.diagnosis import reason_not_compared, reason_not_read
from live.rescue import RescueOutcome, RescuePhase
from live.rescue_runner import RescueFolder, RescueRunner, Staged, stage, withdraw
from merkle.outcome import OutcomeState, Verdict
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId, root_hex
from ozone.errors import ContainerNotFoundError, ContainerStateError, ContainerUnsupportedError
from ozone.scm_client import ClusterContainer, ClusterIdentity, ClusterNode, ScmClient
from ozone.scm_membership import ScmMembership
from repair.peers import DatanodePeer
from repair.ports import Peer
from runtime.disk import Disk
from runtime.errors import PeerUnavailableError, RemoteProtocolError, UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject
from runtime.rate_limit import RateLimiter, SystemClock
from runtime.setting_values import check_address, parse_rate, split_address

# Of all datanodes together.
_RATE = "100MB/s"
# Below those that the kernel gives to outgoing connections, from 32768.
_PORT_FIRST, _PORTS = 24_000, 8_000
# A folder of rescues bears the cluster's ID.
_FOLDER_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,99}")
_INCOMPLETE_HINT = (
    "Check --datanode-port, and that datanodes reach --listen; then run the same command again."
)
_STAGING_HINT = (
    "Nothing joined the cluster. The folder is below $XDG_STATE_HOME, or else ~/.local/state: give"
    " it room for the damaged chunks, then run the same command again."
)
_UNHEALTHY = (
    "Ozone leaves replicas UNHEALTHY although their data are whole again: an agent returns them to"
    " service by `treefold reconcile`, each while its datanode is stopped"
)


@dataclass(frozen=True, slots=True)
class _Options:
    is_dry_run: bool
    plan: Path | None
    yes: bool
    listen: str
    datanode_port: int | None
    bytes_per_second: int
    agents: ClusterAgents


@click.command()
@click.argument("arguments", metavar="[ID... | -]", nargs=-1)
@cluster_option(required=True)
@click.option("--dry-run", is_flag=True, help="Print the plan, and change nothing.")
@click.option(
    "--plan",
    metavar="FILE",
    type=LocalPath(dir_okay=False, path_type=Path),
    help="Also write the plan to this file, as JSON.",
)
@click.option("--yes", is_flag=True, help="Do not ask before joining the cluster.")
@click.option(
    "--clean", is_flag=True, help="Without IDs: remove what a killed rescue left, here and at SCM."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where datanodes read from us. Default: our address for SCM, one port for ever.",
)
@click.option(
    "--datanode-port",
    type=WholeNumber(1, 65_535),
    help="SCM's port for datanodes. Default: the client port and one, as 9860 and 9861.",
)
@click.option(
    "--rate",
    default=_RATE,
    show_default=True,
    help="Read at most this much from the cluster in a second; 0 is no limit.",
)
@agents_option
@json_option
def rescue(
    *,
    arguments: tuple[str, ...],
    cluster: str,
    dry_run: bool,
    plan: Path | None,
    yes: bool,
    clean: bool,
    listen: str | None,
    datanode_port: int | None,
    rate: str,
    agents: str,
    as_json: bool,
) -> None:
    """Heal containers of a running cluster that Ozone's own reconcile cannot heal.

    Reads the damaged chunks from all replicas, and puts them together window by window
    in a folder of this machine. Each window is proven against its recorded checksum.
    Then joins the cluster for seconds as a datanode that is never written to, lets the
    real datanodes reconcile from it, and leaves. What cannot be proven is named and
    left alone. Where an agent runs on a datanode's host, it gives the bytes.

    SCM's list keeps one DEAD datanode for each cluster and user.

    \b
    Exit status:
      0  all is healed, or nothing is damaged
      3  --dry-run: there is something to heal
      4  some damage is beyond repair, as far as the replicas show
      5  some is healed or can be healed, and some not
      6  refused: not confirmed, or not possible for such a container
      7  SCM or a datanode with a replica is unreachable
      8  another rescue of this cluster runs
    """
    with command_result("rescue", as_json=as_json) as answer:
        if bool(arguments) == clean:
            raise UsageError("give the IDs of containers, or --clean alone")
        if clean and (dry_run or plan):
            raise UsageError("--clean has no plan", hint="Leave out --dry-run and --plan.")
        ids = None if clean else sorted(map(ContainerId, container_ids(arguments)))
        try:
            limit = parse_rate(rate)
        except ValueError as error:
            raise UsageError(f"--rate: {error}") from error
        try:
            check_address(listen or "127.0.0.1:0")
        except ValueError as error:
            raise UsageError(f"--listen: {error}") from error
        found = ClusterAgents(agents, client_config(os.environ))
        options = _Options(dry_run, plan, yes, listen or "", datanode_port, limit, found)
        with open_cluster(cluster) as directory:
            _rescue_all(directory, ids, options, answer)


def _rescue_all(
    directory: ScmClient, ids: list[ContainerId] | None, options: _Options, answer: CommandResult
) -> None:
    """Rescue the containers, or clean up if `ids` is None."""
    identity = directory.identity()
    with RescueFolder(state_home() / "rescue" / _folder_name(identity), Disk()) as rescues:
        if not options.listen:
            host = _local_address(directory.leader_address).rpartition(":")[0]
            node = rescues.node(lambda one: is_free(host.strip("[]"), _port_of(one)))
            options = replace(options, listen=f"{host}:{_port_of(node)}")
        run = _Run(directory, rescues, options, answer, identity.cluster_id)
        if ids is None:
            run.clean()
            return
        if identity.in_safe_mode:
            answer.warn("SCM is in safe mode: it may not know all replicas yet")
        # What is said of the first ones must not be lost with an error at the last.
        answer.data = {"clusterID": identity.cluster_id, "containers": run.results}
        waiting = [run.container(number) for number in ids]
        with _sigterm_interrupts():
            while waiting and run.status is not ExitCode.INTERRUPTED:
                run.rescue(waiting.pop(0))
        if waiting:
            rest = ", ".join(str(one.container_id) for one in waiting)
            answer.warn(f"interrupted: the rescue of container {rest} was not begun")
        for problem in options.agents.problems:
            answer.warn(problem)
        answer.exit_status = run.status or answer.exit_status


def _folder_name(identity: ClusterIdentity) -> str:
    """The cluster's ID as the name of a folder.

    Raises:
        RemoteProtocolError: SCM sent one that would be a path.
    """
    if not _FOLDER_NAME.fullmatch(identity.cluster_id):
        raise RemoteProtocolError(
            f"SCM sent cluster ID {identity.cluster_id[:100]!r}, which cannot name a folder",
            hint="Is this address really that of an SCM? Its cluster ID begins with CID-.",
        )
    return identity.cluster_id


def _port_of(node: PeerId) -> int:
    """The port at which a node listens by default, always the same: SCM keeps the ports
    of the first registration of a UUID.
    """
    return _PORT_FIRST + int(node.replace("-", ""), 16) % _PORTS


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens at a port of this machine now."""
    try:
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            return True
    except OSError:
        return False


def _local_address(scm_address: str) -> str:
    """The address of this machine from which SCM sees our connections, with any
    port.
    """
    host, port = split_address(scm_address)
    try:
        [(family, _, _, _, where), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only chooses the route.
            probe.connect(where)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise PeerUnavailableError(f"{scm_address}: {error.strerror or error}") from error
    return f"[{found}]:0" if ":" in found else f"{found}:0"


@dataclass
class _Run:
    """The rescues of one command."""

    directory: ScmClient
    folder: RescueFolder
    options: _Options
    answer: CommandResult
    cluster_id: str
    results: list[JsonObject] = field(default_factory=list)
    plans: list[JsonObject] = field(default_factory=list)
    status: ExitCode = ExitCode.CLEAN

    def __post_init__(self) -> None:
        rate = self.options.bytes_per_second
        self.limiter = RateLimiter(rate, SystemClock(), threading.Event().wait)

    def clean(self) -> None:
        """Remove what killed rescues left."""
        left = len(self.folder.leftovers())
        self.folder.clean()
        own = self.folder.node()
        # Whoever never joined would leave a DEAD datanode by withdrawing.
        is_listed = any(node.peer == own for node in self.directory.nodes())
        if is_listed:
            member = self._join(split_address(self.options.listen)[1] or 1)
            try:
                withdraw(member)
            finally:
                member.close()
            self._warn_of_untold(member.silent)
        self.answer.data = {"removed": left, "withdrawn": is_listed}
        self.answer.print(f"{left} staged containers were removed; SCM has no replica of ours")

    def rescue(self, container: ClusterContainer) -> None:
        """Plan and carry out the rescue of one container."""
        own, container_id = self.folder.node(), container.container_id
        with ExitStack() as stack:
            # Without SCM nothing can be rescued: only what datanodes do not answer is a
            # matter of one container.
            replicas = self._replicas(container_id, own)
            try:
                peers = self._peers(replicas, stack)
                staging = stack.enter_context(self.folder.staging(container_id))
                staged = stage(
                    container_id,
                    own,
                    peers,
                    staging,
                    Disk(),
                    bcs_id=container.bcs_id,
                    reserve=self.limiter.take,
                )
            except PeerUnavailableError as error:
                text = f"container {container_id}: {error.message}"
                self.answer.fail(error.code, text, hint=error.hint)
                self._raise_status(ExitCode.UNREACHABLE)
                return
            if staged.outcome.state is not OutcomeState.DONE:
                # Half of a plan would pass for the whole one.
                text = f"container {container_id} was not staged: {staged.outcome.message}"
                self.answer.fail(staged.outcome.error_code, text, hint=_STAGING_HINT)
                self._raise_status(ExitCode.FAILED)
                return
            self._show_plan(container_id, staged)
            if not staged.replica.staged:
                self._raise_status(_status_of_rest(staged))
                return
            if self.options.is_dry_run:
                self._raise_status(ExitCode.PARTLY if staged.rest else ExitCode.FINDINGS)
                return
            question = f"Join the cluster, and heal container {container_id} from here?"
            if not is_confirmed(self.answer, question, yes=self.options.yes):
                self.status = ExitCode.REFUSED
                return
            self._carry_out(container_id, own, peers, staged)

    def container(self, container_id: ContainerId) -> ClusterContainer:
        """The container as SCM knows it.

        Raises:
            ContainerNotFoundError: SCM does not know it.
            ContainerUnsupportedError: it is erasure-coded.
            ContainerStateError: it is not closed.
        """
        container = self.directory.get_containers([container_id]).get(container_id)
        if container is None:
            raise ContainerNotFoundError(
                f"container {container_id} is not known to SCM", hint=UNKNOWN_CONTAINER_HINT
            )
        if container.is_erasure_coded:
            raise ContainerUnsupportedError(
                f"container {container_id} is erasure-coded ({container.replication}): its replicas"
                " hold different data, so no replica can give another one its bytes",
                hint="Ozone reconstructs a lost replica of such a container by itself.",
            )
        if reason := reason_not_compared(container):
            raise ContainerStateError(f"container {container_id}: {reason}")
        return container

    def _replicas(
        self, container_id: ContainerId, own: PeerId
    ) -> list[tuple[ContainerReplica, ClusterNode | None]]:
        """The replicas that SCM lists, each with its node.

        Raises:
            ContainerStateError: there is none.
        """
        nodes = {node.peer: node for node in self.directory.nodes()}
        listed = self.directory.replicas([container_id]).get(container_id, ())
        # One of ours is of a rescue that was killed: SCM has not forgotten it yet.
        found = [(one, nodes.get(one.peer)) for one in listed if one.peer != own]
        if not found:
            raise ContainerStateError(f"container {container_id} has no replica")
        return found

    def _peers(
        self, replicas: Sequence[tuple[ContainerReplica, ClusterNode | None]], stack: ExitStack
    ) -> dict[PeerId, Peer]:
        peers: dict[PeerId, Peer] = {}
        for replica, node in replicas:
            reason = reason_not_read(replica, node)
            if reason or node is None:
                raise PeerUnavailableError(
                    f"replica on {replica.peer}: {reason}",
                    hint="A rescue reads all replicas: a silent one may know of a deletion.",
                )
            peer: Peer = DatanodePeer(replica.peer, open_datanode(node))
            if agent := self.options.agents.find(node):
                peer = AgentFirstPeer(peer, agent.peer)
            stack.callback(peer.close)
            peers[replica.peer] = peer
        return peers

    def _show_plan(self, container_id: ContainerId, staged: Staged) -> None:
        plan = _plan_json(container_id, staged)
        self.plans.append(plan)
        self.results.append(dict(plan))
        if self.options.plan:
            # Before anything changes: a plan that cannot be written stops the rescue.
            document = {"schema_version": 1, "clusterID": self.cluster_id, "containers": self.plans}
            raw = json.dumps(document, indent=1)
            Disk().replace(self.options.plan, raw.encode() + b"\n")
        self.answer.print(_plan_text(container_id, staged))

    def _carry_out(
        self, container_id: ContainerId, own: PeerId, peers: dict[PeerId, Peer], staged: Staged
    ) -> None:
        runner = RescueRunner(
            self.directory,
            peers,
            own,
            self.options.listen,
            self._join,
            reserve=self.limiter.take,
        )

        def show(phase: RescuePhase) -> None:
            self.answer.print(f"container {container_id}: {phase.value}")

        with _interrupts(runner.cancelled):
            outcome = runner.run(container_id, staged.replica, show)
        self.results[-1] |= _outcome_json(outcome)
        self.answer.print(_outcome_text(container_id, outcome))
        if not outcome.is_complete and outcome.reason and not runner.cancelled.is_set():
            text = f"container {container_id}: {outcome.reason}"
            self.answer.fail("rescue_incomplete", text, hint=_INCOMPLETE_HINT)
        if outcome.has_left:
            self._warn_of_untold(outcome.untold)
        else:
            self.answer.warn(
                "SCM may list our replica until it calls our datanode DEAD;"
                " `treefold rescue --clean` removes it"
            )
        if outcome.unhealthy:
            self.answer.warn(f"{_UNHEALTHY}: {', '.join(outcome.unhealthy)}")
        is_whole = outcome.is_complete and not staged.rest
        self._raise_status(ExitCode.CLEAN if is_whole else ExitCode.PARTLY)
        if runner.cancelled.is_set():
            self.status = ExitCode.INTERRUPTED

    def _warn_of_untold(self, scms: Sequence[str]) -> None:
        if scms:
            self.answer.warn(
                f"SCM {', '.join(scms)} did not hear that we left: if it ever leads, it may list"
                " our replica until it calls our datanode DEAD"
            )

    def _join(self, port: int) -> ScmMembership:
        addresses = list[str]()
        for address in self.directory.addresses:
            host, client_port = split_address(address)
            host = f"[{host}]" if ":" in host else host
            addresses.append(f"{host}:{self.options.datanode_port or client_port + 1}")
        return ScmMembership(addresses, self.folder.node(), port)

    def _raise_status(self, status: ExitCode) -> None:
        self.status = max(self.status, status)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what has joined nothing yet as Ctrl-C does: what was staged goes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupts(cancelled: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the rescue, which still leaves the cluster."""
    before = {
        one: signal.signal(one, lambda *_: cancelled.set())
        for one in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _status_of_rest(staged: Staged) -> ExitCode:
    if staged.outcome.verdict is Verdict.UNRECOVERABLE:
        return ExitCode.UNRECOVERABLE
    return ExitCode.PARTLY if staged.rest else ExitCode.CLEAN


def _plan_json(container_id: ContainerId, staged: Staged) -> JsonObject:
    return {
        "containerID": container_id,
        "root": root_hex(staged.replica.tree.data_checksum),
        "bytesRead": staged.bytes_read,
        "chunks": [_chunk_json(staged, place) for place in sorted(staged.replica.staged)],
        "leftAlone": [
            {
                "localID": one.block_id,
                "offset": one.offset,
                "reason": one.kind,
                "detail": one.detail,
            }
            for one in staged.rest
        ],
    }


def _chunk_json(staged: Staged, place: tuple[int, int]) -> JsonObject:
    ranges, record = staged.of_chunk(place)
    return {
        "localID": place[0],
        "offset": place[1],
        "length": record.length_bytes,
        "checksumType": record.checksum_type.name,
        "bytesPerChecksum": record.bytes_per_checksum,
        "dataChecksum": root_hex(record.data_checksum),
        "ranges": [
            {"offset": one.offset, "length": one.length_bytes, "source": one.source}
            for one in ranges
        ],
    }


def _plan_text(container_id: ContainerId, staged: Staged) -> str:
    places = sorted(staged.replica.staged)
    lines = [
        f"container {container_id}: {len(places)} chunks can be healed,"
        f" {len(staged.rest)} findings are left alone; {staged.bytes_read} bytes were read"
    ]
    for place in places:
        ranges, record = staged.of_chunk(place)
        sizes = Counter[str]()
        for one in ranges:
            sizes[one.source] += one.length_bytes
        sources = ", ".join(f"{size} bytes from {peer}" for peer, size in sorted(sizes.items()))
        lines.append(
            f"  block {place[0]} chunk at {place[1]}: {len(record.checksums)} windows proven by"
            f" {record.checksum_type.name} of {record.bytes_per_checksum} bytes: {sources}"
        )
    lines += (
        f"  left alone: block {one.block_id} chunk at {one.offset}: {one.kind}: {one.detail}"
        for one in staged.rest
    )
    return "\n".join(lines)


def _outcome_json(outcome: RescueOutcome) -> JsonObject:
    return {
        "healed": list(outcome.healed),
        "unhealed": list(outcome.unhealed),
        "unhealthy": list(outcome.unhealthy),
        "left": outcome.has_left,
        "untoldSCMs": list(outcome.untold),
        "reconciles": outcome.attempts,
        "bytesReadBack": outcome.bytes_read_back,
        "reason": outcome.reason,
    }


def _outcome_text(container_id: ContainerId, outcome: RescueOutcome) -> str:
    total = len(outcome.healed) + len(outcome.unhealed)
    text = f"container {container_id}: {len(outcome.healed)} of {total} replicas hold all of it"
    return f"{text}; {outcome.reason}" if outcome.reason else text
